//! One AdamW step on a slice of a parameter.
//!
//! `g = grad_scale·dw`, `m = β₁·m + (1 − β₁)·g`, `v = β₂·v + (1 − β₂)·g²`,
//! `w −= lr·( (m/(1 − β₁^step)) / (√(v/(1 − β₂^step)) + eps) + weight_decay·w )`, `stored = round(w)`.
//!
//! w, m and v are fp32; `stored` is the parameter that the model reads. `grad_scale` is min(1, max_norm/(norm + 1e-6)) with
//! norm the global L2 norm of all trained slices. A non-finite norm skips the step. `step` is 1 at the first one. Slices
//! with `trained = false` are never passed here. Source: gradients and Adam, RL loop.

use crate::axes::fixed;
use crate::op_spec::{OpSpec, constant, fp32, int, plain, stored};

/// Optimizer step.
pub const SPEC: OpSpec = OpSpec {
    name: "adamw",
    summary: "one AdamW step with decoupled weight decay",
    axes: &[fixed("n", "elements of the slice")],
    constants: &[
        constant("betas", "0.9, 0.98"),
        constant("eps", "added to the root, 1e-8"),
        constant("weight_decay", "decoupled"),
    ],
    inputs: &[
        fp32("w", &[plain("n")], "master weight"),
        fp32("dw", &[plain("n")], "gradient"),
        fp32("m", &[plain("n")], "first moment"),
        fp32("v", &[plain("n")], "second moment"),
        fp32("learning_rate", &[plain("1")], "learning rate"),
        int("step", &[plain("1")], "1 at the first step"),
        fp32("grad_scale", &[plain("1")], "clip coefficient"),
    ],
    outputs: &[
        fp32("w", &[plain("n")], "master weight"),
        fp32("m", &[plain("n")], "first moment"),
        fp32("v", &[plain("n")], "second moment"),
        stored("stored", &[plain("n")], "the parameter"),
    ],
    flops: |a| a.eval("16*n"),
    backward: None,
    invariants: &[
        "the first step moves a weight by about the learning rate, whatever the gradient's size",
        "a zero gradient and no weight decay leave the weight's bits",
        "a non-finite norm leaves w, m, v and the parameter as they were",
        "slices of a tensor equal the whole",
    ],
};
