//! Weighted sum of the experts' rows of a token, and its gradient.

use super::CudaBackend;
use super::launch::{Grid, Parameters, code, kernel};
use super::stream::Enqueue;
use crate::error::Result;
use crate::ops;

const FILE: &str = "moe_combine.cu";

/// Threads of a block; each handles eight columns at a time.
const THREADS: u32 = 256;

pub(super) fn moe_combine(
    queue: &mut Enqueue<'_>,
    args: &ops::MoeCombine<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let mut parameters = Parameters::default()
        .rows(args.down)
        .tensor(args.row_of_slot)
        .tensor(args.weights);
    parameters = match args.shared {
        Some(shared) => parameters.rows(shared).with(code(shared.dtype())),
        None => parameters.with(0u64).with(0i64).with(0i64),
    };
    let parameters = ending(queue, parameters.rows(args.out), &dims, args.scaling);
    let grid = Grid {
        blocks: [dims.tokens, dims.hidden.div_ceil(8 * THREADS as usize), 1],
        threads: THREADS,
        shared_bytes: 0,
    };
    let name = kernel!(args.out.dtype(), "moe_combine");
    // SAFETY: the kernel's parameters; rows that are not there are not followed.
    unsafe { queue.launch(FILE, name, grid, parameters) }
}

pub(super) fn moe_combine_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::MoeCombineBackward<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let [named] = queue.scratch([dims.rows * 4])?;
    queue.zero(named, dims.rows * 4)?;
    let parameters = Parameters::default()
        .rows(args.d_out)
        .with(code(args.d_out.dtype()))
        .rows(args.down)
        .tensor(args.row_of_slot)
        .tensor(args.weights)
        .rows(args.d_down)
        .tensor(args.d_weights)
        .with(named);
    let parameters = ending(queue, parameters, &dims, args.scaling);
    let zeros = Parameters::default()
        .with(named)
        .rows(args.d_down)
        .with(dims.hidden as i32);
    let name = kernel!(args.down.dtype(), "moe_combine_backward");
    let rest = kernel!(args.down.dtype(), "zero_unnamed");
    // SAFETY: as above; the second kernel writes the rows that the first did not.
    unsafe {
        queue.launch(FILE, name, Grid::line(dims.tokens, THREADS), parameters)?;
        queue.launch(FILE, rest, Grid::line(dims.rows, THREADS), zeros)
    }
}

/// The parameters both kernels end with.
fn ending(
    queue: &Enqueue<'_>,
    parameters: Parameters,
    dims: &ops::MoeRowsDims,
    scaling: f32,
) -> Parameters {
    parameters
        .with(dims.rows as i32)
        .with(dims.topk as i32)
        .with(dims.hidden as i32)
        .with(scaling)
        .with(queue.fault())
        .with(queue.site("row_of_slot"))
}
