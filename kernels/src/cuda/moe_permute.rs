//! Rows of every expert, the gather, and its gradient.

use super::CudaBackend;
use super::launch::{Grid, Parameters, kernel};
use super::stream::Enqueue;
use crate::error::Result;
use crate::ops;

const FILE: &str = "moe_permute.cu";

/// Slots that one block counts and places; `TILE` of the kernels.
const TILE: usize = 256;

/// Threads of the one block that sums the counts.
const SCAN_THREADS: u32 = 1024;

/// Threads of a block that moves rows; each handles eight columns.
const THREADS: u32 = 256;

pub(super) fn moe_plan(
    queue: &mut Enqueue<'_>,
    args: &ops::MoePlan<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let slots = dims.tokens * dims.topk;
    let tiles = slots.div_ceil(TILE);
    let [counts] = queue.scratch([tiles * dims.experts * 4])?;
    let sorted = || {
        Parameters::default()
            .tensor(args.expert_ids)
            .with(slots as i64)
            .with(dims.topk as i32)
            .with(dims.experts as i32)
            .with(counts)
    };
    let count = sorted().with(queue.fault()).with(queue.site("expert_ids"));
    let scan = Parameters::default()
        .with(counts)
        .with(tiles as i32)
        .with(dims.experts as i32)
        .tensor(args.expert_offsets);
    let place = sorted().tensor(args.row_of_slot).tensor(args.token_of_row);
    let grid = Grid::line(tiles, TILE as u32);
    let counting = Grid {
        shared_bytes: dims.experts * 4,
        ..grid
    };
    // SAFETY: the kernels' parameters; ids of no expert are not followed, and rows stay within `slots`.
    unsafe {
        queue.launch(FILE, "moe_count", counting, count)?;
        queue.launch(FILE, "moe_scan", Grid::line(1, SCAN_THREADS), scan)?;
        queue.launch(FILE, "moe_place", grid, place)
    }
}

pub(super) fn moe_permute(
    queue: &mut Enqueue<'_>,
    args: &ops::MoePermute<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .rows(args.x)
        .tensor(args.token_of_row)
        .rows(args.out)
        .with(dims.tokens as i32)
        .with(dims.hidden as i32)
        .with(queue.fault())
        .with(queue.site("token_of_row"));
    let name = kernel!(args.x.dtype(), "moe_permute");
    let grid = columns(dims.rows, dims.hidden);
    // SAFETY: the kernel's parameters; tokens that are not there are not followed.
    unsafe { queue.launch(FILE, name, grid, parameters) }
}

pub(super) fn moe_permute_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::MoePermuteBackward<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .rows(args.d_rows)
        .tensor(args.row_of_slot)
        .rows(args.dx)
        .with(dims.rows as i32)
        .with(dims.topk as i32)
        .with(dims.hidden as i32)
        .with(queue.fault())
        .with(queue.site("row_of_slot"));
    let name = kernel!(args.d_rows.dtype(), "moe_permute_backward");
    let grid = columns(dims.tokens, dims.hidden);
    // SAFETY: the kernel's parameters; rows that are not there are not followed.
    unsafe { queue.launch(FILE, name, grid, parameters) }
}

fn columns(rows: usize, hidden: usize) -> Grid {
    Grid {
        blocks: [rows, hidden.div_ceil(8 * THREADS as usize), 1],
        threads: THREADS,
        shared_bytes: 0,
    }
}
