//! Rows of the tokens, once for each chosen expert, grouped by expert: experts ascending, tokens ascending inside one.

use crate::math::{axpy, id, index, row, row_mut};
use crate::{Precision, Rounding};

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// H
    pub hidden: usize,
    /// E
    pub experts: usize,
    /// k
    pub topk: usize,
    /// Precision of dx: fp32 where more is still to be added.
    pub dx: Precision,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes.
    pub params: Params,
    /// `[T, H]`
    pub x: &'a [f64],
    /// `[T, k]`, ascending
    pub expert_ids: &'a [i32],
}

/// What the op writes.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[T·k, H]`
    pub permuted: Vec<f64>,
    /// First row of each expert, then T·k: `[E+1]`
    pub expert_offsets: Vec<i32>,
    /// Row of each (token, slot) `[T, k]`
    pub row_of_slot: Vec<i32>,
    /// Token of each row `[T·k]`
    pub token_of_row: Vec<i32>,
}

/// Gradients that arrive: all that flows into the input of the MoE block.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T·k, H]`, each row in storage precision
    pub dpermuted: &'a [f64],
    /// `[T, H]`, from the shared expert
    pub dshared: Option<&'a [f64]>,
    /// `[T, H]`, from the router
    pub drouter: Option<&'a [f64]>,
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T, H]`
    pub dx: Vec<f64>,
}

/// A copy of rows, so nothing rounds.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params {
        tokens,
        hidden,
        experts,
        topk,
        ..
    } = inputs.params;
    assert_eq!(inputs.x.len(), tokens * hidden, "x is [tokens, hidden]");
    assert_eq!(
        inputs.expert_ids.len(),
        tokens * topk,
        "expert_ids is [tokens, topk]"
    );
    let mut output = Output {
        permuted: Vec::new(),
        expert_offsets: vec![0],
        row_of_slot: vec![-1; tokens * topk],
        token_of_row: Vec::new(),
    };
    for expert in 0..experts {
        for slot in 0..tokens * topk {
            if inputs.expert_ids[slot] == id(expert) {
                output.row_of_slot[slot] = id(output.token_of_row.len());
                output.token_of_row.push(id(slot / topk));
                output
                    .permuted
                    .extend_from_slice(row(inputs.x, slot / topk, hidden));
            }
        }
        output.expert_offsets.push(id(output.token_of_row.len()));
    }
    assert_eq!(
        output.token_of_row.len(),
        tokens * topk,
        "every expert id is below {experts}"
    );
    Output {
        permuted: rounding.store_all(output.permuted),
        ..output
    }
}

/// The rows of a token's experts in ascending expert id, then shared expert and router: one sum, one rounding.
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Params {
        tokens,
        hidden,
        topk,
        ..
    } = inputs.params;
    assert_eq!(
        grads.dpermuted.len(),
        tokens * topk * hidden,
        "dpermuted is [tokens·topk, hidden]"
    );
    let mut dx = vec![0.0; tokens * hidden];
    for t in 0..tokens {
        let dx = row_mut(&mut dx, t, hidden);
        for slot in t * topk..(t + 1) * topk {
            axpy(
                dx,
                1.0,
                row(grads.dpermuted, index(output.row_of_slot[slot]), hidden),
            );
        }
        for whole in [grads.dshared, grads.drouter].into_iter().flatten() {
            axpy(dx, 1.0, row(whole, t, hidden));
        }
    }
    Gradients {
        dx: rounding.to_all(inputs.params.dx, dx),
    }
}
