//! y = x·W_eᵀ for the rows of each expert e. Every group is a `linear` of its own; an expert may have no row. Rows past
//! the last expert's, in a buffer of fixed capacity, give zeros.

use super::linear;
use crate::math::{index, sequences};
use crate::{Precision, Rounding};
use std::ops::Range;

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Rows of x, at least those of all experts together.
    pub rows: usize,
    /// E
    pub experts: usize,
    /// Outputs of an expert.
    pub n: usize,
    /// Inputs of an expert.
    pub k: usize,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes.
    pub params: Params,
    /// `[rows, k]`, grouped by expert
    pub x: &'a [f64],
    /// `[E, n, k]`
    pub w: &'a [f64],
    /// First row of each expert, then the end of the last: `[E+1]`
    pub expert_offsets: &'a [i32],
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
    /// `[rows, k]`; each row in storage precision, before the rows of a token are summed
    pub dx: Vec<f64>,
    /// `[E, n, k]`, fp32
    pub dw: Vec<f64>,
}

/// One rounding.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let mut y = Vec::new();
    for (_, group) in groups(inputs) {
        y.extend(linear::forward(&group, rounding).y);
    }
    y.resize(inputs.params.rows * inputs.params.n, 0.0);
    Output { y }
}

/// One rounding each.
pub fn backward(inputs: &Inputs, _: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let n = inputs.params.n;
    assert_eq!(grads.dy.len(), inputs.params.rows * n, "dy is [rows, n]");
    let mut gradients = Gradients {
        dx: Vec::new(),
        dw: Vec::new(),
    };
    for (rows, group) in groups(inputs) {
        let dy = &grads.dy[rows.start * n..rows.end * n];
        let unread = linear::Output { y: Vec::new() };
        let of_group = linear::backward(&group, &unread, &linear::Grads { dy }, rounding);
        gradients.dx.extend(of_group.dx);
        gradients.dw.extend(of_group.dw);
    }
    gradients
        .dx
        .resize(inputs.params.rows * inputs.params.k, 0.0);
    gradients
}

/// Rows and operands of each expert.
fn groups<'a>(inputs: &Inputs<'a>) -> Vec<(Range<usize>, linear::Inputs<'a>)> {
    let Params {
        rows,
        experts,
        n,
        k,
    } = inputs.params;
    assert_eq!(inputs.w.len(), experts * n * k, "w is [experts, n, k]");
    assert_eq!(
        inputs.expert_offsets.len(),
        experts + 1,
        "expert_offsets is [experts + 1]"
    );
    let used = inputs.expert_offsets.last().map_or(0, |&end| index(end));
    assert!(used <= rows, "expert_offsets ends inside the rows");
    sequences(inputs.expert_offsets)
        .enumerate()
        .map(|(expert, rows)| {
            let (y, dx) = (Precision::Storage, Precision::Storage);
            let params = linear::Params {
                rows: rows.len(),
                n,
                k,
                y,
                dx,
            };
            let x = &inputs.x[rows.start * k..rows.end * k];
            let w = &inputs.w[expert * n * k..(expert + 1) * n * k];
            (rows, linear::Inputs { params, x, w })
        })
        .collect()
}
