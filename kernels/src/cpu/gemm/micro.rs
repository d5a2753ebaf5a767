//! The register tile: some rows of A times some columns of B over one chunk of k, in registers all the while.
//!
//! Every body does the same to an element: start at +0, one fused multiply-add per k in order, store or add.

use super::pack::{PANEL_COLS, ROW_STRIDE};
use crate::cpu::simd::Isa;

/// Most rows that a tile has on any instruction set.
pub(super) const MAX_ROWS: usize = 12;

/// Lanes of the portable tile and of an AVX-512 register.
const LANES: usize = 16;

/// A row panel of A times the panels of B.
pub(super) struct Tile {
    /// Terms of the sums.
    pub depth: usize,
    /// Packed rows of A, [`ROW_STRIDE`] apart.
    pub a: *const f32,
    /// Packed panels of B, `depth` rows of [`PANEL_COLS`] each, from a cache line on.
    pub b: *const f32,
    /// First element of the result; its columns are dense.
    pub c: *mut f32,
    /// Distance between rows of the result.
    pub c_stride: usize,
    /// Rows, at most [`rows`] of the instruction set.
    pub rows: usize,
    /// Columns, over as many panels as it takes.
    pub cols: usize,
    /// Add to the result instead of replacing it.
    pub add: bool,
}

/// Most rows of a tile on an instruction set: as many as leave registers for a row of B and an element of A.
pub(super) fn rows(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 => 12,
        Isa::Avx2 => 6,
        Isa::Portable => 4,
    }
}

/// Part of one panel of B in one pass of a body.
struct Part {
    depth: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    c_stride: usize,
    cols: usize,
    add: bool,
}

/// Computes a tile.
///
/// # Safety
/// The pointers of `tile` reach as far as its extents say, the result is this call's own, and the machine has `isa`.
pub(super) unsafe fn run(isa: Isa, tile: &Tile) {
    let mut col = 0;
    while col < tile.cols {
        let (panel, within) = (col / PANEL_COLS, col % PANEL_COLS);
        // Registers hold a whole panel on AVX-512 only.
        let most = match isa {
            Isa::Avx512 => PANEL_COLS,
            _ => LANES,
        };
        let part = Part {
            depth: tile.depth,
            a: tile.a,
            b: tile
                .b
                .wrapping_add(panel * tile.depth * PANEL_COLS + within),
            c: tile.c.wrapping_add(col),
            c_stride: tile.c_stride,
            cols: most.min(tile.cols - col),
            add: tile.add,
        };
        // SAFETY: the part lies within the tile, and by the caller's promise.
        unsafe { run_part(isa, tile.rows, &part) };
        col += part.cols;
    }
}

/// Calls a body with the number of rows as a constant.
macro_rules! by_rows {
    ($rows:expr, [$($count:literal)*], |$constant:ident| $call:expr) => {
        match $rows {
            $($count => {
                const $constant: usize = $count;
                $call
            })*
            rows => unreachable!("a tile of {rows} rows"),
        }
    };
}

unsafe fn run_part(isa: Isa, rows: usize, part: &Part) {
    // SAFETY: by the caller's promise.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if part.cols > LANES => {
                by_rows!(rows, [1 2 3 4 5 6 7 8 9 10 11 12], |R| x86::avx512::<R, 2>(part));
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                by_rows!(rows, [1 2 3 4 5 6 7 8 9 10 11 12], |R| x86::avx512::<R, 1>(part));
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => by_rows!(rows, [1 2 3 4 5 6], |R| x86::avx2::<R>(part)),
            _ => by_rows!(rows, [1 2 3 4], |R| portable::<R>(part)),
        }
    }
}

unsafe fn portable<const ROWS: usize>(part: &Part) {
    let mut sums = [[0.0_f32; LANES]; ROWS];
    for k in 0..part.depth {
        // SAFETY: row k of a packed panel.
        let b = unsafe { &*part.b.add(k * PANEL_COLS).cast::<[f32; LANES]>() };
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: term k of a packed row.
            let a = unsafe { *part.a.add(row * ROW_STRIDE + k) };
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = a.mul_add(b, *sum);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        for (col, &sum) in sums.iter().enumerate().take(part.cols) {
            // SAFETY: an element of the result.
            unsafe {
                let c = part.c.add(row * part.c_stride + col);
                *c = if part.add { *c + sum } else { sum };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{LANES, PANEL_COLS, Part, ROW_STRIDE};

    /// Up to 12 rows, one or two registers of 16 columns: 24 sums, 2 of B, 1 of A.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512<const ROWS: usize, const REGISTERS: usize>(part: &Part) {
        let mut sums = [[_mm512_setzero_ps(); REGISTERS]; ROWS];
        let (mut a, mut b) = (part.a, part.b);
        for _ in 0..part.depth {
            let mut columns = [_mm512_setzero_ps(); REGISTERS];
            for (index, columns) in columns.iter_mut().enumerate() {
                // SAFETY: a row of a packed panel, whose halves start cache lines.
                *columns = unsafe { _mm512_load_ps(b.wrapping_add(index * LANES)) };
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: a term of a packed row.
                let a = unsafe { _mm_load_ss(a.wrapping_add(row * ROW_STRIDE)) };
                let a = _mm512_broadcastss_ps(a);
                for (sum, &columns) in sums.iter_mut().zip(&columns) {
                    *sum = _mm512_fmadd_ps(a, columns, *sum);
                }
            }
            a = a.wrapping_add(1);
            b = b.wrapping_add(PANEL_COLS);
        }
        for (row, sums) in sums.iter().enumerate() {
            for (index, &sum) in sums.iter().enumerate() {
                let c = part.c.wrapping_add(row * part.c_stride + index * LANES);
                let kept = part.cols.saturating_sub(index * LANES).min(LANES);
                let mask = ((1_u32 << kept) - 1) as __mmask16;
                // SAFETY: the mask keeps to the columns of the result.
                unsafe {
                    let sum = match part.add {
                        true => _mm512_add_ps(_mm512_maskz_loadu_ps(mask, c), sum),
                        false => sum,
                    };
                    _mm512_mask_storeu_ps(c, mask, sum);
                }
            }
        }
    }

    /// Up to 6 rows, two registers of 8 columns: 12 sums, 2 of B, 1 of A.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn avx2<const ROWS: usize>(part: &Part) {
        const WIDTH: usize = 8;
        let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
        let (mut a, mut b) = (part.a, part.b);
        for _ in 0..part.depth {
            // SAFETY: half a row of a packed panel, which starts a cache line.
            let columns = unsafe { [_mm256_load_ps(b), _mm256_load_ps(b.wrapping_add(WIDTH))] };
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: a term of a packed row.
                let a = unsafe { _mm_load_ss(a.wrapping_add(row * ROW_STRIDE)) };
                let a = _mm256_broadcastss_ps(a);
                for (sum, &columns) in sums.iter_mut().zip(&columns) {
                    *sum = _mm256_fmadd_ps(a, columns, *sum);
                }
            }
            a = a.wrapping_add(1);
            b = b.wrapping_add(PANEL_COLS);
        }
        let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        for (row, sums) in sums.iter().enumerate() {
            for (index, &sum) in sums.iter().enumerate() {
                let c = part.c.wrapping_add(row * part.c_stride + index * WIDTH);
                let kept = part.cols.saturating_sub(index * WIDTH) as i32;
                let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(kept), lanes);
                // SAFETY: the mask keeps to the columns of the result.
                unsafe {
                    let sum = match part.add {
                        true => _mm256_add_ps(_mm256_maskload_ps(c, mask), sum),
                        false => sum,
                    };
                    _mm256_maskstore_ps(c, mask, sum);
                }
            }
        }
    }
}
