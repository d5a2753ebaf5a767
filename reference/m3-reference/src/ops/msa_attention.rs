//! Block-sparse attention: the rows of `attention` over the keys of the selected blocks.
//!
//! Index head h selects for KV head h and so for its whole group of query heads. Blocks reach no further than the
//! query itself. A row that selected nothing has o = 0, lse = -inf and no gradient; the selection is a constant.

use super::{attention, tile_map};
use crate::Rounding;

pub use super::attention::{Gradients, Grads, Output};

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// Hq
    pub q_heads: usize,
    /// Hkv, divides Hq and equals Hi
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
    /// Factor of q·k, D^-0.5
    pub scale: f64,
    /// Keys a block.
    pub block: usize,
    /// Ids a row.
    pub topk: usize,
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
    /// `[Hkv, T, topk]`, as `block_select` writes them
    pub block_ids: &'a [i32],
    /// `[B+1]`
    pub cu_seqlens: &'a [i32],
}

/// O one rounding, LSE fp32.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    forward_rows(inputs, 0..inputs.params.tokens, rounding)
}

/// `forward` of some queries only, the others left empty: for sizes at which the whole takes minutes.
pub fn forward_rows(
    inputs: &Inputs,
    queries: impl IntoIterator<Item = usize>,
    rounding: &Rounding,
) -> Output {
    let (rows, selection) = split(inputs);
    let keys_of = |token, kv_head| tile_map::keys_of(&selection, kv_head, token);
    attention::forward_over(&rows, queries, keys_of, rounding)
}

/// dQ, dK and dV one rounding each; dK and dV of a block come from the queries that selected it.
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let (rows, selection) = split(inputs);
    let keys_of = |token, kv_head| tile_map::keys_of(&selection, kv_head, token);
    attention::backward_over(&rows, keys_of, output, grads, rounding)
}

/// The operands of the rows, and of their key lists.
fn split<'a>(inputs: &Inputs<'a>) -> (attention::Inputs<'a>, tile_map::Inputs<'a>) {
    let Params {
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        scale,
        block,
        topk,
    } = inputs.params;
    let Inputs {
        q,
        k,
        v,
        block_ids,
        cu_seqlens,
        ..
    } = *inputs;
    let params = attention::Params {
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        scale,
        causal: true,
    };
    let rows = attention::Inputs {
        params,
        q,
        k,
        v,
        cu_seqlens,
    };
    let params = tile_map::Params {
        tokens,
        index_heads: kv_heads,
        block,
        topk,
    };
    (
        rows,
        tile_map::Inputs {
            params,
            block_ids,
            cu_seqlens,
        },
    )
}
