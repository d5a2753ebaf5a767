//! Operands in the order in which the register tile reads them, widened to f32.
//!
//! B becomes panels of [`PANEL_COLS`] columns, each `[k][32]`, zero-filled on the right. A's row panel becomes rows of
//! k, [`ROW_STRIDE`] apart. Where k is the dense axis of A, or n of B, that is a copy; the other way round it goes
//! through transposed 8x8 tiles, and element by element for any other strides.

use std::slice;

use super::matrix::Matrix;
use super::{BLOCK_COLS, CHUNK, Span, spans};
use crate::cpu::access::Storage;
use crate::cpu::simd::{Isa, dispatch};

/// Columns of a panel of B, the same for every instruction set.
pub(super) const PANEL_COLS: usize = 32;

/// Distance between packed rows of A: a chunk, and one cache line more so that rows do not share the L1 sets.
pub(super) const ROW_STRIDE: usize = CHUNK + 16;

/// Side of a tile that is transposed in registers.
const SIDE: usize = 8;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code, reason = "read through pointers")] [f32; 16]);

/// f32 memory that starts at a cache line and only grows.
#[derive(Default)]
pub(super) struct Aligned(Vec<Line>);

impl Aligned {
    /// At least `length` elements with whatever they held before.
    pub(super) fn at_least(&mut self, length: usize) -> &mut [f32] {
        let lines = length.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: a line is sixteen f32 without padding.
        unsafe { slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 16) }
    }

    fn as_slice(&self) -> &[f32] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 16) }
    }
}

/// A right operand that is packed once and used for many products: a tile of K or V, or a weight.
#[derive(Default)]
pub struct PackedB {
    elements: Aligned,
    rows: usize,
    cols: usize,
}

impl PackedB {
    /// Packs `b` in the place of what was held before; allocates only to grow.
    pub fn pack<T: Storage>(&mut self, b: Matrix<'_, T>) {
        (self.rows, self.cols) = (b.rows(), b.cols());
        let padded = self.cols.next_multiple_of(PANEL_COLS);
        let elements = self.elements.at_least(self.rows * padded);
        for k in spans(self.rows, CHUNK) {
            let chunk = &mut elements[k.first * padded..][..k.length * padded];
            panels(b.block(k.range(), 0..self.cols), chunk);
        }
    }

    /// Rows (k) of the packed matrix.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns (n) of the packed matrix.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The panels of a chunk from a column on that starts a panel.
    pub(super) fn panels(&self, k: Span, cols: Span) -> &[f32] {
        const { assert!(BLOCK_COLS.is_multiple_of(PANEL_COLS)) };
        let padded = self.cols.next_multiple_of(PANEL_COLS);
        &self.elements.as_slice()[k.first * padded + cols.first * k.length..]
    }
}

dispatch! {
    /// Packs `b` `[k, n]`, k ≤ [`CHUNK`], into panels.
    pub(super) fn panels<T: Storage>(b: Matrix<'_, T>, to: &mut [f32]) {
        let (depth, cols) = (b.rows(), b.cols());
        assert!(to.len() >= depth * cols.next_multiple_of(PANEL_COLS));
        for (panel, span) in to.chunks_exact_mut(depth.max(1) * PANEL_COLS).zip(spans(cols, PANEL_COLS)) {
            let from = b.block(0..depth, span.range());
            if from.strides().1 == 1 {
                for (k, row) in panel.as_chunks_mut::<PANEL_COLS>().0.iter_mut().enumerate() {
                    // SAFETY: row k of the panel's columns, which are dense.
                    let from = unsafe { slice::from_raw_parts(from.at(k, 0), span.length) };
                    widen_padded(from, row);
                }
            } else {
                transpose(from.transposed(), panel, PANEL_COLS, PANEL_COLS);
            }
        }
    }

    /// Packs the rows of `a` `[rows, k]`, k ≤ [`CHUNK`].
    pub(super) fn rows<T: Storage>(a: Matrix<'_, T>, to: &mut [f32]) {
        let (rows, depth) = (a.rows(), a.cols());
        assert!(depth <= CHUNK && to.len() >= rows * ROW_STRIDE);
        if a.strides().1 != 1 && rows > 1 {
            return transpose(a.transposed(), to, ROW_STRIDE, 0);
        }
        for (row, to) in to.chunks_exact_mut(ROW_STRIDE).take(rows).enumerate() {
            if a.strides().1 == 1 {
                // SAFETY: a dense row of `a`.
                let from = unsafe { slice::from_raw_parts(a.at(row, 0), depth) };
                widen(from, &mut to[..depth]);
            } else {
                for (k, to) in to[..depth].iter_mut().enumerate() {
                    // SAFETY: an element of `a`.
                    *to = unsafe { *a.at(row, k) }.to_f32();
                }
            }
        }
    }
}

#[inline(always)]
fn widen<T: Storage>(from: &[T], to: &mut [f32]) {
    for (to, &from) in to.iter_mut().zip(from) {
        *to = from.to_f32();
    }
}

/// A constant length lets the common case of a whole panel be two moves.
#[inline(always)]
fn widen_padded<T: Storage>(from: &[T], to: &mut [f32; PANEL_COLS]) {
    match from.first_chunk::<PANEL_COLS>() {
        Some(whole) => widen(whole, to),
        None => {
            to.fill(0.0);
            widen(from, to);
        }
    }
}

/// `to[j·stride + i] = from[i, j]`; rows i from the last to `padded` become 0.
///
/// Fast if `from` is dense along j. A strip is one cache line of `from` wide, so that both what is read and what is
/// written of it stay in L1 until they are done.
#[inline(always)]
fn transpose<T: Storage>(from: Matrix<'_, T>, to: &mut [f32], stride: usize, padded: usize) {
    let (rows, cols) = (from.rows(), from.cols());
    assert!(cols == 0 || to.len() >= (cols - 1) * stride + rows.max(padded));
    let in_registers = from.strides().1 == 1 && Isa::current() >= Isa::Avx2;
    let row_stride = from.strides().0;
    for strip in spans(cols, 2 * SIDE) {
        let mut tiles = from.at(0, strip.first);
        let mut target = to[strip.first * stride..].as_mut_ptr();
        for i in spans(rows, SIDE) {
            if in_registers && i.length == SIDE && strip.length == 2 * SIDE {
                // SAFETY: two whole tiles of `from`, dense along j, to their place in `to`; the machine has AVX2.
                #[cfg(target_arch = "x86_64")]
                unsafe {
                    x86::transpose_tile(tiles, row_stride, target, stride);
                    let beside = target.wrapping_add(SIDE * stride);
                    x86::transpose_tile(tiles.wrapping_add(SIDE), row_stride, beside, stride);
                }
            } else {
                // SAFETY: the tiles' place in `to`.
                unsafe { transpose_elements(from.block(i.range(), strip.range()), target, stride) };
            }
            tiles = tiles.wrapping_add(SIDE * row_stride);
            target = target.wrapping_add(SIDE);
        }
        for to in to[strip.first * stride..]
            .chunks_mut(stride)
            .take(strip.length)
        {
            to[rows..rows.max(padded)].fill(0.0);
        }
    }
}

#[inline(always)]
unsafe fn transpose_elements<T: Storage>(from: Matrix<'_, T>, to: *mut f32, stride: usize) {
    for row in 0..from.rows() {
        for col in 0..from.cols() {
            // SAFETY: an element of `from`; its place by the caller's promise.
            unsafe { *to.add(col * stride + row) = (*from.at(row, col)).to_f32() }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use m3_spec::dtype::DType;

    use super::SIDE;
    use crate::cpu::access::Storage;

    /// `to[j·to_stride + i] = from[i·stride + j]` for i, j < 8.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn transpose_tile<T: Storage>(
        from: *const T,
        stride: usize,
        to: *mut f32,
        to_stride: usize,
    ) {
        let mut row = from;
        let r: [__m256; SIDE] = std::array::from_fn(|_| {
            // SAFETY: by the caller's promise.
            let loaded = unsafe { load(row) };
            row = row.wrapping_add(stride);
            loaded
        });
        // Pairs, then quadruples of rows within 128 bits, then the halves.
        let pair = |i: usize| {
            (
                _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]),
                _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]),
            )
        };
        let quadruple = |(a_low, a_high), (b_low, b_high)| {
            [
                _mm256_shuffle_ps::<0b01_00_01_00>(a_low, b_low),
                _mm256_shuffle_ps::<0b11_10_11_10>(a_low, b_low),
                _mm256_shuffle_ps::<0b01_00_01_00>(a_high, b_high),
                _mm256_shuffle_ps::<0b11_10_11_10>(a_high, b_high),
            ]
        };
        let upper = quadruple(pair(0), pair(1));
        let lower = quadruple(pair(2), pair(3));
        let (mut left, mut right) = (to, to.wrapping_add(SIDE / 2 * to_stride));
        for (&upper, &lower) in upper.iter().zip(&lower) {
            // SAFETY: by the caller's promise.
            unsafe {
                _mm256_storeu_ps(left, _mm256_permute2f128_ps::<0x20>(upper, lower));
                _mm256_storeu_ps(right, _mm256_permute2f128_ps::<0x31>(upper, lower));
            }
            left = left.wrapping_add(to_stride);
            right = right.wrapping_add(to_stride);
        }
    }

    /// Eight elements, widened.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load<T: Storage>(from: *const T) -> __m256 {
        // SAFETY: by the caller's promise.
        unsafe {
            match T::DTYPE {
                DType::BF16 => {
                    let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
                }
                _ => _mm256_loadu_ps(from.cast()),
            }
        }
    }
}
