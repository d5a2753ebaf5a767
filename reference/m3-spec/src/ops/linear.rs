//! A linear layer without bias.
//!
//! `y = x · wᵀ` with w `[N, K]` (out, in). Gradients: `dx = dy · w`, `dw = dyᵀ · x`.
//!
//! The sum over K runs in one fixed order per element, so a row's bits depend on neither the number of rows nor on the
//! columns computed beside it. Router and head call it with fp32 output. Source: text decoder forward; parity ladder.

use crate::axes::{fixed, var};
use crate::op_spec::{Backward, OpSpec, TOKEN, fp32, plain, stored};

/// Linear layer.
pub const SPEC: OpSpec = OpSpec {
    name: "linear",
    summary: "y = x · wᵀ",
    axes: &[
        var("T", "rows"),
        fixed("N", "output channels"),
        fixed("K", "input channels"),
    ],
    constants: &[],
    inputs: &[
        stored("x", &[TOKEN, plain("K")], "input rows"),
        stored("w", &[plain("N"), plain("K")], "weight, (out, in)"),
    ],
    outputs: &[stored("y", &[TOKEN, plain("N")], "output rows")],
    flops: |a| a.eval("2*T*N*K"),
    backward: Some(Backward {
        grads_in: &[stored("dy", &[TOKEN, plain("N")], "gradient of y")],
        saved: &["x", "w"],
        grads: &[
            stored("dx", &[TOKEN, plain("K")], "gradient of x"),
            fp32("dw", &[plain("N"), plain("K")], "gradient of w"),
        ],
        flops: |a| a.eval("4*T*N*K"),
    }),
    invariants: &[
        "a row of y has the same bits alone and in any batch",
        "a column of y has the same bits when w is one slice of a fused weight",
        "zero rows give an empty y and a zero dw",
    ],
};
