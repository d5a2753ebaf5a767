//! Block maxima of the index scores.
//!
//! A task owns some queries of one sequence, all index heads of them, and passes over the keys they see in tiles that
//! are packed once. A score is one chain of fused multiply-adds and a maximum has no order, so neither tiles nor
//! neighbours show in the bits.

use std::cell::RefCell;
use std::ops::Range;

use rayon::prelude::*;

use super::CpuBackend;
use super::access::{Access, Storage, View, ViewMut, sequences, with_storage};
use super::attention::mask::Queries;
use super::gemm::{Matrix, MatrixMut, PackedB, Scratch, gemm_packed};
use super::simd::{self, dispatch};
use crate::error::{Error, Result};
use crate::ops;

/// Queries of a task: 512 rows at four index heads, beside which packing a tile of keys costs little.
pub(super) const TASK_QUERIES: usize = 128;
/// Keys of a tile.
const TILE_KEYS: usize = 256;
/// Rows whose scores are held at a time; 192 KiB of a tile.
const BATCH_ROWS: usize = 192;

pub(super) fn msa_score(_: &CpuBackend, args: &ops::MsaScore<'_, CpuBackend>) -> Result<()> {
    const OP: &str = "msa_score";
    let dims = args.dims()?;
    let access = Access::lock(&[args.index_q, args.index_k, args.cu_seqlens, args.scores]);
    let cu_seqlens = access.read::<i32>(args.cu_seqlens).as_slice();
    let sequences = sequences(OP, cu_seqlens, dims.tokens)?;
    let longest = sequences.iter().map(Range::len).max().unwrap_or(0);
    if longest.div_ceil(args.block) > dims.max_blocks {
        let (block, capacity) = (args.block, dims.max_blocks);
        let what = format!(
            "a sequence of {longest} tokens in blocks of {block} needs more than the {capacity} blocks of scores"
        );
        return Err(Error::Argument { op: OP, what });
    }
    let scores = access.write::<f32>(args.scores);
    let covered = sequences.last().map_or(0, |sequence| sequence.end);
    for head in 0..dims.index_heads {
        for token in covered..dims.tokens {
            // SAFETY: no task has begun.
            unsafe { scores.row_mut([head, token]) }.fill(f32::NEG_INFINITY);
        }
    }
    let tasks: Vec<_> = sequences
        .iter()
        .flat_map(|sequence| {
            let first = sequence.clone().step_by(TASK_QUERIES);
            first.map(move |first| (sequence, first..sequence.end.min(first + TASK_QUERIES)))
        })
        .collect();
    with_storage!(args.index_q.dtype(), T => {
        let op = Score { index_q: access.read::<T>(args.index_q), scores, block: args.block };
        let index_k = access.read::<T>(args.index_k);
        tasks.into_par_iter().with_max_len(1).for_each(|(sequence, rows)| {
            let position = rows.start - sequence.start;
            let queries = Queries { rows, position, keys: sequence.len() };
            op.run(&queries, |keys, packed| {
                let keys = sequence.start + keys.start..sequence.start + keys.end;
                packed.pack(matrix(index_k, keys).transposed());
            });
        });
    });
    Ok(())
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

#[derive(Default)]
struct Buffers {
    gemm: Scratch,
    keys: PackedB,
    queries: Vec<f32>,
    products: Vec<f32>,
}

/// The scores of some queries at a time; tasks write disjoint ones.
pub(super) struct Score<'a, T> {
    /// `[rows, Hi, Di]`
    pub(super) index_q: View<'a, T>,
    /// Written; `[Hi, rows, max_blocks]`.
    pub(super) scores: ViewMut<'a, f32>,
    /// Tokens per block.
    pub(super) block: usize,
}

impl<T: Storage> Score<'_, T> {
    /// Scores of queries of one sequence; `pack` packs the transposed index keys of a range of its positions.
    pub(super) fn run(&self, queries: &Queries, pack: impl Fn(Range<usize>, &mut PackedB)) {
        // A task runs no other task before it is finished, so the buffers are never borrowed twice.
        BUFFERS.with_borrow_mut(|buffers| self.walk(queries, pack, buffers));
    }

    fn walk(
        &self,
        queries: &Queries,
        pack: impl Fn(Range<usize>, &mut PackedB),
        buffers: &mut Buffers,
    ) {
        let (heads, head_dim) = (self.index_q.shape()[1], self.index_q.shape()[2]);
        buffers.queries.clear();
        for row in queries.rows.clone() {
            for head in 0..heads {
                // SAFETY: a query's scores belong to one task.
                unsafe { self.scores.row_mut([head, row]) }.fill(f32::NEG_INFINITY);
                let row = self.index_q.row([row, head]);
                buffers.queries.extend(row.iter().map(|x| x.to_f32()));
            }
        }
        let all = Matrix::row_major(&buffers.queries, queries.rows.len() * heads, head_dim);
        let seen_keys = queries.position + queries.rows.len();
        for first in (0..seen_keys).step_by(TILE_KEYS) {
            let keys = first..seen_keys.min(first + TILE_KEYS);
            pack(keys.clone(), &mut buffers.keys);
            // The first query that sees a key of this tile.
            let seen = first.saturating_sub(queries.position) * heads;
            for top in (seen..all.rows()).step_by(BATCH_ROWS) {
                let rows = top..all.rows().min(top + BATCH_ROWS);
                buffers.products.resize(BATCH_ROWS * TILE_KEYS, 0.0);
                let products = MatrixMut::row_major(&mut buffers.products, rows.len(), keys.len());
                let batch = all.block(rows.clone(), 0..head_dim);
                gemm_packed(&mut buffers.gemm, batch, &buffers.keys, products, false);
                for (row, products) in rows.zip(buffers.products.chunks_exact(keys.len())) {
                    let (query, head) = (row / heads, row % heads);
                    let visible = (queries.position + query + 1 - first).min(keys.len());
                    // SAFETY: as above.
                    let scores = unsafe { self.scores.row_mut([head, queries.rows.start + query]) };
                    block_maxima(&products[..visible], first, self.block, scores);
                }
            }
        }
    }
}

/// Rows `tokens` of the index keys `[T, 1, Di]`.
fn matrix<T: Storage>(index_k: View<'_, T>, tokens: Range<usize>) -> Matrix<'_, T> {
    let (strides, head_dim) = (index_k.strides(), index_k.shape()[2]);
    let start = index_k.as_ptr().wrapping_add(tokens.start * strides[0]);
    let stride = strides[0];
    // SAFETY: rows of the view, whose innermost axis is dense; nothing writes them during the operation.
    unsafe { Matrix::from_raw(start, [tokens.len(), head_dim], [stride, 1]) }
}

dispatch! {
    /// Raises the scores of the blocks that keys from place `at` of the sequence on belong to.
    fn block_maxima(products: &[f32], at: usize, block: usize, scores: &mut [f32]) {
        let mut rest = products;
        let mut at = at;
        while !rest.is_empty() {
            let (part, after) = rest.split_at((block - at % block).min(rest.len()));
            let largest = simd::max(part);
            let score = &mut scores[at / block];
            if largest > *score || largest.is_nan() {
                // Zeros of either sign are one value.
                *score = largest + 0.0;
            }
            (rest, at) = (after, at + part.len());
        }
    }
}
