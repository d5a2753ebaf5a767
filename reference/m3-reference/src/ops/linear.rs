//! y = x·Wᵀ. No biases anywhere in the text model.

use crate::math::{axpy, dot_in_lanes, row, row_mut};
use crate::{Precision, Rounding};

/// Sizes, and where the two activations end.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Rows of x.
    pub rows: usize,
    /// Outputs, rows of W.
    pub n: usize,
    /// Inputs, columns of W.
    pub k: usize,
    /// Precision of y: fp32 for router logits, storage elsewhere.
    pub y: Precision,
    /// Precision of dx: fp32 where x has further consumers, so that their sum is rounded once.
    pub dx: Precision,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes.
    pub params: Params,
    /// `[rows, k]`
    pub x: &'a [f64],
    /// `[n, k]`
    pub w: &'a [f64],
}

/// What the op writes.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[rows, n]`
    pub y: Vec<f64>,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[rows, n]`
    pub dy: &'a [f64],
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[rows, k]`
    pub dx: Vec<f64>,
    /// `[n, k]`, fp32
    pub dw: Vec<f64>,
}

/// y = x·Wᵀ, one rounding.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params { rows, n, k, .. } = inputs.params;
    assert_eq!(inputs.x.len(), rows * k, "x is [rows, k]");
    assert_eq!(inputs.w.len(), n * k, "w is [n, k]");
    let mut y = Vec::with_capacity(rows * n);
    for i in 0..rows {
        for j in 0..n {
            y.push(dot_in_lanes(row(inputs.x, i, k), row(inputs.w, j, k)));
        }
    }
    Output {
        y: rounding.to_all(inputs.params.y, y),
    }
}

/// dx = dy·W and dW = dyᵀ·x, one rounding each.
pub fn backward(inputs: &Inputs, _: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Params { rows, n, k, .. } = inputs.params;
    assert_eq!(grads.dy.len(), rows * n, "dy is [rows, n]");
    let mut dx = vec![0.0; rows * k];
    let mut dw = vec![0.0; n * k];
    for i in 0..rows {
        for j in 0..n {
            let dy = grads.dy[i * n + j];
            axpy(row_mut(&mut dx, i, k), dy, row(inputs.w, j, k));
            axpy(row_mut(&mut dw, j, k), dy, row(inputs.x, i, k));
        }
    }
    Gradients {
        dx: rounding.to_all(inputs.params.dx, dx),
        dw: rounding.fp32_all(dw),
    }
}
