//! One product per expert, over the expert's own rows.
//!
//! For row r of expert e: `y[r] = x[r] · w[e]ᵀ` with w `[E, N, K]`. Rows past the last expert's are set to zero.
//! Gradients: `dx[r] = dy[r] · w[e]`, `dw[e] = Σ_{rows of e} dy[r]ᵀ · x[r]`, rows in order.
//!
//! Gate and up are one product with N = 2F, gate rows first. A row's bits do not depend on the other rows of its expert,
//! and they are those of [`super::linear`] with `w[e]`. An expert without rows has a zero dw. Source: MoE block.

use crate::axes::{fixed, var};
use crate::op_spec::{Backward, EXPERT, OpSpec, ROW, Word, dim, fp32, int, plain, stored};

/// Product per expert.
pub const SPEC: OpSpec = OpSpec {
    name: "grouped_gemm",
    summary: "y = x · w[e]ᵀ over the rows of every expert",
    axes: &[
        var("R", "rows in expert order"),
        fixed("E", "experts"),
        fixed("N", "output channels"),
        fixed("K", "input channels"),
    ],
    constants: &[],
    inputs: &[
        stored("x", &[ROW, plain("K")], "rows in expert order"),
        stored(
            "w",
            &[EXPERT, plain("N"), plain("K")],
            "weights, (expert, out, in)",
        ),
        int(
            "expert_offsets",
            &[dim("E+1", Word::Expert)],
            "first row of every expert",
        ),
    ],
    outputs: &[stored("y", &[ROW, plain("N")], "output rows")],
    flops: |a| a.eval("2*R*N*K"),
    backward: Some(Backward {
        grads_in: &[stored("dy", &[ROW, plain("N")], "gradient of y")],
        saved: &["x", "w", "expert_offsets"],
        grads: &[
            stored("dx", &[ROW, plain("K")], "gradient of x"),
            fp32("dw", &[EXPERT, plain("N"), plain("K")], "gradient of w"),
        ],
        flops: |a| a.eval("4*R*N*K"),
    }),
    invariants: &[
        "a row has the same bits whatever else its expert holds",
        "an expert's rows equal a linear layer with its weight, bit for bit",
        "an expert without rows is skipped and has a zero dw",
    ],
};
