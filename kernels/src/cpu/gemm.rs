//! Matrix product in f32: packed, tiled, threaded, and the same bits for an element whatever happens around it.
//!
//! # What an element is
//! k is cut into chunks of [`CHUNK`] in order. A chunk's sum is one chain of fused multiply-adds in k order that starts
//! at +0; the first chunk's sum is the running value, every further one is added to it. Then the running value is
//! stored (rounded once if C is bf16), or added to C in one addition. K = 0 gives +0, or leaves C when accumulating.
//!
//! So its bits follow from its row of A and its column of B alone: M, N, position, strides, packing, threads and
//! instruction set do not show, and bf16 operands count as the f32 values they are. Threads divide M and N, never K.
//! (Sign and payload of a NaN are excepted.)
//!
//! # How it is computed
//! A block of at most `BLOCK_COLS` columns of B is packed chunk by chunk into panels of 32 columns and stays in L2;
//! the rows of A pass by in panels that stay in L1, see `pack`. A register tile (12x32 on AVX-512, 6x16 on AVX2,
//! see `micro`) then runs over a whole chunk. Row panels are cut to equal heights, so that 13 rows are 7 + 6 and not
//! 12 + 1.

mod matrix;
mod micro;
mod pack;
#[cfg(test)]
mod tests;

use std::cell::RefCell;

use m3_spec::dtype::DType;
use rayon::prelude::*;

use super::access::Storage;
use super::simd::{Isa, dispatch};
pub use matrix::{Matrix, MatrixMut};
use micro::Tile;
pub use pack::PackedB;
use pack::{Aligned, PANEL_COLS, ROW_STRIDE};

/// Terms of a sum that are chained before they are added to the running value. Part of the result's definition.
pub const CHUNK: usize = 512;

/// Columns of B that are packed together: with [`CHUNK`] rows, 512 KiB, half of the smallest L2 in use.
const BLOCK_COLS: usize = 256;
/// Rows of A that pass a packed block of B before it is packed anew; bounds the running values kept.
const BLOCK_ROWS: usize = 512;
/// Rows a task should have at least: packing B takes 10 % of a product of 128 rows, 5 % of one of 256.
const TASK_ROWS: usize = 256;
/// Tasks a worker should find, so that one that starts late does less.
const TASKS_PER_THREAD: usize = 4;
/// Below this (35 µs of one core with AVX-512), a second worker brings nothing on two cores.
const SERIAL_FLOPS: f64 = 5e6;

/// Buffers of one running product; kept by the caller of [`gemm_block`] and reused, so that no call allocates once they
/// have grown.
#[derive(Default)]
pub struct Scratch {
    panels: Aligned,
    rows: Aligned,
    running: Aligned,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// `c = a · b`, or `c += a · b`, on the current rayon pool.
///
/// # Panics
/// When the shapes do not fit, or when `c` is bf16 and accumulates.
pub fn gemm<A: Storage, B: Storage, C: Storage>(
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    c: MatrixMut<'_, C>,
    accumulate: bool,
) {
    check(&a, b.rows(), b.cols(), &c, accumulate);
    let (m, n) = (c.rows(), c.cols());
    let (rows, cols) = task_extents(m, n, a.cols(), rayon::current_num_threads());
    let across = n.div_ceil(cols);
    let task = |index: usize| {
        let (top, left) = (index / across * rows, index % across * cols);
        let (bottom, right) = ((top + rows).min(m), (left + cols).min(n));
        // SAFETY: tasks have disjoint blocks of C.
        let block = unsafe { c.block(top..bottom, left..right) };
        let (a, b) = (
            a.block(top..bottom, 0..a.cols()),
            b.block(0..b.rows(), left..right),
        );
        // A product runs no other task before it is finished, so the scratch is never borrowed twice.
        SCRATCH.with_borrow_mut(|scratch| gemm_block(scratch, a, b, block, accumulate));
    };
    match m.div_ceil(rows) * across {
        1 => task(0),
        tasks => (0..tasks).into_par_iter().for_each(task),
    }
}

/// [`gemm`] on this thread, with the caller's buffers: for use inside a task.
///
/// # Panics
/// As [`gemm`].
pub fn gemm_block<A: Storage, B: Storage, C: Storage>(
    scratch: &mut Scratch,
    a: Matrix<'_, A>,
    b: Matrix<'_, B>,
    c: MatrixMut<'_, C>,
    accumulate: bool,
) {
    check(&a, b.rows(), b.cols(), &c, accumulate);
    let Scratch {
        panels,
        rows,
        running,
    } = scratch;
    let pack = |k: Span, cols: Span| {
        let panels = panels.at_least(k.length * cols.length.next_multiple_of(PANEL_COLS));
        pack::panels(b.block(k.range(), cols.range()), panels);
        panels.as_ptr()
    };
    product(rows, running, a, c, accumulate, pack);
}

/// [`gemm_block`] with a B that has been packed before.
///
/// # Panics
/// As [`gemm`].
pub fn gemm_packed<A: Storage, C: Storage>(
    scratch: &mut Scratch,
    a: Matrix<'_, A>,
    b: &PackedB,
    c: MatrixMut<'_, C>,
    accumulate: bool,
) {
    check(&a, b.rows(), b.cols(), &c, accumulate);
    let panels = |k: Span, cols: Span| b.panels(k, cols).as_ptr();
    product(
        &mut scratch.rows,
        &mut scratch.running,
        a,
        c,
        accumulate,
        panels,
    );
}

fn check<A, C: Storage>(
    a: &Matrix<'_, A>,
    b_rows: usize,
    b_cols: usize,
    c: &MatrixMut<'_, C>,
    accumulate: bool,
) {
    assert!(
        a.cols() == b_rows && (c.rows(), c.cols()) == (a.rows(), b_cols),
        "[{}, {}] · [{b_rows}, {b_cols}] does not give [{}, {}]",
        a.rows(),
        a.cols(),
        c.rows(),
        c.cols()
    );
    assert!(
        !accumulate || C::DTYPE == DType::F32,
        "only an f32 result accumulates"
    );
}

/// Rows and columns of a task. Depends on the number of threads, which the bits do not show.
fn task_extents(m: usize, n: usize, k: usize, threads: usize) -> (usize, usize) {
    if threads == 1 || 2.0 * m as f64 * n as f64 * (k as f64) < SERIAL_FLOPS {
        return (m.max(1), n.max(1));
    }
    let wanted = threads * TASKS_PER_THREAD;
    let cols = BLOCK_COLS.min(n);
    let down = wanted.div_ceil(n.div_ceil(cols));
    let rows = m.div_ceil(down).max(TASK_ROWS).min(m);
    if m.div_ceil(rows) * n.div_ceil(cols) >= threads {
        return (rows, cols);
    }
    // Few rows and few columns: narrower tasks, of whole panels.
    (rows, n.div_ceil(threads).next_multiple_of(PANEL_COLS))
}

/// A part of an axis.
#[derive(Clone, Copy)]
struct Span {
    first: usize,
    length: usize,
}

impl Span {
    fn range(self) -> std::ops::Range<usize> {
        self.first..self.first + self.length
    }
}

/// An axis in parts of at most `step`.
fn spans(length: usize, step: usize) -> impl Iterator<Item = Span> {
    (0..length).step_by(step).map(move |first| Span {
        first,
        length: step.min(length - first),
    })
}

/// The loops over blocks; `panels` gives B's packed panels of a chunk and a block of columns.
fn product<A: Storage, C: Storage>(
    packed_rows: &mut Aligned,
    running: &mut Aligned,
    a: Matrix<'_, A>,
    c: MatrixMut<'_, C>,
    accumulate: bool,
    mut panels: impl FnMut(Span, Span) -> *const f32,
) {
    let (m, n, k) = (c.rows(), c.cols(), a.cols());
    if k == 0 {
        if !accumulate {
            c.fill(C::from_f32(0.0));
        }
        return;
    }
    let isa = Isa::current();
    let chunks = k.div_ceil(CHUNK);
    let mut target = Target::new(c, accumulate, chunks, running);
    let packed_rows = packed_rows.at_least(micro::MAX_ROWS * ROW_STRIDE);
    for block in spans(m, BLOCK_ROWS) {
        for cols in spans(n, BLOCK_COLS) {
            for (chunk, depth) in spans(k, CHUNK).enumerate() {
                let b = panels(depth, cols);
                for rows in even_spans(block, micro::rows(isa)) {
                    pack::rows(a.block(rows.range(), depth.range()), packed_rows);
                    let (c, c_stride) = target.tile(rows, cols);
                    let tile = Tile {
                        depth: depth.length,
                        a: packed_rows.as_ptr(),
                        b,
                        c,
                        c_stride,
                        rows: rows.length,
                        cols: cols.length,
                        add: chunk > 0 || target.adds_first_chunk(),
                    };
                    // SAFETY: `packed_rows` holds `rows` rows of `depth` terms, `b` the panels of `cols`, and the
                    // target has `rows` rows of `cols` elements at `c_stride`; the machine has `isa`.
                    unsafe { micro::run(isa, &tile) };
                    if chunk + 1 == chunks {
                        target.finish(rows, cols);
                    }
                }
            }
        }
    }
}

/// A span in parts of at most `most` elements whose lengths differ by one at most.
fn even_spans(span: Span, most: usize) -> impl Iterator<Item = Span> {
    let count = span.length.div_ceil(most);
    (0..count).map(move |index| {
        let (start, end) = (
            index * span.length / count,
            (index + 1) * span.length / count,
        );
        Span {
            first: span.first + start,
            length: end - start,
        }
    })
}

/// Where running values live: in C itself, or beside it when C cannot hold them (bf16, columns apart) or must not yet
/// (several chunks to be added to it in one addition).
struct Target<'a, C> {
    c: MatrixMut<'a, C>,
    accumulate: bool,
    /// Values beside C, for one block of rows and columns.
    beside: Option<&'a mut [f32]>,
}

impl<'a, C: Storage> Target<'a, C> {
    fn new(c: MatrixMut<'a, C>, accumulate: bool, chunks: usize, running: &'a mut Aligned) -> Self {
        let dense = c.strides().1 == 1 || c.cols() == 1;
        let in_place = C::DTYPE == DType::F32 && dense && !(accumulate && chunks > 1);
        let length = c.rows().min(BLOCK_ROWS) * BLOCK_COLS;
        Target {
            beside: (!in_place).then(|| running.at_least(length)),
            c,
            accumulate,
        }
    }

    fn adds_first_chunk(&self) -> bool {
        self.accumulate && self.beside.is_none()
    }

    /// First element and row stride of a tile.
    fn tile(&mut self, rows: Span, cols: Span) -> (*mut f32, usize) {
        match &mut self.beside {
            Some(values) => {
                let values = &mut values[rows.first % BLOCK_ROWS * BLOCK_COLS..];
                (values.as_mut_ptr(), BLOCK_COLS)
            }
            None => {
                let start = self.c.at(rows.first, cols.first);
                (start.cast(), self.c.strides().0)
            }
        }
    }

    /// Stores a tile's values in C after the last chunk, if they are not there.
    fn finish(&mut self, rows: Span, cols: Span) {
        if let Some(values) = &self.beside {
            let values = &values[rows.first % BLOCK_ROWS * BLOCK_COLS..];
            // SAFETY: no other block of C is alive.
            let c = unsafe { self.c.block(rows.range(), cols.range()) };
            finish(values, c, self.accumulate);
        }
    }
}

dispatch! {
    /// Stores running values, whose rows are [`BLOCK_COLS`] apart, in C.
    fn finish<C: Storage>(running: &[f32], c: MatrixMut<'_, C>, accumulate: bool) {
        let dense = c.strides().1 == 1;
        for row in 0..c.rows() {
            let from = &running[row * BLOCK_COLS..][..c.cols()];
            if dense && !accumulate {
                // SAFETY: a dense row of C.
                let to = unsafe { std::slice::from_raw_parts_mut(c.at(row, 0), from.len()) };
                for (to, &value) in to.iter_mut().zip(from) {
                    *to = C::from_f32(value);
                }
                continue;
            }
            for (col, &value) in from.iter().enumerate() {
                let to = c.at(row, col);
                // SAFETY: an element of C.
                unsafe {
                    *to = C::from_f32(if accumulate { (*to).to_f32() + value } else { value });
                }
            }
        }
    }
}
