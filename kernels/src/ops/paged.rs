//! Attention over a paged cache: the same walk over key tiles, with keys and values found through a page table.
//!
//! A row is a query: `slots[r]` names its sequence (a row of the page table), `positions[r]` its place in it. Key j of
//! slot s lies in page `page_table[s][j / page]` at row `j % page`. A row with a negative position is skipped.

use super::attention::{AttentionDims, heads};
use super::check::{Check, F32, I32, STORAGE};
use crate::backend::Backend;
use crate::error::Result;
use crate::launch::AttentionConfig;
use crate::tensor::Tensor;

/// Writes rows into their pages.
pub struct PageWrite<'a, B: Backend> {
    /// F32 or BF16 `[R, heads, D]`; may be a slice of a fused row.
    pub rows: &'a Tensor<B>,
    /// I32 `[S, max_pages]`.
    pub page_table: &'a Tensor<B>,
    /// I32 `[R]`.
    pub slots: &'a Tensor<B>,
    /// I32 `[R]`.
    pub positions: &'a Tensor<B>,
    /// Read and written; `[P, page, heads, D]`.
    pub pages: &'a Tensor<B>,
}

/// Extents of the cache and of the rows that meet it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedDims {
    /// Rows.
    pub rows: usize,
    /// Heads of a page.
    pub heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Sequences the page table holds.
    pub slots: usize,
    /// Pages a sequence may have.
    pub max_pages: usize,
    /// Pages in all.
    pub pages: usize,
    /// Tokens per page.
    pub page: usize,
}

impl<B: Backend> PageWrite<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<PagedDims> {
        let mut check = Check::new("page_write");
        check.input("rows", self.rows, STORAGE, &[None, None, None])?;
        let (rows, heads, head_dim) = (
            self.rows.shape()[0],
            self.rows.shape()[1],
            self.rows.shape()[2],
        );
        let (slots, max_pages) = rows_of(
            &mut check,
            rows,
            self.page_table,
            self.slots,
            self.positions,
        )?;
        let shape = [None, None, Some(heads), Some(head_dim)];
        check.output("pages", self.pages, STORAGE, &shape)?;
        check.same_dtype("pages", self.pages, self.rows)?;
        check.rows("rows", self.rows)?;
        check.contiguous("pages", self.pages)?;
        check.disjoint()?;
        let (pages, page) = (self.pages.shape()[0], self.pages.shape()[1]);
        Ok(PagedDims {
            rows,
            heads,
            head_dim,
            slots,
            max_pages,
            pages,
            page,
        })
    }
}

/// Causal attention of rows over their own cached sequence: dense, or over selected blocks.
pub struct PagedAttention<'a, B: Backend> {
    /// F32 or BF16 `[R, Hq, D]`.
    pub q: &'a Tensor<B>,
    /// `[P, page, Hkv, D]`.
    pub k_pages: &'a Tensor<B>,
    /// `[P, page, Hkv, D]`.
    pub v_pages: &'a Tensor<B>,
    /// I32 `[S, max_pages]`.
    pub page_table: &'a Tensor<B>,
    /// I32 `[R]`.
    pub slots: &'a Tensor<B>,
    /// I32 `[R]`.
    pub positions: &'a Tensor<B>,
    /// I32 `[Hkv, R, topk]`, ascending with a −1 tail; absent in a dense layer.
    pub block_ids: Option<&'a Tensor<B>>,
    /// Written; `[R, Hq, D]`.
    pub o: &'a Tensor<B>,
    /// Written; F32 `[R, Hq]`.
    pub lse: &'a Tensor<B>,
    /// Tokens per block.
    pub block: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Tiles of the model, as in training.
    pub config: AttentionConfig,
}

impl<B: Backend> PagedAttention<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<(AttentionDims, PagedDims)> {
        let mut check = Check::new("paged_attention");
        check.input("q", self.q, STORAGE, &[None, None, None])?;
        let (rows, q_heads, head_dim) = (self.q.shape()[0], self.q.shape()[1], self.q.shape()[2]);
        let shape = [None, None, None, Some(head_dim)];
        check.input("k_pages", self.k_pages, STORAGE, &shape)?;
        let paged = self.k_pages.shape();
        let (pages, page, kv_heads) = (paged[0], paged[1], paged[2]);
        let shape = [Some(pages), Some(page), Some(kv_heads), Some(head_dim)];
        check.input("v_pages", self.v_pages, STORAGE, &shape)?;
        for (name, tensor) in [("k_pages", self.k_pages), ("v_pages", self.v_pages)] {
            check.same_dtype(name, tensor, self.q)?;
            check.contiguous(name, tensor)?;
        }
        let (slots, max_pages) = rows_of(
            &mut check,
            rows,
            self.page_table,
            self.slots,
            self.positions,
        )?;
        if let Some(block_ids) = self.block_ids {
            check.input(
                "block_ids",
                block_ids,
                I32,
                &[Some(kv_heads), Some(rows), None],
            )?;
        }
        check.output(
            "o",
            self.o,
            STORAGE,
            &[Some(rows), Some(q_heads), Some(head_dim)],
        )?;
        check.output("lse", self.lse, F32, &[Some(rows), Some(q_heads)])?;
        check.same_dtype("o", self.o, self.q)?;
        check.rows("q", self.q)?;
        check.rows("o", self.o)?;
        check.contiguous("lse", self.lse)?;
        check.argument(self.block > 0, || "block must not be zero".into())?;
        heads(&check, q_heads, kv_heads, head_dim, self.config)?;
        check.disjoint()?;
        let attention = AttentionDims {
            tokens: rows,
            q_heads,
            kv_heads,
            head_dim,
            sequences: slots,
        };
        let cache = PagedDims {
            rows,
            heads: kv_heads,
            head_dim,
            slots,
            max_pages,
            pages,
            page,
        };
        Ok((attention, cache))
    }
}

/// [`super::MsaScore`] of rows against their own cached sequence.
pub struct PagedScore<'a, B: Backend> {
    /// F32 or BF16 `[R, Hi, Di]`.
    pub index_q: &'a Tensor<B>,
    /// `[P, page, 1, Di]`.
    pub index_k_pages: &'a Tensor<B>,
    /// I32 `[S, max_pages]`.
    pub page_table: &'a Tensor<B>,
    /// I32 `[R]`.
    pub slots: &'a Tensor<B>,
    /// I32 `[R]`.
    pub positions: &'a Tensor<B>,
    /// Written; F32 `[Hi, R, max_blocks]`.
    pub scores: &'a Tensor<B>,
    /// Tokens per block.
    pub block: usize,
}

impl<B: Backend> PagedScore<'_, B> {
    /// Checks the operands; returns the cache's extents, the index heads and the capacity for blocks.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<(PagedDims, usize, usize)> {
        let mut check = Check::new("paged_score");
        check.input("index_q", self.index_q, STORAGE, &[None, None, None])?;
        let shape = self.index_q.shape();
        let (rows, index_heads, head_dim) = (shape[0], shape[1], shape[2]);
        let shape = [None, None, Some(1), Some(head_dim)];
        check.input("index_k_pages", self.index_k_pages, STORAGE, &shape)?;
        check.same_dtype("index_k_pages", self.index_k_pages, self.index_q)?;
        let (slots, max_pages) = rows_of(
            &mut check,
            rows,
            self.page_table,
            self.slots,
            self.positions,
        )?;
        check.output(
            "scores",
            self.scores,
            F32,
            &[Some(index_heads), Some(rows), None],
        )?;
        check.rows("index_q", self.index_q)?;
        check.contiguous("index_k_pages", self.index_k_pages)?;
        check.contiguous("scores", self.scores)?;
        check.argument(self.block > 0, || "block must not be zero".into())?;
        check.disjoint()?;
        let (pages, page) = (self.index_k_pages.shape()[0], self.index_k_pages.shape()[1]);
        let cache = PagedDims {
            rows,
            heads: 1,
            head_dim,
            slots,
            max_pages,
            pages,
            page,
        };
        Ok((cache, index_heads, self.scores.shape()[2]))
    }
}

fn rows_of<'a, B: Backend>(
    check: &mut Check<'a, B>,
    rows: usize,
    page_table: &'a Tensor<B>,
    slots: &'a Tensor<B>,
    positions: &'a Tensor<B>,
) -> Result<(usize, usize)> {
    check.input("page_table", page_table, I32, &[None, None])?;
    check.input("slots", slots, I32, &[Some(rows)])?;
    check.input("positions", positions, I32, &[Some(rows)])?;
    for (name, tensor) in [
        ("page_table", page_table),
        ("slots", slots),
        ("positions", positions),
    ] {
        check.contiguous(name, tensor)?;
    }
    Ok((page_table.shape()[0], page_table.shape()[1]))
}
