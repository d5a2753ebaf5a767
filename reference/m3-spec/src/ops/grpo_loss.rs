//! Clipped policy-gradient loss of a step, and its gradient.
//!
//! Per token, with A its advantage: `d = old_log_probs − log_probs`, `ρ = e^{clamp(−d, −20, 20)}`, `L1 = −ρ·A`,
//! `L2 = −clip(ρ, 1 − clip_low, 1 + clip_high)·A`, `L = max(L1, L2)`; with a dual clip c, for A < 0, at most −c·A.
//! `loss = Σ weights·L`, `ppo_kl = Σ weights·d`, `clipfrac = Σ weights·1[L2 > L1]`, all in a fixed order.
//!
//! A token's weight holds its mask and every denominator, so micro-batches add up and a fully masked sample counts nowhere.
//! Gradient: `dlog_probs = dloss · weights · (−ρ·A)` where L1 is the larger one and the clamp is inactive, else 0.
//!
//! Source: reward to advantage, policy loss and reduction, RL loop.

use crate::axes::var;
use crate::op_spec::{Backward, OpSpec, TOKEN, constant, fp32, plain};

/// Policy loss.
pub const SPEC: OpSpec = OpSpec {
    name: "grpo_loss",
    summary: "clipped policy-gradient loss",
    axes: &[var("T", "scored tokens")],
    constants: &[
        constant("clip_low", "0.2"),
        constant("clip_high", "0.28"),
        constant("dual_clip", "bound for negative advantages, absent"),
    ],
    inputs: &[
        fp32("log_probs", &[TOKEN], "of the pass that is differentiated"),
        fp32("old_log_probs", &[TOKEN], "of the policy before the step"),
        fp32("advantages", &[TOKEN], "advantage of the token's sample"),
        fp32(
            "weights",
            &[TOKEN],
            "mask over denominators, 0 where masked",
        ),
    ],
    outputs: &[
        fp32("loss", &[plain("1")], "weighted sum of the losses"),
        fp32(
            "ppo_kl",
            &[plain("1")],
            "weighted sum of old - new log-probability",
        ),
        fp32(
            "clipfrac",
            &[plain("1")],
            "weighted share of clipped tokens",
        ),
    ],
    flops: |a| a.eval("14*T"),
    backward: Some(Backward {
        grads_in: &[fp32("dloss", &[plain("1")], "gradient of the loss")],
        saved: &["log_probs", "old_log_probs", "advantages", "weights"],
        grads: &[fp32(
            "dlog_probs",
            &[TOKEN],
            "gradient of the log-probabilities",
        )],
        flops: |a| a.eval("12*T"),
    }),
    invariants: &[
        "equal old and new log-probabilities give ppo_kl exactly 0 and ratio 1",
        "a fully masked sample changes neither loss nor gradient",
        "micro-batches add up to the whole",
        "non-finite log-probabilities at masked tokens do not reach the loss",
    ],
};
