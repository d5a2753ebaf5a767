//! Expert rows weighted and summed back into token rows.
//!
//! `y[t] = round(Σ_j (scaling · w_j) · down[row_of_slot[t][j]] + shared[t])`, fp32, j in ascending expert id; w =
//! `expert_weights[t]`. The weight is applied after the down projection. The shared expert has weight 1 and is not scaled.
//!
//! Gradient: `ddown[row] = round(scaling · w_j · dy[t])`, `dexpert_weights[t][j] = scaling · ⟨dy[t], down[row]⟩`; the shared
//! expert's is dy itself.
//!
//! Under expert parallelism it runs at the token's own rank over k separate rows, never over partial sums. Source: MoE block.

use crate::axes::{fixed, var};
use crate::op_spec::{
    Backward, EXPERT_SLOT, HIDDEN, OpSpec, ROW, TOKEN, constant, fp32, int, stored,
};

/// Weighted sum of expert rows.
pub const SPEC: OpSpec = OpSpec {
    name: "moe_combine",
    summary: "weighted sum of expert rows, plus the shared expert",
    axes: &[
        var("T", "tokens"),
        var("R", "rows in expert order, T·k"),
        fixed("H", "hidden size"),
        fixed("k", "experts per token"),
    ],
    constants: &[constant("scaling", "factor of the routed sum, 2.0")],
    inputs: &[
        stored(
            "down",
            &[ROW, HIDDEN],
            "expert rows after the down projection",
        ),
        fp32(
            "expert_weights",
            &[TOKEN, EXPERT_SLOT],
            "weights before the scaling",
        ),
        int("row_of_slot", &[TOKEN, EXPERT_SLOT], "row of every slot"),
        stored("shared", &[TOKEN, HIDDEN], "shared expert; may be absent"),
    ],
    outputs: &[stored("y", &[TOKEN, HIDDEN], "output of the MLP")],
    flops: |a| a.eval("2*R*H + R + T*H"),
    backward: Some(Backward {
        grads_in: &[stored("dy", &[TOKEN, HIDDEN], "gradient of y")],
        saved: &["down", "expert_weights", "row_of_slot"],
        grads: &[
            stored("ddown", &[ROW, HIDDEN], "gradient of the expert rows"),
            fp32(
                "dexpert_weights",
                &[TOKEN, EXPERT_SLOT],
                "gradient of the weights",
            ),
        ],
        flops: |a| a.eval("3*R*H"),
    }),
    invariants: &[
        "experts are added in ascending id",
        "the shared expert is not scaled",
        "a row has the same bits alone and in any batch",
    ],
};
