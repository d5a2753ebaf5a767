//! Choice and weights of the experts.
//!
//! `s = σ(logits)`; the k experts with the largest `s + bias`, lower id first on exact ties, written in ascending id;
//! `expert_weights_j = s_j / Σ_chosen s`. All fp32. The bias chooses, it never weighs; the scaling (2.0) is applied by
//! [`super::moe_combine`]. Under replay the ids are given and only the weights are computed.
//!
//! Gradient, with w = expert_weights and S = Σ_chosen s: `ds_i = (dw_i − Σ_j dw_j·w_j)/S` for chosen i,
//! `dlogits_i = ds_i·s_i·(1 − s_i)`; 0 for the others, and none to the bias.
//!
//! Known values: logits [2, 1, 0, −1], bias [0, 0, 0, 1], k 2 → experts 0 and 3, weights 0.766085 and 0.233915 before the
//! scaling. Source: MoE block, router.

use crate::axes::{fixed, var};
use crate::op_spec::{Backward, EXPERT, EXPERT_SLOT, OpSpec, TOKEN, fp32, int};

/// Router.
pub const SPEC: OpSpec = OpSpec {
    name: "router",
    summary: "the k experts of every token and their weights",
    axes: &[
        var("T", "tokens"),
        fixed("E", "experts"),
        fixed("k", "experts per token"),
    ],
    constants: &[],
    inputs: &[
        fp32(
            "logits",
            &[TOKEN, EXPERT],
            "fp32 product of the rows with the fp32 router weight",
        ),
        fp32(
            "bias",
            &[EXPERT],
            "score correction, for the selection alone",
        ),
    ],
    outputs: &[
        int(
            "expert_ids",
            &[TOKEN, EXPERT_SLOT],
            "chosen experts, ascending",
        ),
        fp32(
            "expert_weights",
            &[TOKEN, EXPERT_SLOT],
            "weights before the scaling, in the order of the ids",
        ),
    ],
    flops: |a| a.eval("4*T*E + 2*T*k"),
    backward: Some(Backward {
        grads_in: &[fp32(
            "dexpert_weights",
            &[TOKEN, EXPERT_SLOT],
            "gradient of the weights",
        )],
        saved: &["logits", "expert_ids"],
        grads: &[fp32("dlogits", &[TOKEN, EXPERT], "gradient of the logits")],
        flops: |a| a.eval("8*T*k"),
    }),
    invariants: &[
        "ids are ascending, distinct and in range",
        "the weights of a token add up to 1",
        "a bias that flips the choice leaves the weights of equal ids alone",
        "equal scores choose the lowest ids",
        "logits that differ only below bf16 are told apart",
    ],
};
