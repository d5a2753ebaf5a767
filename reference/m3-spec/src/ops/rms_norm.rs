//! Residual add and gemma RMSNorm.
//!
//! `r = round(resid + y)`, `out = round((r · rstd) · (1 + weight))`, `rstd = 1/√(mean(r²) + eps)`.
//! The norm reads the *rounded* r. The stored weight is zero-centred: 1 is added in fp32, never folded into bf16.
//! Without y (the first norm of the model) r is resid itself.
//!
//! Gradient, with x̂ = r·rstd and g = dout·(1 + weight):
//! `dresid = round(dr + rstd·(g − x̂·mean(g·x̂)))`, which is dy too; `dweight = Σ_t dout·x̂`.
//!
//! weight = −1 gives exactly 0; weight = 0 gives rows of unit rms. Source: gemma RMSNorm of the text decoder.

use crate::axes::{fixed, var};
use crate::op_spec::{Backward, HIDDEN, OpSpec, TOKEN, constant, fp32, stored};

/// Residual add and norm.
pub const SPEC: OpSpec = OpSpec {
    name: "rms_norm",
    summary: "residual add, then gemma RMSNorm of the rounded sum",
    axes: &[var("T", "tokens"), fixed("H", "hidden size")],
    constants: &[constant("eps", "added to the mean square, 1e-6")],
    inputs: &[
        stored("resid", &[TOKEN, HIDDEN], "residual stream"),
        stored(
            "y",
            &[TOKEN, HIDDEN],
            "output of the block before, to be added; may be absent",
        ),
        stored("weight", &[HIDDEN], "zero-centred weight"),
    ],
    outputs: &[
        stored(
            "r",
            &[TOKEN, HIDDEN],
            "rounded sum, the new residual stream",
        ),
        stored("out", &[TOKEN, HIDDEN], "normalised rows"),
    ],
    flops: |a| a.eval("6*T*H"),
    backward: Some(Backward {
        grads_in: &[
            stored(
                "dout",
                &[TOKEN, HIDDEN],
                "gradient of out, summed over its consumers",
            ),
            stored(
                "dr",
                &[TOKEN, HIDDEN],
                "gradient that reaches r past the norm; may be absent",
            ),
        ],
        saved: &["r", "weight"],
        grads: &[
            stored(
                "dresid",
                &[TOKEN, HIDDEN],
                "gradient of the sum, of both addends",
            ),
            fp32("dweight", &[HIDDEN], "gradient of the weight"),
        ],
        flops: |a| a.eval("10*T*H"),
    }),
    invariants: &[
        "weight -1 gives exactly 0",
        "weight 0 gives rows of unit rms",
        "the norm reads the rounded sum",
        "a row has the same bits alone and in any batch",
    ],
};
