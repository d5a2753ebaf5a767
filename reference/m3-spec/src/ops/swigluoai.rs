//! The gated activation of every MLP.
//!
//! With g' = min(gate, limit) and u' = clamp(up, −limit, limit): `y = round((u' + 1) · (g' · σ(alpha·g')))`.
//! The gate is clamped from above only.
//!
//! Gradient, with σ = σ(alpha·g'): `dgate = 1[gate ≤ limit]·dy·(u' + 1)·σ·(1 + alpha·g'·(1 − σ))`,
//! `dup = 1[−limit ≤ up ≤ limit]·dy·g'·σ`; a clamp passes the gradient at equality.
//!
//! Gate and up are the two halves of one product [gate; up], not interleaved. Known values at alpha 1.702, limit 7:
//! (−10, 0) → −4.058e-7, (1, −9) → −5.07477, (9, 0) = (7, 0). Source: swigluoai MLP.

use crate::axes::{fixed, var};
use crate::op_spec::{Backward, OpSpec, TOKEN, constant, plain, stored};

/// Gated activation.
pub const SPEC: OpSpec = OpSpec {
    name: "swigluoai",
    summary: "clamped SwiGLU with the +1 offset",
    axes: &[var("T", "rows"), fixed("F", "hidden size of the MLP")],
    constants: &[
        constant("alpha", "gain inside the sigmoid, 1.702"),
        constant("limit", "clamp, 7.0"),
    ],
    inputs: &[
        stored("gate", &[TOKEN, plain("F")], "gate half of the product"),
        stored("up", &[TOKEN, plain("F")], "up half of the product"),
    ],
    outputs: &[stored("y", &[TOKEN, plain("F")], "activated rows")],
    flops: |a| a.eval("7*T*F"),
    backward: Some(Backward {
        grads_in: &[stored("dy", &[TOKEN, plain("F")], "gradient of y")],
        saved: &["gate", "up"],
        grads: &[
            stored("dgate", &[TOKEN, plain("F")], "gradient of the gate half"),
            stored("dup", &[TOKEN, plain("F")], "gradient of the up half"),
        ],
        flops: |a| a.eval("14*T*F"),
    }),
    invariants: &[
        "gates above the limit give the value at the limit and no gradient",
        "very negative gates are not clamped",
        "an up of -1 gives exactly 0",
    ],
};
