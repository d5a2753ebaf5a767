//! Rows of the embedding table. No scaling.

use crate::Rounding;
use crate::math::{axpy, index, row, row_mut};

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// V
    pub vocab: usize,
    /// H
    pub hidden: usize,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes.
    pub params: Params,
    /// `[V, H]`
    pub weight: &'a [f64],
    /// Token ids `[T]`.
    pub ids: &'a [i32],
}

/// What the op writes.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[T, H]`
    pub x: Vec<f64>,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T, H]`
    pub dx: &'a [f64],
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[V, H]`, fp32
    pub dweight: Vec<f64>,
}

/// A copy: the table is stored already, so nothing rounds.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params { vocab, hidden } = inputs.params;
    assert_eq!(
        inputs.weight.len(),
        vocab * hidden,
        "weight is [vocab, hidden]"
    );
    let x = inputs
        .ids
        .iter()
        .flat_map(|&id| row(inputs.weight, index(id), hidden))
        .copied();
    Output {
        x: rounding.store_all(x.collect()),
    }
}

/// Every occurrence of an id adds its row.
pub fn backward(inputs: &Inputs, _: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Params { vocab, hidden } = inputs.params;
    assert_eq!(
        grads.dx.len(),
        inputs.ids.len() * hidden,
        "dx is [tokens, hidden]"
    );
    let mut dweight = vec![0.0; vocab * hidden];
    for (t, &id) in inputs.ids.iter().enumerate() {
        axpy(
            row_mut(&mut dweight, index(id), hidden),
            1.0,
            row(grads.dx, t, hidden),
        );
    }
    Gradients {
        dweight: rounding.fp32_all(dweight),
    }
}
