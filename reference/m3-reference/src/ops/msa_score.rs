//! Block scores of the indexer: the largest iq·ik over the keys of a block that a query may see.
//!
//! All index heads share one key head, and no head is pooled with another. Blocks start at each sequence's own start.
//! The indexer is frozen and selection passes no gradient, so there is no backward.

use crate::Rounding;
use crate::math::{dot_in_lanes, row, sequences};

/// Sizes.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// Hi
    pub index_heads: usize,
    /// Di
    pub head_dim: usize,
    /// Keys a block.
    pub block: usize,
    /// Row length of the scores, at least the blocks of the longest sequence.
    pub max_blocks: usize,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes.
    pub params: Params,
    /// `[T, Hi, Di]`
    pub iq: &'a [f64],
    /// `[T, 1, Di]`
    pub ik: &'a [f64],
    /// `[B+1]`
    pub cu_seqlens: &'a [i32],
}

/// What the op writes.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[Hi, T, max_blocks]`, fp32; -inf where no key of the block is visible. NaN if a visible key scores NaN.
    pub scores: Vec<f64>,
}

/// Unscaled products, fp32. A positive factor could not change their order, only merge near-ties.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params {
        tokens,
        index_heads,
        head_dim,
        block,
        max_blocks,
    } = inputs.params;
    assert_eq!(
        inputs.iq.len(),
        tokens * index_heads * head_dim,
        "iq is [tokens, heads, dim]"
    );
    assert_eq!(inputs.ik.len(), tokens * head_dim, "ik is [tokens, 1, dim]");
    let mut scores = vec![f64::NEG_INFINITY; index_heads * tokens * max_blocks];
    for sequence in sequences(inputs.cu_seqlens) {
        for query in sequence.clone() {
            for key in sequence.start..query + 1 {
                let ik = row(inputs.ik, key, head_dim);
                for head in 0..index_heads {
                    let iq = row(inputs.iq, query * index_heads + head, head_dim);
                    let s = dot_in_lanes(iq, ik);
                    let b = (key - sequence.start) / block;
                    let best = &mut scores[(head * tokens + query) * max_blocks + b];
                    if s > *best || s.is_nan() {
                        *best = s;
                    }
                }
            }
        }
    }
    // The largest rounded product is the rounded largest product.
    Output {
        scores: rounding.fp32_all(scores),
    }
}
