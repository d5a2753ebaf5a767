//! Gradients of attention.
//!
//! dQ walks the key tiles of a query tile as the forward pass does. dK and dV walk the queries of a key tile, in chunks
//! that count from the sequence's start, for one slice of the query heads; the slices are summed in order at the end. P
//! is recomputed from the lse. Neither order depends on anything outside the sequence.

use std::cell::RefCell;
use std::ops::Range;

use super::forward::at_least;
use super::mask::{Batch, Mask, Queries, Sight, Visible};
use super::rows::{Packed, widen_heads, widen_tile};
use super::softmax::{
    Saved, accumulate, add_seen_transposed_product, all_finite, seen_product, softmax_gradient,
    store_scaled,
};
use crate::cpu::access::{Storage, View, ViewMut};
use crate::cpu::gemm::{CHUNK, Matrix, MatrixMut, PackedB, Scratch, gemm_block, gemm_packed};

/// Operands of a backward pass; tasks write disjoint rows.
pub(in crate::cpu) struct Backward<'a, T> {
    /// `[T, Hq, D]`
    pub q: View<'a, T>,
    /// `[T, Hkv, D]`
    pub k: View<'a, T>,
    /// `[T, Hkv, D]`
    pub v: View<'a, T>,
    /// `[T, Hq, D]`
    pub d_o: View<'a, T>,
    /// `[T, Hq]`
    pub lse: View<'a, f32>,
    /// `[T, Hq]`
    pub delta: View<'a, f32>,
    /// Written; `[T, Hq, D]`.
    pub dq: ViewMut<'a, T>,
    /// Written; `[head_splits, T, Hkv, D]`, before the scale.
    pub dk_slices: ViewMut<'a, f32>,
    /// Written; `[head_splits, T, Hkv, D]`.
    pub dv_slices: ViewMut<'a, f32>,
    /// Which keys a query sees.
    pub sight: Sight<'a>,
    /// Query heads per kv head.
    pub group: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Keys per tile.
    pub key_tile: usize,
    /// Most queries of a chunk.
    pub query_tile: usize,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// Memory of a task, reused by the next one on its thread.
#[derive(Default)]
struct Buffers {
    step: Step,
    keys_plain: PackedB,
    visible: Visible,
    mask: Mask,
    partial: Vec<f32>,
    factors: Vec<f32>,
    sums: [Vec<f32>; 2],
}

/// What one tile of scores needs.
#[derive(Default)]
struct Step {
    gemm: Scratch,
    /// Kᵀ and Vᵀ of the tile.
    keys: PackedB,
    values: PackedB,
    tile: Vec<f32>,
    q: Vec<f32>,
    d_o: Vec<f32>,
    saved: Vec<Saved>,
    p: Vec<f32>,
    d_s: Vec<f32>,
}

/// A key tile of a sequence and a slice of the query heads.
pub(in crate::cpu) struct KeyTask {
    /// Tokens of the sequence.
    pub sequence: Range<usize>,
    pub kv_head: usize,
    /// The keys, by position in the sequence.
    pub keys: Range<usize>,
    /// Number of the slice.
    pub split: usize,
    /// Its query heads, one at least.
    pub heads: Range<usize>,
}

/// Queries of a key tile.
pub(in crate::cpu) enum Seen<'a> {
    /// All from this position on; earlier keys of the tile only if causal.
    From(usize),
    /// Of every block of the tile: its keys, by position, and its queries (tokens of the pack), ascending.
    Listed(Vec<(Range<usize>, &'a [i32])>),
}

impl<T: Storage> Backward<'_, T> {
    /// dQ of some queries, for the query heads of one kv head.
    pub(in crate::cpu) fn queries(&self, kv_head: usize, queries: &Queries) {
        // A task runs no other task before it is finished, so the buffers are never borrowed twice.
        BUFFERS.with_borrow_mut(|buffers| self.walk_keys(kv_head, queries, buffers));
    }

    /// A slice of dK and dV of some keys, from the queries that see them.
    pub(in crate::cpu) fn keys(&self, task: &KeyTask, seen: Seen<'_>) {
        BUFFERS.with_borrow_mut(|buffers| self.walk_queries(task, seen, buffers));
    }

    fn walk_keys(&self, kv_head: usize, queries: &Queries, buffers: &mut Buffers) {
        let head_dim = self.q.shape()[2];
        let heads = kv_head * self.group..(kv_head + 1) * self.group;
        let first_token = queries.rows.start - queries.position;
        let sum = &mut buffers.sums[0];
        sum.clear();
        sum.resize(queries.rows.len() * self.group * head_dim, 0.0);
        self.sight.list(kv_head, queries, &mut buffers.visible);
        while let Some(first) = buffers.visible.next_tile(self.key_tile, &mut buffers.mask) {
            let width = buffers.mask.width();
            self.pack(
                first_token,
                kv_head,
                first..first + width,
                &mut buffers.step,
            );
            // The packing has left K's rows in `tile`.
            let keys = Matrix::row_major(&buffers.step.tile, width, head_dim);
            buffers.keys_plain.pack(keys);
            let plain = !buffers.mask.has_gaps(width) || all_finite(&buffers.step.tile);
            for batch in buffers.mask.batches(self.group) {
                let rows = batch.rows();
                self.step(queries.rows.start, &heads, &batch, width, &mut buffers.step);
                let step = &mut buffers.step;
                let partial = at_least(&mut buffers.partial, rows * head_dim);
                if plain {
                    let d_s = Matrix::row_major(&step.d_s, rows, width);
                    let products = MatrixMut::row_major(partial, rows, head_dim);
                    gemm_packed(&mut step.gemm, d_s, &buffers.keys_plain, products, false);
                } else {
                    seen_product(&step.d_s, width, &batch, &step.tile, partial, head_dim);
                }
                buffers.factors.resize(rows.max(buffers.factors.len()), 1.0);
                accumulate(partial, head_dim, &batch, &buffers.factors, sum);
            }
        }
        for (row, sum) in sum.chunks_exact(head_dim).enumerate() {
            let token = queries.rows.start + row / self.group;
            let head = heads.start + row % self.group;
            // SAFETY: a query and kv head belong to one task.
            store_scaled(sum, self.scale, unsafe { self.dq.row_mut([token, head]) });
        }
    }

    fn walk_queries(&self, task: &KeyTask, mut seen: Seen<'_>, buffers: &mut Buffers) {
        let KeyTask {
            sequence,
            keys,
            heads,
            ..
        } = task;
        let (head_dim, width) = (self.q.shape()[2], keys.len());
        let causal = !matches!(self.sight, Sight::Whole);
        let [dk, dv] = &mut buffers.sums;
        for sum in [&mut *dk, &mut *dv] {
            sum.clear();
            sum.resize(width * head_dim, 0.0);
        }
        let Buffers { step, mask, .. } = buffers;
        self.pack(sequence.start, task.kv_head, keys.clone(), step);
        // A chunk's sums are one chain of the product; chunks are added in order.
        let chunk = self.query_tile.min(CHUNK / heads.len());
        while let Some(first) = seen.next_chunk(sequence, keys, chunk, causal, mask) {
            let batch = mask.whole(heads.len());
            if batch.rows() == 0 {
                continue;
            }
            self.step(sequence.start + first, heads, &batch, width, step);
            let gaps = mask.has_gaps(width);
            for (weights, rows, sum) in [
                (&step.d_s, &step.q, &mut *dk),
                (&step.p, &step.d_o, &mut *dv),
            ] {
                if !gaps || all_finite(rows) {
                    let weights = Matrix::row_major(weights, batch.rows(), width).transposed();
                    let rows = Matrix::row_major(rows, batch.rows(), head_dim);
                    let sum = MatrixMut::row_major(sum, width, head_dim);
                    gemm_block(&mut step.gemm, weights, rows, sum, true);
                } else {
                    let product = &mut buffers.partial;
                    add_seen_transposed_product(weights, width, &batch, rows, product, sum);
                }
            }
        }
        for (slices, sum) in [(self.dk_slices, dk), (self.dv_slices, dv)] {
            for (position, sum) in keys.clone().zip(sum.chunks_exact(head_dim)) {
                // SAFETY: a key, kv head and slice belong to one task.
                let row = unsafe {
                    slices.row_mut([task.split, sequence.start + position, task.kv_head])
                };
                row.copy_from_slice(sum);
            }
        }
    }

    /// Packs Vᵀ, then Kᵀ of a key tile; leaves K's rows in `tile`.
    fn pack(&self, first_token: usize, kv_head: usize, keys: Range<usize>, step: &mut Step) {
        let (head_dim, width) = (self.q.shape()[2], keys.len());
        let rows = |rows| Packed {
            rows,
            first: first_token,
            head: kv_head,
        };
        widen_tile(&rows(self.v), keys.clone(), &mut step.tile);
        let values = Matrix::row_major(&step.tile, width, head_dim);
        step.values.pack(values.transposed());
        widen_tile(&rows(self.k), keys, &mut step.tile);
        let keys = Matrix::row_major(&step.tile, width, head_dim);
        step.keys.pack(keys.transposed());
    }

    /// P and dS of a batch against the packed tile, and the rows of q and dO they belong to.
    fn step(
        &self,
        first_token: usize,
        heads: &Range<usize>,
        batch: &Batch<'_>,
        width: usize,
        step: &mut Step,
    ) {
        let head_dim = self.q.shape()[2];
        let rows = batch.rows();
        let tokens = || batch.queries().iter().map(|query| first_token + query);
        widen_heads(self.q, tokens(), heads.clone(), &mut step.q);
        widen_heads(self.d_o, tokens(), heads.clone(), &mut step.d_o);
        step.saved.clear();
        for token in tokens() {
            step.saved.extend(heads.clone().map(|head| Saved {
                lse: self.lse.at([token, head]),
                delta: self.delta.at([token, head]),
            }));
        }
        for (left, right, product) in [
            (&step.q, &step.keys, &mut step.p),
            (&step.d_o, &step.values, &mut step.d_s),
        ] {
            product.resize(rows * width, 0.0);
            let left = Matrix::row_major(left, rows, head_dim);
            let product = MatrixMut::row_major(product, rows, width);
            gemm_packed(&mut step.gemm, left, right, product, false);
        }
        let round = |x| T::from_f32(x).to_f32();
        let (p, d_s) = (&mut step.p, &mut step.d_s);
        softmax_gradient(p, d_s, width, batch, self.scale, &step.saved, round);
    }
}

impl Seen<'_> {
    /// First position of the next chunk with a query that sees one of the keys, and what its queries see of them.
    fn next_chunk(
        &mut self,
        sequence: &Range<usize>,
        keys: &Range<usize>,
        chunk: usize,
        causal: bool,
        mask: &mut Mask,
    ) -> Option<usize> {
        mask.clear();
        match self {
            Seen::From(position) => {
                let next = *position;
                if next >= sequence.len() {
                    return None;
                }
                let first = next / chunk * chunk;
                let end = sequence.len().min(first + chunk);
                for query in next..end {
                    let causal_end = if causal {
                        keys.end.min(query + 1)
                    } else {
                        keys.end
                    };
                    mask.see(query - first, 0..causal_end - keys.start);
                }
                *position = end;
                Some(first)
            }
            Seen::Listed(lists) => {
                let position = |list: &[i32]| Some(*list.first()? as usize - sequence.start);
                let next = lists.iter().filter_map(|(_, list)| position(list)).min()?;
                let first = next / chunk * chunk;
                for query in first..first + chunk {
                    for (block, list) in lists.iter_mut() {
                        if position(list) == Some(query) {
                            let seen = block.start.max(keys.start)..block.end.min(keys.end);
                            // A tile of a wide block may begin after the query.
                            let end = seen.end.min(query + 1).max(seen.start);
                            mask.see(query - first, seen.start - keys.start..end - keys.start);
                            *list = &list[1..];
                        }
                    }
                }
                Some(first)
            }
        }
    }
}
