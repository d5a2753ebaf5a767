//! Softmax attention with grouped heads: query head h reads KV head h / (Hq/Hkv), each token its own sequence.
//!
//! Dense here; `msa_attention` runs the same rows over fewer keys. A row without a visible key has o = 0, lse = -inf
//! and no gradient. Tokens past the last sequence are such rows.

use crate::Rounding;
use crate::math::{axpy, dot, row, row_mut, sequences};

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// Hq
    pub q_heads: usize,
    /// Hkv, divides Hq
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
    /// Factor of q·k, D^-0.5
    pub scale: f64,
    /// Whether a query sees only keys up to its own position.
    pub causal: bool,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes and constants.
    pub params: Params,
    /// `[T, Hq, D]`
    pub q: &'a [f64],
    /// `[T, Hkv, D]`
    pub k: &'a [f64],
    /// `[T, Hkv, D]`
    pub v: &'a [f64],
    /// `[B+1]`
    pub cu_seqlens: &'a [i32],
}

/// What the op writes.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[T, Hq, D]`
    pub o: Vec<f64>,
    /// Natural log of Σ exp(scale·q·k) `[T, Hq]`, fp32
    pub lse: Vec<f64>,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T, Hq, D]`
    pub d_o: &'a [f64],
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T, Hq, D]`
    pub dq: Vec<f64>,
    /// `[T, Hkv, D]`
    pub dk: Vec<f64>,
    /// `[T, Hkv, D]`
    pub dv: Vec<f64>,
}

/// O one rounding, LSE fp32.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    forward_over(
        inputs,
        0..inputs.params.tokens,
        |token, _| dense_keys(inputs, token),
        rounding,
    )
}

/// dQ, dK and dV one rounding each.
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    backward_over(
        inputs,
        |token, _| dense_keys(inputs, token),
        output,
        grads,
        rounding,
    )
}

fn dense_keys(inputs: &Inputs, token: usize) -> Vec<usize> {
    match sequences(inputs.cu_seqlens).find(|sequence| sequence.contains(&token)) {
        Some(sequence) if inputs.params.causal => (sequence.start..token + 1).collect(),
        Some(sequence) => sequence.collect(),
        None => Vec::new(),
    }
}

/// Attention of the given tokens over the keys that `keys_of` names for a (token, KV head). Other rows stay empty.
pub(crate) fn forward_over(
    inputs: &Inputs,
    queries: impl IntoIterator<Item = usize>,
    keys_of: impl Fn(usize, usize) -> Vec<usize>,
    rounding: &Rounding,
) -> Output {
    let Params {
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        ..
    } = inputs.params;
    check(inputs);
    let mut o = vec![0.0; tokens * q_heads * head_dim];
    let mut lse = vec![f64::NEG_INFINITY; tokens * q_heads];
    for token in queries {
        for kv_head in 0..kv_heads {
            let keys = keys_of(token, kv_head);
            for i in query_rows(&inputs.params, token, kv_head) {
                let scores = scores(inputs, i, kv_head, &keys);
                if scores.iter().all(|&s| s == f64::NEG_INFINITY) {
                    continue;
                }
                let largest = scores
                    .iter()
                    .fold(f64::NEG_INFINITY, |m, &s| if s > m { s } else { m });
                let o = row_mut(&mut o, i, head_dim);
                let mut sum = 0.0;
                for (&key, &s) in keys.iter().zip(&scores) {
                    let p = (s - largest).exp();
                    sum += p;
                    axpy(
                        o,
                        rounding.operand(p),
                        row(inputs.v, key * kv_heads + kv_head, head_dim),
                    );
                }
                o.iter_mut().for_each(|o| *o = rounding.store(*o / sum));
                lse[i] = rounding.fp32(largest + sum.ln());
            }
        }
    }
    Output { o, lse }
}

/// With P = exp(s − lse), dP = dO·V and delta = dO·O: dS = P·(dP − delta). P and dS enter their products rounded once
/// as operands; the factor `scale` comes after the product.
pub(crate) fn backward_over(
    inputs: &Inputs,
    keys_of: impl Fn(usize, usize) -> Vec<usize>,
    output: &Output,
    grads: &Grads,
    rounding: &Rounding,
) -> Gradients {
    let Params {
        tokens,
        kv_heads,
        head_dim,
        scale,
        ..
    } = inputs.params;
    check(inputs);
    assert_eq!(grads.d_o.len(), inputs.q.len(), "d_o has the shape of q");
    let mut dq = vec![0.0; inputs.q.len()];
    let mut dk = vec![0.0; inputs.k.len()];
    let mut dv = vec![0.0; inputs.v.len()];
    for token in 0..tokens {
        for kv_head in 0..kv_heads {
            let keys = keys_of(token, kv_head);
            for i in query_rows(&inputs.params, token, kv_head) {
                if output.lse[i] == f64::NEG_INFINITY {
                    continue;
                }
                let (q, d_o) = (row(inputs.q, i, head_dim), row(grads.d_o, i, head_dim));
                let delta = rounding.fp32(dot(d_o, row(&output.o, i, head_dim)));
                let scores = scores(inputs, i, kv_head, &keys);
                for (&key, &s) in keys.iter().zip(&scores) {
                    let j = key * kv_heads + kv_head;
                    let p = (s - output.lse[i]).exp();
                    let dp = dot(d_o, row(inputs.v, j, head_dim));
                    let ds = rounding.operand(p * (dp - delta));
                    axpy(row_mut(&mut dv, j, head_dim), rounding.operand(p), d_o);
                    axpy(
                        row_mut(&mut dq, i, head_dim),
                        scale * ds,
                        row(inputs.k, j, head_dim),
                    );
                    axpy(row_mut(&mut dk, j, head_dim), scale * ds, q);
                }
            }
        }
    }
    Gradients {
        dq: rounding.store_all(dq),
        dk: rounding.store_all(dk),
        dv: rounding.store_all(dv),
    }
}

/// Rows of q, as `[T·Hq, D]`, that belong to one KV head of a token.
fn query_rows(params: &Params, token: usize, kv_head: usize) -> std::ops::Range<usize> {
    let group = params.q_heads / params.kv_heads;
    let first = token * params.q_heads + kv_head * group;
    first..first + group
}

fn scores(inputs: &Inputs, query_row: usize, kv_head: usize, keys: &[usize]) -> Vec<f64> {
    let Params {
        kv_heads,
        head_dim,
        scale,
        ..
    } = inputs.params;
    let q = row(inputs.q, query_row, head_dim);
    keys.iter()
        .map(|key| scale * dot(q, row(inputs.k, key * kv_heads + kv_head, head_dim)))
        .collect()
}

fn check(inputs: &Inputs) {
    let Params {
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        ..
    } = inputs.params;
    assert!(
        q_heads.is_multiple_of(kv_heads),
        "{q_heads} query heads over {kv_heads} KV heads"
    );
    assert_eq!(
        inputs.q.len(),
        tokens * q_heads * head_dim,
        "q is [tokens, q_heads, head_dim]"
    );
    assert_eq!(
        inputs.k.len(),
        tokens * kv_heads * head_dim,
        "k is [tokens, kv_heads, head_dim]"
    );
    assert_eq!(inputs.v.len(), inputs.k.len(), "v has the shape of k");
}
