//! Choice and weights of the experts of a token.

use super::CudaBackend;
use super::launch::{Grid, Parameters};
use super::stream::Enqueue;
use crate::error::Result;
use crate::ops;

const FILE: &str = "router.cu";

/// Warps of a block; a warp handles a token.
const WARPS: usize = 8;

/// Threads of a block where a thread handles a token.
const THREADS: usize = 128;

pub(super) fn router_select(
    queue: &mut Enqueue<'_>,
    args: &ops::RouterSelect<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .tensor(args.logits)
        .tensor(args.bias)
        .tensor(args.expert_ids);
    let grid = Grid {
        shared_bytes: WARPS * dims.topk * 4,
        ..warps(&dims)
    };
    let parameters = extents(parameters, &dims);
    // SAFETY: the kernel's parameters; a warp handles one token.
    unsafe { queue.launch(FILE, "router_select", grid, parameters) }
}

pub(super) fn router_weights(
    queue: &mut Enqueue<'_>,
    args: &ops::RouterWeights<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .tensor(args.logits)
        .tensor(args.expert_ids)
        .tensor(args.weights);
    let parameters = extents(parameters, &dims)
        .with(queue.fault())
        .with(queue.site("expert_ids"));
    let grid = Grid::line(dims.tokens.div_ceil(THREADS), THREADS as u32);
    // SAFETY: the kernel's parameters; ids of no expert are not followed.
    unsafe { queue.launch(FILE, "router_weights", grid, parameters) }
}

pub(super) fn router_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::RouterBackward<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .tensor(args.logits)
        .tensor(args.expert_ids)
        .tensor(args.d_weights)
        .tensor(args.d_logits);
    let parameters = extents(parameters, &dims)
        .with(queue.fault())
        .with(queue.site("expert_ids"));
    // SAFETY: as above.
    unsafe { queue.launch(FILE, "router_backward", warps(&dims), parameters) }
}

fn extents(parameters: Parameters, dims: &ops::RouterDims) -> Parameters {
    parameters
        .with(dims.tokens as i32)
        .with(dims.experts as i32)
        .with(dims.topk as i32)
}

fn warps(dims: &ops::RouterDims) -> Grid {
    Grid::line(dims.tokens.div_ceil(WARPS), 32 * WARPS as u32)
}
