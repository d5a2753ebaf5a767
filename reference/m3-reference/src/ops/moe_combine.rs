//! y = Σ over the chosen experts, ascending id, of (scaling · w_j) · down_j, plus the shared expert.
//!
//! The weight meets the row after the down projection. The shared expert is neither weighted nor scaled.

use crate::Rounding;
use crate::math::{axpy, dot, index, row, row_mut};

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// H
    pub hidden: usize,
    /// k
    pub topk: usize,
    /// Routed scaling factor, 2.0
    pub scaling: f64,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes and constants.
    pub params: Params,
    /// Rows of the down projection `[T·k, H]`, grouped by expert
    pub down: &'a [f64],
    /// `[T, k]`
    pub expert_weights: &'a [f64],
    /// Row of each (token, slot) `[T, k]`, slots in ascending expert id
    pub row_of_slot: &'a [i32],
    /// `[T, H]`; none without a shared expert
    pub shared: Option<&'a [f64]>,
}

/// What the op writes.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[T, H]`
    pub y: Vec<f64>,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T, H]`
    pub dy: &'a [f64],
}

/// Gradients that leave. That of `shared` is dy itself.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T·k, H]`
    pub ddown: Vec<f64>,
    /// `[T, k]`, fp32, from the stored rows
    pub dexpert_weights: Vec<f64>,
}

/// One sum, one rounding.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params {
        tokens,
        hidden,
        topk,
        scaling,
    } = inputs.params;
    check(inputs);
    let mut y = vec![0.0; tokens * hidden];
    for t in 0..tokens {
        let y = row_mut(&mut y, t, hidden);
        for slot in t * topk..(t + 1) * topk {
            let down = row(inputs.down, index(inputs.row_of_slot[slot]), hidden);
            axpy(y, scaling * inputs.expert_weights[slot], down);
        }
        if let Some(shared) = inputs.shared {
            axpy(y, 1.0, row(shared, t, hidden));
        }
    }
    Output {
        y: rounding.store_all(y),
    }
}

/// ddown_j = (scaling·w_j)·dy, one rounding; dw_j = scaling·⟨dy, down_j⟩, fp32.
pub fn backward(inputs: &Inputs, _: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Params {
        tokens,
        hidden,
        topk,
        scaling,
    } = inputs.params;
    check(inputs);
    assert_eq!(grads.dy.len(), tokens * hidden, "dy is [tokens, hidden]");
    let mut ddown = vec![0.0; tokens * topk * hidden];
    let mut dexpert_weights = Vec::with_capacity(tokens * topk);
    for slot in 0..tokens * topk {
        let r = index(inputs.row_of_slot[slot]);
        let dy = row(grads.dy, slot / topk, hidden);
        axpy(
            row_mut(&mut ddown, r, hidden),
            scaling * inputs.expert_weights[slot],
            dy,
        );
        dexpert_weights.push(scaling * dot(dy, row(inputs.down, r, hidden)));
    }
    Gradients {
        ddown: rounding.store_all(ddown),
        dexpert_weights: rounding.fp32_all(dexpert_weights),
    }
}

fn check(inputs: &Inputs) {
    let Params {
        tokens,
        hidden,
        topk,
        ..
    } = inputs.params;
    assert_eq!(
        inputs.down.len(),
        tokens * topk * hidden,
        "down is [tokens·topk, hidden]"
    );
    assert_eq!(
        inputs.expert_weights.len(),
        tokens * topk,
        "expert_weights is [tokens, topk]"
    );
    assert_eq!(
        inputs.row_of_slot.len(),
        tokens * topk,
        "row_of_slot is [tokens, topk]"
    );
}
