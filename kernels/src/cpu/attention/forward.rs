//! The walk over key tiles, forward.
//!
//! A task owns some queries of one sequence and one kv head: queries x group rows. For every key tile that one of them
//! sees, K and V are packed once; the rows that see a key of it are gathered, multiplied with Kᵀ, masked, exponentiated
//! against the running maximum and multiplied with V. A row's result is the chain of its tiles in ascending order, so
//! it depends on nothing but the row itself and the keys it sees.

use std::cell::RefCell;

use super::mask::{Mask, Queries, Sight, Visible};
use super::rows::{Rows, widen_heads, widen_tile};
use super::softmax::{State, accumulate, all_finite, normalise, seen_product, softmax};
use crate::cpu::access::{Storage, View, ViewMut};
use crate::cpu::gemm::{Matrix, MatrixMut, PackedB, Scratch, gemm_packed};
use crate::cpu::math;

/// Operands of a forward pass; tasks write disjoint rows.
pub(in crate::cpu) struct Forward<'a, T> {
    /// `[rows, Hq, D]`
    pub q: View<'a, T>,
    /// Written; `[rows, Hq, D]`.
    pub o: ViewMut<'a, T>,
    /// Written; `[rows, Hq]`.
    pub lse: ViewMut<'a, f32>,
    /// Which keys a query sees.
    pub sight: Sight<'a>,
    /// Query heads per kv head.
    pub group: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Keys per tile.
    pub key_tile: usize,
}

thread_local! {
    static BUFFERS: RefCell<Buffers> = RefCell::default();
}

/// Memory of a task, reused by the next one on its thread.
#[derive(Default)]
struct Buffers {
    gemm: Scratch,
    keys: PackedB,
    values: PackedB,
    tile: Vec<f32>,
    visible: Visible,
    mask: Mask,
    q: Vec<f32>,
    scores: Vec<f32>,
    partial: Vec<f32>,
    factors: Vec<f32>,
    states: Vec<State>,
    result: Vec<f32>,
}

impl<T: Storage> Forward<'_, T> {
    /// Attention of some queries, for the query heads of one kv head.
    pub(in crate::cpu) fn run(
        &self,
        kv_head: usize,
        queries: &Queries,
        keys: &impl Rows<T>,
        values: &impl Rows<T>,
    ) {
        // A task runs no other task before it is finished, so the buffers are never borrowed twice.
        BUFFERS.with_borrow_mut(|buffers| self.walk(kv_head, queries, keys, values, buffers));
    }

    fn walk(
        &self,
        kv_head: usize,
        queries: &Queries,
        keys: &impl Rows<T>,
        values: &impl Rows<T>,
        buffers: &mut Buffers,
    ) {
        let head_dim = self.q.shape()[2];
        let rows = queries.rows.len() * self.group;
        buffers.states.clear();
        buffers.states.resize(rows, State::EMPTY);
        buffers.result.clear();
        buffers.result.resize(rows * head_dim, 0.0);
        self.sight.list(kv_head, queries, &mut buffers.visible);
        while let Some(first) = buffers.visible.next_tile(self.key_tile, &mut buffers.mask) {
            let width = buffers.mask.width();
            let seen = first..first + width;
            widen_tile(keys, seen.clone(), &mut buffers.tile);
            let tile = Matrix::row_major(&buffers.tile, width, head_dim);
            buffers.keys.pack(tile.transposed());
            widen_tile(values, seen, &mut buffers.tile);
            let tile = Matrix::row_major(&buffers.tile, width, head_dim);
            buffers.values.pack(tile);
            self.tile(kv_head, queries, width, buffers);
        }
        self.store(kv_head, queries, buffers);
    }

    /// Takes the packed tile into account.
    fn tile(&self, kv_head: usize, queries: &Queries, width: usize, buffers: &mut Buffers) {
        let head_dim = self.q.shape()[2];
        let heads = kv_head * self.group..(kv_head + 1) * self.group;
        let plain = !buffers.mask.has_gaps(width) || all_finite(&buffers.tile);
        for batch in buffers.mask.batches(self.group) {
            let rows = batch.rows();
            let tokens = batch
                .queries()
                .iter()
                .map(|query| queries.rows.start + query);
            widen_heads(self.q, tokens, heads.clone(), &mut buffers.q);
            let scores = at_least(&mut buffers.scores, rows * width);
            let partial = at_least(&mut buffers.partial, rows * head_dim);

            let q = Matrix::row_major(&buffers.q, rows, head_dim);
            let products = MatrixMut::row_major(scores, rows, width);
            gemm_packed(&mut buffers.gemm, q, &buffers.keys, products, false);
            let (states, factors) = (&mut buffers.states, &mut buffers.factors);
            let round = |p| T::from_f32(p).to_f32();
            softmax(scores, width, &batch, self.scale, states, factors, round);
            if plain {
                let p = Matrix::row_major(scores, rows, width);
                let products = MatrixMut::row_major(partial, rows, head_dim);
                gemm_packed(&mut buffers.gemm, p, &buffers.values, products, false);
            } else {
                seen_product(scores, width, &batch, &buffers.tile, partial, head_dim);
            }
            accumulate(partial, head_dim, &batch, factors, &mut buffers.result);
        }
    }

    fn store(&self, kv_head: usize, queries: &Queries, buffers: &Buffers) {
        let head_dim = self.q.shape()[2];
        let results = buffers.result.chunks_exact(head_dim);
        for (row, (result, state)) in results.zip(&buffers.states).enumerate() {
            let token = queries.rows.start + row / self.group;
            let head = kv_head * self.group + row % self.group;
            // SAFETY: a query and kv head belong to one task.
            unsafe {
                normalise(result, state.sum, self.o.row_mut([token, head]));
                let lse = state.largest + math::log(state.sum);
                self.lse.set([token, head], lse);
            }
        }
    }
}

/// The first `length` elements, with whatever they held before.
pub(super) fn at_least(buffer: &mut Vec<f32>, length: usize) -> &mut [f32] {
    if buffer.len() < length {
        buffer.resize(length, 0.0);
    }
    &mut buffer[..length]
}
