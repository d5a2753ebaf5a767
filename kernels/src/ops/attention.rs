//! Attention, dense and block-sparse.

use super::check::{Check, F32, I32, STORAGE};
use super::selection::map_capacity;
use crate::backend::Backend;
use crate::error::Result;
use crate::launch::AttentionConfig;
use crate::tensor::Tensor;

/// Widest head the tiles are laid out for.
const HEAD_DIM_MAX: usize = 256;

/// Most query heads per kv head.
const GROUP_MAX: usize = 16;

/// Dense grouped-query attention over packed sequences: softmax(scale · q kᵀ) v per head, keys of the query's own
/// sequence, at or before it when causal.
///
/// Scores and softmax fp32, P in the storage dtype for the product with V, O one rounding. A row without a key gives
/// o = 0 and lse = −inf.
pub struct Attention<'a, B: Backend> {
    /// Queries, F32 or BF16 `[T, Hq, D]`.
    pub q: &'a Tensor<B>,
    /// Keys, `[T, Hkv, D]`; may be a slice of a fused row.
    pub k: &'a Tensor<B>,
    /// Values, like the keys.
    pub v: &'a Tensor<B>,
    /// First token of every sequence, I32 `[B + 1]`; unused entries repeat the last value.
    pub cu_seqlens: &'a Tensor<B>,
    /// Written; `[T, Hq, D]`.
    pub o: &'a Tensor<B>,
    /// Written; F32 `[T, Hq]`, natural logarithm of the sum of exponentials.
    pub lse: &'a Tensor<B>,
    /// Factor of the scores, head_dim^-0.5.
    pub scale: f32,
    /// Whether a query sees later keys of its sequence.
    pub causal: bool,
    /// Tiles, from [`crate::launch::attention`] of the model's block.
    pub config: AttentionConfig,
}

/// Extents of every attention operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionDims {
    /// Tokens of the pack.
    pub tokens: usize,
    /// Query heads.
    pub q_heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Capacity for sequences.
    pub sequences: usize,
}

impl AttentionDims {
    /// Query heads per kv head.
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads
    }
}

impl<B: Backend> Attention<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<AttentionDims> {
        let mut check = Check::new("attention");
        let dims = qkv(
            &mut check,
            self.q,
            self.k,
            self.v,
            self.cu_seqlens,
            self.config,
        )?;
        written(&mut check, &dims, self.q, self.o, self.lse)?;
        check.disjoint()?;
        Ok(dims)
    }
}

/// Gradient of [`Attention`]. dK and dV are split over slices of the query heads that are summed in order.
pub struct AttentionBackward<'a, B: Backend> {
    /// Queries of the forward pass.
    pub q: &'a Tensor<B>,
    /// Keys of the forward pass.
    pub k: &'a Tensor<B>,
    /// Values of the forward pass.
    pub v: &'a Tensor<B>,
    /// I32 `[B + 1]`.
    pub cu_seqlens: &'a Tensor<B>,
    /// Output of the forward pass, `[T, Hq, D]`.
    pub o: &'a Tensor<B>,
    /// F32 `[T, Hq]` of the forward pass.
    pub lse: &'a Tensor<B>,
    /// Gradient of the output, `[T, Hq, D]`.
    pub d_o: &'a Tensor<B>,
    /// Written; `[T, Hq, D]`, may be a slice of a fused row.
    pub dq: &'a Tensor<B>,
    /// Written; `[T, Hkv, D]`, may be a slice of a fused row.
    pub dk: &'a Tensor<B>,
    /// Written; `[T, Hkv, D]`, may be a slice of a fused row.
    pub dv: &'a Tensor<B>,
    /// Written; F32 `[`[`attention_backward_workspace`]`]`.
    pub workspace: &'a Tensor<B>,
    /// Factor of the scores.
    pub scale: f32,
    /// Whether a query sees later keys.
    pub causal: bool,
    /// Tiles of the forward pass.
    pub config: AttentionConfig,
}

impl<B: Backend> AttentionBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<AttentionDims> {
        let mut check = Check::new("attention_backward");
        let dims = qkv(
            &mut check,
            self.q,
            self.k,
            self.v,
            self.cu_seqlens,
            self.config,
        )?;
        saved(&mut check, &dims, self.q, [self.o, self.d_o], self.lse)?;
        gradients(&mut check, &dims, self.q, [self.dq, self.dk, self.dv])?;
        let needed = attention_backward_workspace(&dims, self.config);
        check.output("workspace", self.workspace, F32, &[Some(needed)])?;
        check.disjoint()?;
        Ok(dims)
    }
}

/// F32 elements a backward pass works in: delta `[T, Hq]`, then dK and dV slices `[head_splits, T, Hkv, D]` each.
pub fn attention_backward_workspace(dims: &AttentionDims, config: AttentionConfig) -> usize {
    let slices = 2 * config.head_splits * dims.tokens * dims.kv_heads * dims.head_dim;
    dims.tokens * dims.q_heads + slices
}

/// Block-sparse attention: like causal [`Attention`], over the keys of the selected blocks alone.
///
/// Blocks count from each sequence's own start. Key tiles are those of the dense layers and are combined in ascending
/// order; a block narrower than a tile is masked inside it.
pub struct MsaAttention<'a, B: Backend> {
    /// Queries, F32 or BF16 `[T, Hq, D]`.
    pub q: &'a Tensor<B>,
    /// Keys, `[T, Hkv, D]`; may be a slice of a fused row.
    pub k: &'a Tensor<B>,
    /// Values, like the keys.
    pub v: &'a Tensor<B>,
    /// I32 `[B + 1]`.
    pub cu_seqlens: &'a Tensor<B>,
    /// Selected blocks, I32 `[Hkv, T, topk]`, ascending with a −1 tail.
    pub block_ids: &'a Tensor<B>,
    /// Written; `[T, Hq, D]`.
    pub o: &'a Tensor<B>,
    /// Written; F32 `[T, Hq]`.
    pub lse: &'a Tensor<B>,
    /// Tokens per block.
    pub block: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Tiles, from [`crate::launch::attention`].
    pub config: AttentionConfig,
}

impl<B: Backend> MsaAttention<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<AttentionDims> {
        let mut check = Check::new("msa_attention");
        let dims = qkv(
            &mut check,
            self.q,
            self.k,
            self.v,
            self.cu_seqlens,
            self.config,
        )?;
        selected(&mut check, &dims, self.block_ids, self.block)?;
        written(&mut check, &dims, self.q, self.o, self.lse)?;
        check.disjoint()?;
        Ok(dims)
    }
}

/// Gradient of [`MsaAttention`]; the selection is a constant.
pub struct MsaAttentionBackward<'a, B: Backend> {
    /// Queries of the forward pass.
    pub q: &'a Tensor<B>,
    /// Keys of the forward pass.
    pub k: &'a Tensor<B>,
    /// Values of the forward pass.
    pub v: &'a Tensor<B>,
    /// I32 `[B + 1]`.
    pub cu_seqlens: &'a Tensor<B>,
    /// Selection of the forward pass, I32 `[Hkv, T, topk]`.
    pub block_ids: &'a Tensor<B>,
    /// I32 `[B + 1]`, of [`super::TileMap`].
    pub block_offsets: &'a Tensor<B>,
    /// I32 `[Hkv, R + 1]`, of [`super::TileMap`].
    pub row_offsets: &'a Tensor<B>,
    /// I32 `[Hkv, T · topk]`, of [`super::TileMap`].
    pub queries: &'a Tensor<B>,
    /// Output of the forward pass, `[T, Hq, D]`.
    pub o: &'a Tensor<B>,
    /// F32 `[T, Hq]` of the forward pass.
    pub lse: &'a Tensor<B>,
    /// Gradient of the output, `[T, Hq, D]`.
    pub d_o: &'a Tensor<B>,
    /// Written; `[T, Hq, D]`.
    pub dq: &'a Tensor<B>,
    /// Written; `[T, Hkv, D]`; +0 where nobody selected the block.
    pub dk: &'a Tensor<B>,
    /// Written; `[T, Hkv, D]`; +0 where nobody selected the block.
    pub dv: &'a Tensor<B>,
    /// Written; F32 `[`[`attention_backward_workspace`]`]`.
    pub workspace: &'a Tensor<B>,
    /// Tokens per block.
    pub block: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Tiles of the forward pass.
    pub config: AttentionConfig,
}

impl<B: Backend> MsaAttentionBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<AttentionDims> {
        let mut check = Check::new("msa_attention_backward");
        let dims = qkv(
            &mut check,
            self.q,
            self.k,
            self.v,
            self.cu_seqlens,
            self.config,
        )?;
        let topk = selected(&mut check, &dims, self.block_ids, self.block)?;
        let rows = map_capacity(dims.tokens, dims.sequences, self.block);
        let heads = Some(dims.kv_heads);
        check.input(
            "block_offsets",
            self.block_offsets,
            I32,
            &[Some(dims.sequences + 1)],
        )?;
        check.input(
            "row_offsets",
            self.row_offsets,
            I32,
            &[heads, Some(rows + 1)],
        )?;
        check.input(
            "queries",
            self.queries,
            I32,
            &[heads, Some(dims.tokens * topk)],
        )?;
        for (name, tensor) in [
            ("block_offsets", self.block_offsets),
            ("row_offsets", self.row_offsets),
            ("queries", self.queries),
        ] {
            check.contiguous(name, tensor)?;
        }
        saved(&mut check, &dims, self.q, [self.o, self.d_o], self.lse)?;
        gradients(&mut check, &dims, self.q, [self.dq, self.dk, self.dv])?;
        let needed = attention_backward_workspace(&dims, self.config);
        check.output("workspace", self.workspace, F32, &[Some(needed)])?;
        check.disjoint()?;
        Ok(dims)
    }
}

fn qkv<'a, B: Backend>(
    check: &mut Check<'a, B>,
    q: &'a Tensor<B>,
    k: &'a Tensor<B>,
    v: &'a Tensor<B>,
    cu_seqlens: &'a Tensor<B>,
    config: AttentionConfig,
) -> Result<AttentionDims> {
    check.input("q", q, STORAGE, &[None, None, None])?;
    let (tokens, q_heads, head_dim) = (q.shape()[0], q.shape()[1], q.shape()[2]);
    check.input("k", k, STORAGE, &[Some(tokens), None, Some(head_dim)])?;
    let kv_heads = k.shape()[1];
    check.input(
        "v",
        v,
        STORAGE,
        &[Some(tokens), Some(kv_heads), Some(head_dim)],
    )?;
    check.input("cu_seqlens", cu_seqlens, I32, &[None])?;
    check.same_dtype("k", k, q)?;
    check.same_dtype("v", v, q)?;
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        check.rows(name, tensor)?;
    }
    check.contiguous("cu_seqlens", cu_seqlens)?;
    check.argument(!cu_seqlens.shape().contains(&0), || {
        "cu_seqlens must not be empty".into()
    })?;
    heads(check, q_heads, kv_heads, head_dim, config)?;
    let sequences = cu_seqlens.shape()[0] - 1;
    Ok(AttentionDims {
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        sequences,
    })
}

fn selected<'a, B: Backend>(
    check: &mut Check<'a, B>,
    dims: &AttentionDims,
    block_ids: &'a Tensor<B>,
    block: usize,
) -> Result<usize> {
    let shape = [Some(dims.kv_heads), Some(dims.tokens), None];
    check.input("block_ids", block_ids, I32, &shape)?;
    check.argument(block > 0, || "block must not be zero".into())?;
    Ok(block_ids.shape()[2])
}

fn written<'a, B: Backend>(
    check: &mut Check<'a, B>,
    dims: &AttentionDims,
    q: &Tensor<B>,
    o: &'a Tensor<B>,
    lse: &'a Tensor<B>,
) -> Result<()> {
    let shape = [Some(dims.tokens), Some(dims.q_heads), Some(dims.head_dim)];
    check.output("o", o, STORAGE, &shape)?;
    check.output("lse", lse, F32, &shape[..2])?;
    check.same_dtype("o", o, q)?;
    check.rows("o", o)?;
    check.contiguous("lse", lse)
}

fn saved<'a, B: Backend>(
    check: &mut Check<'a, B>,
    dims: &AttentionDims,
    q: &Tensor<B>,
    [o, d_o]: [&'a Tensor<B>; 2],
    lse: &'a Tensor<B>,
) -> Result<()> {
    let shape = [Some(dims.tokens), Some(dims.q_heads), Some(dims.head_dim)];
    for (name, tensor) in [("o", o), ("d_o", d_o)] {
        check.input(name, tensor, STORAGE, &shape)?;
        check.same_dtype(name, tensor, q)?;
        check.rows(name, tensor)?;
    }
    check.input("lse", lse, F32, &shape[..2])?;
    check.contiguous("lse", lse)
}

fn gradients<'a, B: Backend>(
    check: &mut Check<'a, B>,
    dims: &AttentionDims,
    q: &Tensor<B>,
    [dq, dk, dv]: [&'a Tensor<B>; 3],
) -> Result<()> {
    for (name, tensor, heads) in [
        ("dq", dq, dims.q_heads),
        ("dk", dk, dims.kv_heads),
        ("dv", dv, dims.kv_heads),
    ] {
        check.output(
            name,
            tensor,
            STORAGE,
            &[Some(dims.tokens), Some(heads), Some(dims.head_dim)],
        )?;
        check.same_dtype(name, tensor, q)?;
        check.rows(name, tensor)?;
    }
    Ok(())
}

/// Whether the attention operations take these heads; says which number does not fit.
///
/// # Errors
/// What is wrong and what is accepted.
pub fn heads_fit(
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
) -> std::result::Result<(), String> {
    if !head_dim.is_multiple_of(8) || !(8..=HEAD_DIM_MAX).contains(&head_dim) {
        return Err(format!(
            "head_dim {head_dim} must be a multiple of 8 up to {HEAD_DIM_MAX}"
        ));
    }
    let divides = kv_heads > 0 && q_heads > 0 && q_heads.is_multiple_of(kv_heads);
    if !divides || q_heads / kv_heads > GROUP_MAX {
        return Err(format!(
            "{q_heads} query heads over {kv_heads} kv heads must give groups of 1 to {GROUP_MAX}"
        ));
    }
    Ok(())
}

/// Head counts and sizes that the tiles are laid out for.
pub(super) fn heads<B: Backend>(
    check: &Check<'_, B>,
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    config: AttentionConfig,
) -> Result<()> {
    let fit = heads_fit(q_heads, kv_heads, head_dim);
    check.argument(fit.is_ok(), || fit.err().unwrap_or_default())?;
    let tiles = [config.key_tile, config.query_tile, config.head_splits];
    check.argument(!tiles.contains(&0), || {
        format!("tiles must not be zero: {config:?}")
    })
}
