//! Choice and weights of the experts of a token.
//!
//! s = sigmoid(logits), c = s + bias. The k experts of largest c are chosen, of equal c the lower id; the bias goes no
//! further than that. The weights are s over its sum on the chosen; the routed scaling factor is `moe_combine`'s.
//! Everything is fp32, and the selection compares fp32 values.

use crate::Rounding;
use crate::math::{best_first, id, index, row, sigmoid};

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// E
    pub experts: usize,
    /// k
    pub topk: usize,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes.
    pub params: Params,
    /// `[T, E]`, fp32
    pub logits: &'a [f64],
    /// Score correction bias `[E]`, fp32
    pub bias: &'a [f64],
    /// Ids to use instead of the own choice `[T, k]`, ascending; scores and gradient are still the own ones.
    pub replay: Option<&'a [i32]>,
}

/// What the op writes.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Chosen experts `[T, k]`, ascending.
    pub expert_ids: Vec<i32>,
    /// Their weights `[T, k]`, fp32, in the order of the ids, sum 1.
    pub expert_weights: Vec<f64>,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T, k]`
    pub dexpert_weights: &'a [f64],
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T, E]`, fp32; zero for experts that were not chosen. The bias gets none.
    pub dlogits: Vec<f64>,
}

/// Sigmoid, c and weights one fp32 rounding each.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params {
        tokens,
        experts,
        topk,
    } = inputs.params;
    assert_eq!(
        inputs.logits.len(),
        tokens * experts,
        "logits is [tokens, experts]"
    );
    assert_eq!(inputs.bias.len(), experts, "one bias an expert");
    let mut output = Output {
        expert_ids: Vec::new(),
        expert_weights: Vec::new(),
    };
    for t in 0..tokens {
        let scores = scores(row(inputs.logits, t, experts), rounding);
        let chosen: Vec<usize> = match inputs.replay {
            Some(ids) => replayed(row_of_ids(ids, t, topk), experts),
            None => choose(&scores, inputs.bias, topk, rounding),
        };
        let sum: f64 = chosen.iter().map(|&e| scores[e]).sum();
        output.expert_ids.extend(chosen.iter().map(|&e| id(e)));
        output
            .expert_weights
            .extend(chosen.iter().map(|&e| rounding.fp32(scores[e] / sum)));
    }
    output
}

/// With w_j = s_j/Σ over the chosen: ds_j = (dw_j − Σ_i dw_i·w_i) / Σ, dlogit_j = ds_j · s_j(1 − s_j).
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Params {
        tokens,
        experts,
        topk,
    } = inputs.params;
    assert_eq!(
        grads.dexpert_weights.len(),
        tokens * topk,
        "dexpert_weights is [tokens, topk]"
    );
    let mut dlogits = vec![0.0; tokens * experts];
    for t in 0..tokens {
        let scores = scores(row(inputs.logits, t, experts), rounding);
        let dw = row(grads.dexpert_weights, t, topk);
        let chosen: Vec<usize> = row_of_ids(&output.expert_ids, t, topk)
            .iter()
            .map(|&e| index(e))
            .collect();
        let sum: f64 = chosen.iter().map(|&e| scores[e]).sum();
        let mean: f64 = chosen
            .iter()
            .zip(dw)
            .map(|(&e, dw)| dw * scores[e] / sum)
            .sum();
        for (&e, dw) in chosen.iter().zip(dw) {
            let ds = (dw - mean) / sum;
            dlogits[t * experts + e] = rounding.fp32(ds * scores[e] * (1.0 - scores[e]));
        }
    }
    Gradients { dlogits }
}

fn scores(logits: &[f64], rounding: &Rounding) -> Vec<f64> {
    logits
        .iter()
        .map(|&logit| rounding.fp32(sigmoid(logit)))
        .collect()
}

fn choose(scores: &[f64], bias: &[f64], topk: usize, rounding: &Rounding) -> Vec<usize> {
    let biased: Vec<f64> = scores
        .iter()
        .zip(bias)
        .map(|(s, b)| rounding.fp32(s + b))
        .collect();
    let mut experts: Vec<usize> = (0..scores.len()).collect();
    experts.sort_by(|&a, &b| best_first(biased[a], biased[b]).then(a.cmp(&b)));
    experts.truncate(topk);
    experts.sort_unstable();
    experts
}

fn replayed(ids: &[i32], experts: usize) -> Vec<usize> {
    let chosen: Vec<usize> = ids.iter().map(|&e| index(e)).collect();
    let ascending = chosen.windows(2).all(|pair| pair[0] < pair[1]);
    assert!(
        ascending && chosen.iter().all(|&e| e < experts),
        "replayed ids {ids:?}"
    );
    chosen
}

fn row_of_ids(ids: &[i32], token: usize, topk: usize) -> &[i32] {
    &ids[token * topk..(token + 1) * topk]
}
