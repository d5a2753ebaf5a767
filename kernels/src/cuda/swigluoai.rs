//! Clamped SwiGLU, and its gradient.

use super::CudaBackend;
use super::launch::{Grid, Parameters, kernel};
use super::stream::Enqueue;
use crate::error::Result;
use crate::ops;

const FILE: &str = "swigluoai.cu";

/// Rows that a thread handles; `ROWS` of the kernels.
const ROWS: usize = 2;

/// Threads of a block; each handles eight channels.
const THREADS: u32 = 128;

pub(super) fn swigluoai(
    queue: &mut Enqueue<'_>,
    args: &ops::Swigluoai<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .rows(args.gate)
        .rows(args.up)
        .rows(args.out)
        .with(dims.tokens as i32)
        .with(dims.width as i32)
        .with(args.alpha)
        .with(args.limit);
    let name = kernel!(args.gate.dtype(), "swigluoai");
    // SAFETY: the kernel's parameters; a thread handles its channels of one row.
    unsafe { queue.launch(FILE, name, grid(&dims), parameters) }
}

pub(super) fn swigluoai_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::SwigluoaiBackward<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .rows(args.gate)
        .rows(args.up)
        .rows(args.d_out)
        .rows(args.d_gate)
        .rows(args.d_up)
        .with(dims.tokens as i32)
        .with(dims.width as i32)
        .with(args.alpha)
        .with(args.limit);
    let name = kernel!(args.gate.dtype(), "swigluoai_backward");
    // SAFETY: as above.
    unsafe { queue.launch(FILE, name, grid(&dims), parameters) }
}

fn grid(dims: &ops::SwigluoaiDims) -> Grid {
    Grid {
        blocks: [
            dims.tokens.div_ceil(ROWS),
            dims.width.div_ceil(8 * THREADS as usize),
            1,
        ],
        threads: THREADS,
        shared_bytes: 0,
    }
}
