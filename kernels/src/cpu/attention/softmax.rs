//! What happens to a tile of scores between its two products.

use std::ops::Range;

use super::mask::Batch;
use crate::cpu::access::Storage;
use crate::cpu::math;
use crate::cpu::simd::{self, dispatch};

/// Running maximum and sum of exponentials of a row, in fp32.
#[derive(Clone, Copy, Debug)]
pub(super) struct State {
    pub largest: f32,
    pub sum: f32,
}

impl State {
    /// Before the first key.
    pub(super) const EMPTY: State = State {
        largest: f32::NEG_INFINITY,
        sum: 0.0,
    };
}

/// What the forward pass knows about a row: its lse, and dO · O.
#[derive(Clone, Copy, Debug)]
pub(super) struct Saved {
    pub lse: f32,
    pub delta: f32,
}

dispatch! {
    /// Turns q·k into P = exp(scale · q·k − maximum so far), rounded for the product with V; the sum takes P unrounded.
    /// `factors` receives by how much each row's earlier result shrinks.
    pub(super) fn softmax<F: Fn(f32) -> f32>(
        scores: &mut [f32],
        width: usize,
        batch: &Batch<'_>,
        scale: f32,
        states: &mut [State],
        factors: &mut Vec<f32>,
        round: F,
    ) {
        factors.clear();
        for (scores, (row, columns)) in scores.chunks_exact_mut(width).zip(batch.each()) {
            factors.push(softmax_row(scores, columns, scale, &mut states[row], &round));
        }
    }

    /// result = result · factor + partial, row by row.
    pub(super) fn accumulate(
        partial: &[f32],
        width: usize,
        batch: &Batch<'_>,
        factors: &[f32],
        result: &mut [f32],
    ) {
        for ((partial, (row, _)), &factor) in partial.chunks_exact(width).zip(batch.each()).zip(factors) {
            let result = &mut result[row * width..][..width];
            for (result, &partial) in result.iter_mut().zip(partial) {
                // A sum is never −0, so keys that count nothing cannot change its sign.
                *result = *result * factor + partial + 0.0;
            }
        }
    }

    /// o = result / sum, one rounding; 0 for a row that saw nothing.
    pub(super) fn normalise<T: Storage>(result: &[f32], sum: f32, o: &mut [T]) {
        for (o, &result) in o.iter_mut().zip(result) {
            *o = T::from_f32(if sum == 0.0 { 0.0 } else { result / sum });
        }
    }

    /// Turns q·k into P = exp(scale · q·k − lse) and dP into dS = P · (dP − delta), both rounded as operands of the
    /// products that follow.
    pub(super) fn softmax_gradient<F: Fn(f32) -> f32>(
        scores: &mut [f32],
        d_p: &mut [f32],
        width: usize,
        batch: &Batch<'_>,
        scale: f32,
        saved: &[Saved],
        round: F,
    ) {
        let rows = scores.chunks_exact_mut(width).zip(d_p.chunks_exact_mut(width));
        for (((scores, d_p), (_, columns)), saved) in rows.zip(batch.each()).zip(saved) {
            if saved.lse == f32::NEG_INFINITY {
                scores.fill(0.0);
                d_p.fill(0.0);
                continue;
            }
            for (score, d_p) in scores.iter_mut().zip(d_p.iter_mut()) {
                let p = math::exp(*score * scale - saved.lse);
                (*score, *d_p) = (round(p), round(p * (*d_p - saved.delta)));
            }
            fill_outside(scores, columns, 0.0);
            fill_outside(d_p, columns, 0.0);
        }
    }

    /// delta = Σ dO · O, in the order of the products that give dP: a query with one visible key, where both are the same
    /// sum, has a gradient of exactly 0.
    pub(super) fn delta<T: Storage>(d_o: &[T], o: &[T]) -> f32 {
        let pairs = d_o.iter().zip(o);
        pairs.fold(0.0, |sum, (d_o, o)| d_o.to_f32().mul_add(o.to_f32(), sum))
    }

    /// Rounds scale · sum; +0 stays +0 whatever the sign of the scale.
    pub(super) fn store_scaled<T: Storage>(sum: &[f32], scale: f32, to: &mut [T]) {
        for (to, &sum) in to.iter_mut().zip(sum) {
            *to = T::from_f32(sum * scale + 0.0);
        }
    }

    /// sum += slice.
    pub(super) fn add(slice: &[f32], sum: &mut [f32]) {
        for (sum, &slice) in sum.iter_mut().zip(slice) {
            *sum += slice;
        }
    }

    /// Whether no element is an infinity or a NaN.
    pub(super) fn all_finite(x: &[f32]) -> bool {
        const EXPONENT: u32 = 0x7f80_0000;
        x.iter().fold(0, |any, x| any | u32::from(x.to_bits() & EXPONENT == EXPONENT)) == 0
    }

    /// weights · b, a row's own columns alone: what it does not see may be infinite or NaN. On finite operands the bits
    /// of the plain product, whose other terms are 0.
    pub(super) fn seen_product(weights: &[f32], width: usize, batch: &Batch<'_>, b: &[f32], c: &mut [f32], cols: usize) {
        for ((weights, (_, columns)), c) in weights.chunks_exact(width).zip(batch.each()).zip(c.chunks_exact_mut(cols)) {
            c.fill(0.0);
            for column in columns.iter().cloned().flatten() {
                add_multiple(weights[column], &b[column * cols..][..cols], c);
            }
        }
    }

    /// weightsᵀ · b in the same way, added to `sum`; `c` holds the product.
    pub(super) fn add_seen_transposed_product(
        weights: &[f32],
        width: usize,
        batch: &Batch<'_>,
        b: &[f32],
        c: &mut Vec<f32>,
        sum: &mut [f32],
    ) {
        let cols = sum.len() / width;
        c.clear();
        c.resize(sum.len(), 0.0);
        for ((weights, (_, columns)), b) in weights.chunks_exact(width).zip(batch.each()).zip(b.chunks_exact(cols)) {
            for column in columns.iter().cloned().flatten() {
                add_multiple(weights[column], b, &mut c[column * cols..][..cols]);
            }
        }
        for (sum, &c) in sum.iter_mut().zip(c.iter()) {
            *sum += c;
        }
    }
}

#[inline(always)]
fn softmax_row(
    scores: &mut [f32],
    columns: &[Range<usize>],
    scale: f32,
    state: &mut State,
    round: &impl Fn(f32) -> f32,
) -> f32 {
    for score in scores.iter_mut() {
        *score *= scale;
    }
    fill_outside(scores, columns, f32::NEG_INFINITY);
    let tile = simd::max(scores);
    let largest = if tile > state.largest || tile.is_nan() {
        tile
    } else {
        state.largest
    };
    if largest == f32::NEG_INFINITY {
        scores.fill(0.0);
        return 1.0;
    }
    for score in scores.iter_mut() {
        *score = math::exp(*score - largest);
    }
    let factor = math::exp(state.largest - largest);
    state.sum = state.sum * factor + simd::sum(scores);
    state.largest = largest;
    for score in scores.iter_mut() {
        *score = round(*score);
    }
    factor
}

/// Sets what lies before, between and behind the columns.
#[inline(always)]
fn fill_outside(row: &mut [f32], columns: &[Range<usize>], value: f32) {
    let mut end = 0;
    for range in columns {
        row[end..range.start].fill(value);
        end = range.end;
    }
    row[end..].fill(value);
}

#[inline(always)]
fn add_multiple(factor: f32, x: &[f32], sum: &mut [f32]) {
    for (sum, &x) in sum.iter_mut().zip(x) {
        *sum = factor.mul_add(x, *sum);
    }
}
