//! Language-model head and the log-probability of a target at a temperature.
//!
//! z = x·Wᵀ / temperature, log_prob = `z[target]` − lse(z). The logits of the token at position p come from row p−1;
//! the caller shifts. Logits are fp32 accumulators and are never rounded to the storage type.

use crate::Rounding;
use crate::math::{axpy, dot_in_lanes, row, row_mut};

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// H
    pub hidden: usize,
    /// V
    pub vocab: usize,
    /// Sampling temperature, above 0: greedy text has no log-probability to train on.
    pub temperature: f64,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes and constants.
    pub params: Params,
    /// `[T, H]`
    pub x: &'a [f64],
    /// `[V, H]`
    pub w: &'a [f64],
    /// Token scored by each row `[T]`; a negative one skips the row.
    pub targets: &'a [i32],
}

/// What the op writes. Skipped rows hold 0.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[T]`, fp32, at most 0
    pub log_probs: Vec<f64>,
    /// −Σ p·ln p `[T]`, fp32; watched, not trained
    pub entropy: Vec<f64>,
    /// Natural log of Σ exp(z) `[T]`, fp32
    pub lse: Vec<f64>,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T]`, fp32
    pub dlog_probs: &'a [f64],
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T, H]`
    pub dx: Vec<f64>,
    /// `[V, H]`, fp32
    pub dw: Vec<f64>,
}

/// fp32 throughout.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    check(inputs);
    let tokens = inputs.params.tokens;
    let zeros = || vec![0.0; tokens];
    let mut output = Output {
        log_probs: zeros(),
        entropy: zeros(),
        lse: zeros(),
    };
    for t in 0..tokens {
        let Ok(target) = usize::try_from(inputs.targets[t]) else {
            continue;
        };
        let z = tempered_logits(inputs, t);
        let largest = z
            .iter()
            .fold(f64::NEG_INFINITY, |m, &z| if z > m { z } else { m });
        let lse = largest + z.iter().map(|z| (z - largest).exp()).sum::<f64>().ln();
        let entropy: f64 = z.iter().map(|z| (z - lse).exp() * (lse - z)).sum();
        output.log_probs[t] = rounding.fp32(z[target] - lse);
        output.entropy[t] = rounding.fp32(entropy);
        output.lse[t] = rounding.fp32(lse);
    }
    output
}

/// dlogits = dlog_prob·(`1[v = target]` − p_v) / temperature, rounded once as an operand of both products.
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    check(inputs);
    let Params {
        tokens,
        hidden,
        vocab,
        temperature,
    } = inputs.params;
    assert_eq!(grads.dlog_probs.len(), tokens, "dlog_probs is [tokens]");
    let mut dx = vec![0.0; tokens * hidden];
    let mut dw = vec![0.0; vocab * hidden];
    for t in 0..tokens {
        let Ok(target) = usize::try_from(inputs.targets[t]) else {
            continue;
        };
        for (v, z) in tempered_logits(inputs, t).into_iter().enumerate() {
            let hit = if v == target { 1.0 } else { 0.0 };
            let p = (z - output.lse[t]).exp();
            let dlogit = rounding.operand(grads.dlog_probs[t] * (hit - p) / temperature);
            axpy(
                row_mut(&mut dx, t, hidden),
                dlogit,
                row(inputs.w, v, hidden),
            );
            axpy(
                row_mut(&mut dw, v, hidden),
                dlogit,
                row(inputs.x, t, hidden),
            );
        }
    }
    Gradients {
        dx: rounding.store_all(dx),
        dw: rounding.fp32_all(dw),
    }
}

fn tempered_logits(inputs: &Inputs, token: usize) -> Vec<f64> {
    let Params {
        hidden,
        vocab,
        temperature,
        ..
    } = inputs.params;
    let x = row(inputs.x, token, hidden);
    (0..vocab)
        .map(|v| dot_in_lanes(x, row(inputs.w, v, hidden)) / temperature)
        .collect()
}

fn check(inputs: &Inputs) {
    let Params {
        tokens,
        hidden,
        vocab,
        temperature,
    } = inputs.params;
    assert!(
        temperature > 0.0,
        "temperature {temperature} has no log-probabilities"
    );
    assert_eq!(inputs.x.len(), tokens * hidden, "x is [tokens, hidden]");
    assert_eq!(inputs.w.len(), vocab * hidden, "w is [vocab, hidden]");
    assert_eq!(inputs.targets.len(), tokens, "one target a row");
}
