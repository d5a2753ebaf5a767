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
use super::gemm::{Matrix, MatrixMut, PackedB, Scratch, gemm_packed};
use super::simd::{self, dispatch};
use crate::error::{Error, Result};
use crate::ops;

/// Queries of a task: 512 rows at four index heads, beside which packing a tile of keys costs little.
const TASK_QUERIES: usize = 128;
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
        let op = Score {
            index_q: access.read::<T>(args.index_q),
            index_k: access.read::<T>(args.index_k),
            scores,
            block: args.block,
        };
        tasks.into_par_iter().with_max_len(1).for_each(|(sequence, queries)| {
            BUFFERS.with_borrow_mut(|buffers| op.run(sequence, queries, buffers));
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

struct Score<'a, T> {
    index_q: View<'a, T>,
    index_k: View<'a, T>,
    scores: ViewMut<'a, f32>,
    block: usize,
}

impl<T: Storage> Score<'_, T> {
    fn run(&self, sequence: &Range<usize>, queries: Range<usize>, buffers: &mut Buffers) {
        let (heads, head_dim) = (self.index_q.shape()[1], self.index_q.shape()[2]);
        buffers.queries.clear();
        for query in queries.clone() {
            for head in 0..heads {
                // SAFETY: a query's scores belong to one task.
                unsafe { self.scores.row_mut([head, query]) }.fill(f32::NEG_INFINITY);
                let row = self.index_q.row([query, head]);
                buffers.queries.extend(row.iter().map(|x| x.to_f32()));
            }
        }
        let all = Matrix::row_major(&buffers.queries, queries.len() * heads, head_dim);
        for first in (sequence.start..queries.end).step_by(TILE_KEYS) {
            let keys = first..queries.end.min(first + TILE_KEYS);
            buffers.keys.pack(self.keys(keys.clone()).transposed());
            // The first query that sees a key of this tile.
            let seen = first.saturating_sub(queries.start) * heads;
            for top in (seen..all.rows()).step_by(BATCH_ROWS) {
                let rows = top..all.rows().min(top + BATCH_ROWS);
                buffers.products.resize(BATCH_ROWS * TILE_KEYS, 0.0);
                let products = MatrixMut::row_major(&mut buffers.products, rows.len(), keys.len());
                let batch = all.block(rows.clone(), 0..head_dim);
                gemm_packed(&mut buffers.gemm, batch, &buffers.keys, products, false);
                for (row, products) in rows.zip(buffers.products.chunks_exact(keys.len())) {
                    let (query, head) = (queries.start + row / heads, row % heads);
                    let visible = (query + 1 - first).min(keys.len());
                    // SAFETY: as above.
                    let scores = unsafe { self.scores.row_mut([head, query]) };
                    let at = first - sequence.start;
                    block_maxima(&products[..visible], at, self.block, scores);
                }
            }
        }
    }

    fn keys(&self, keys: Range<usize>) -> Matrix<'_, T> {
        let (strides, head_dim) = (self.index_k.strides(), self.index_k.shape()[2]);
        let start = self.index_k.as_ptr().wrapping_add(keys.start * strides[0]);
        // SAFETY: rows of the view, whose innermost axis is dense; nothing writes them during the operation.
        unsafe { Matrix::from_raw(start, [keys.len(), head_dim], [strides[0], 1]) }
    }
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
