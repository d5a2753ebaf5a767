//! Block selection: index scores, the k best blocks, and the transpose of a selection.

use super::check::{Check, F32, I32, STORAGE};
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::Tensor;

/// Score of a block for a query and index head: the largest iq · ik over the block's keys at or before the query, in
/// fp32 and unscaled; −inf where the block is not visible.
pub struct MsaScore<'a, B: Backend> {
    /// Index queries after norm and rotation, F32 or BF16 `[T, Hi, Di]`.
    pub index_q: &'a Tensor<B>,
    /// Index keys after norm and rotation, `[T, 1, Di]`.
    pub index_k: &'a Tensor<B>,
    /// I32 `[B + 1]`.
    pub cu_seqlens: &'a Tensor<B>,
    /// Written; F32 `[Hi, T, max_blocks]`.
    pub scores: &'a Tensor<B>,
    /// Tokens per block.
    pub block: usize,
}

/// Extents of [`MsaScore`].
pub struct MsaScoreDims {
    /// Tokens of the pack.
    pub tokens: usize,
    /// Index heads.
    pub index_heads: usize,
    /// Channels of an index head.
    pub index_dim: usize,
    /// Capacity for sequences.
    pub sequences: usize,
    /// Capacity for blocks of one sequence.
    pub max_blocks: usize,
}

impl<B: Backend> MsaScore<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<MsaScoreDims> {
        let mut check = Check::new("msa_score");
        check.input("index_q", self.index_q, STORAGE, &[None, None, None])?;
        let shape = self.index_q.shape();
        let (tokens, index_heads, index_dim) = (shape[0], shape[1], shape[2]);
        check.input(
            "index_k",
            self.index_k,
            STORAGE,
            &[Some(tokens), Some(1), Some(index_dim)],
        )?;
        check.same_dtype("index_k", self.index_k, self.index_q)?;
        check.input("cu_seqlens", self.cu_seqlens, I32, &[None])?;
        check.output(
            "scores",
            self.scores,
            F32,
            &[Some(index_heads), Some(tokens), None],
        )?;
        check.rows("index_q", self.index_q)?;
        check.rows("index_k", self.index_k)?;
        check.contiguous("cu_seqlens", self.cu_seqlens)?;
        check.contiguous("scores", self.scores)?;
        positive(&check, self.block, self.cu_seqlens)?;
        check.disjoint()?;
        let sequences = self.cu_seqlens.shape()[0] - 1;
        let max_blocks = self.scores.shape()[2];
        Ok(MsaScoreDims {
            tokens,
            index_heads,
            index_dim,
            sequences,
            max_blocks,
        })
    }
}

/// The k best blocks of every query and index head.
///
/// Forced blocks (the first `init`, then the last `local` visible ones) occupy slots inside the k; then score
/// descending, lower id first on exact ties. NaN sorts last, −0 equals +0. Ids are written ascending with a −1 tail.
pub struct BlockSelect<'a, B: Backend> {
    /// F32 `[Hi, T, max_blocks]`, of [`MsaScore`].
    pub scores: &'a Tensor<B>,
    /// I32 `[T]`, position of every query in its own sequence; a negative one selects nothing.
    pub positions: &'a Tensor<B>,
    /// Written; I32 `[Hi, T, topk]`.
    pub block_ids: &'a Tensor<B>,
    /// Tokens per block.
    pub block: usize,
    /// Leading blocks that are always selected.
    pub init_blocks: usize,
    /// Trailing visible blocks that are always selected.
    pub local_blocks: usize,
}

/// Extents of [`BlockSelect`].
pub struct BlockSelectDims {
    /// Tokens of the pack.
    pub tokens: usize,
    /// Index heads.
    pub index_heads: usize,
    /// Capacity for blocks of one sequence.
    pub max_blocks: usize,
    /// Slots per query and index head.
    pub topk: usize,
}

impl<B: Backend> BlockSelect<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit; `init_blocks + local_blocks` above the number of slots.
    pub fn dims(&self) -> Result<BlockSelectDims> {
        let mut check = Check::new("block_select");
        check.input("scores", self.scores, F32, &[None, None, None])?;
        let shape = self.scores.shape();
        let (index_heads, tokens, max_blocks) = (shape[0], shape[1], shape[2]);
        check.input("positions", self.positions, I32, &[Some(tokens)])?;
        check.output(
            "block_ids",
            self.block_ids,
            I32,
            &[Some(index_heads), Some(tokens), None],
        )?;
        check.rows("scores", self.scores)?;
        check.contiguous("positions", self.positions)?;
        check.contiguous("block_ids", self.block_ids)?;
        check.argument(self.block > 0, || "block must not be zero".into())?;
        let topk = self.block_ids.shape()[2];
        let (init, local) = (self.init_blocks, self.local_blocks);
        check.argument(init + local <= topk, || {
            format!("{init} init and {local} local blocks do not fit into topk {topk}")
        })?;
        check.disjoint()?;
        Ok(BlockSelectDims {
            tokens,
            index_heads,
            max_blocks,
            topk,
        })
    }
}

/// The transpose of a selection (CSR): for every key block the queries that selected it, ascending.
///
/// Row of block b of sequence s: `block_offsets[s] + b`. Its queries (pack-absolute tokens) are
/// `queries[h][row_offsets[h][row] .. row_offsets[h][row + 1]]`. Rows past the last block are empty.
pub struct TileMap<'a, B: Backend> {
    /// I32 `[Hkv, T, topk]`.
    pub block_ids: &'a Tensor<B>,
    /// I32 `[B + 1]`.
    pub cu_seqlens: &'a Tensor<B>,
    /// Written; I32 `[B + 1]`, blocks of the sequences before.
    pub block_offsets: &'a Tensor<B>,
    /// Written; I32 `[Hkv, R + 1]` with R = [`map_capacity`].
    pub row_offsets: &'a Tensor<B>,
    /// Written; I32 `[Hkv, T · topk]`; entries past the last one are −1.
    pub queries: &'a Tensor<B>,
    /// Tokens per block.
    pub block: usize,
}

/// Extents of [`TileMap`].
pub struct TileMapDims {
    /// Tokens of the pack.
    pub tokens: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Capacity for sequences.
    pub sequences: usize,
    /// Slots per query and head.
    pub topk: usize,
    /// Capacity for rows.
    pub rows: usize,
}

/// Most key blocks that `tokens` tokens in `sequences` sequences can have.
pub fn map_capacity(tokens: usize, sequences: usize, block: usize) -> usize {
    tokens / block + sequences
}

impl<B: Backend> TileMap<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<TileMapDims> {
        let mut check = Check::new("tile_map");
        check.input("block_ids", self.block_ids, I32, &[None, None, None])?;
        check.input("cu_seqlens", self.cu_seqlens, I32, &[None])?;
        check.contiguous("cu_seqlens", self.cu_seqlens)?;
        positive(&check, self.block, self.cu_seqlens)?;
        let shape = self.block_ids.shape();
        let (kv_heads, tokens, topk) = (shape[0], shape[1], shape[2]);
        let sequences = self.cu_seqlens.shape()[0] - 1;
        let rows = map_capacity(tokens, sequences, self.block);
        let heads = Some(kv_heads);
        check.output(
            "block_offsets",
            self.block_offsets,
            I32,
            &[Some(sequences + 1)],
        )?;
        check.output(
            "row_offsets",
            self.row_offsets,
            I32,
            &[heads, Some(rows + 1)],
        )?;
        check.output("queries", self.queries, I32, &[heads, Some(tokens * topk)])?;
        for (name, tensor) in [
            ("block_offsets", self.block_offsets),
            ("row_offsets", self.row_offsets),
            ("queries", self.queries),
        ] {
            check.contiguous(name, tensor)?;
        }
        check.disjoint()?;
        Ok(TileMapDims {
            tokens,
            kv_heads,
            sequences,
            topk,
            rows,
        })
    }
}

fn positive<B: Backend>(check: &Check<'_, B>, block: usize, cu_seqlens: &Tensor<B>) -> Result<()> {
    check.argument(block > 0, || "block must not be zero".into())?;
    check.argument(cu_seqlens.elements() > 0, || {
        "cu_seqlens must not be empty".into()
    })
}
