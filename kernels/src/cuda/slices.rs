//! Reductions over rows, cut into slices whose sums are added in order.

use super::launch::{Grid, Parameters};
use super::stream::Enqueue;
use crate::error::Result;

/// How rows are cut: a function of their number alone, so that the bits are the same on every GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slices {
    /// Most slices.
    pub(super) most: usize,
    /// Fewest rows of a slice.
    pub(super) rows_least: usize,
}

impl Slices {
    /// Number of slices and rows in each but the last.
    pub(super) fn of(self, rows: usize) -> (usize, usize) {
        let rows_per_slice = rows.div_ceil(self.most).max(self.rows_least);
        (rows.div_ceil(rows_per_slice), rows_per_slice)
    }
}

/// `target[column] += Σ partial[slice][column]`, slices in order; `target` is F32 `[width]` without gaps.
pub(super) fn add_slices(
    queue: &Enqueue<'_>,
    partial: u64,
    slices: usize,
    width: usize,
    target: u64,
) -> Result<()> {
    if slices == 0 {
        return Ok(());
    }
    let parameters = Parameters::default()
        .with(partial)
        .with(slices as i32)
        .with(width as i32)
        .with(target);
    let grid = Grid::line(width.div_ceil(32), 256);
    // SAFETY: the kernel's parameters; the callers' buffers have these extents.
    unsafe { queue.launch("columns.cu", "add_slices", grid, parameters) }
}
