//! Sums of squares, the clip coefficient and the AdamW step.

use super::CudaBackend;
use super::elementwise::merged;
use super::launch::{Grid, Parameter, Parameters, View, kernel};
use super::stream::Enqueue;
use crate::error::Result;
use crate::ops;

const FILE: &str = "adamw.cu";

/// Threads of a block; `THREADS` of the kernels.
const THREADS: usize = 256;

/// Elements that one block squares; `BLOCK_ELEMENTS` of the kernels.
const BLOCK_ELEMENTS: usize = 16384;

/// `struct Constants` of the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Constants {
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
}

// SAFETY: four-byte fields alone.
unsafe impl Parameter for Constants {}

pub(super) fn sum_squares(
    queue: &mut Enqueue<'_>,
    args: &ops::SumSquares<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    let elements = args.source.elements();
    let blocks = elements.div_ceil(BLOCK_ELEMENTS);
    let [partial] = queue.scratch([blocks * 4])?;
    let [source, _] = merged([View::of(args.source); 2]);
    let squares = Parameters::default()
        .with(source)
        .with(elements as i64)
        .with(partial);
    let sum = Parameters::default()
        .with(partial)
        .with(blocks as i64)
        .tensor(args.sum);
    let name = kernel!(args.source.dtype(), "squares");
    // SAFETY: the kernels' parameters; the first writes a partial sum per block, the second reads as many.
    unsafe {
        queue.launch(FILE, name, Grid::line(blocks, THREADS as u32), squares)?;
        queue.launch(FILE, "sum_squares", Grid::line(1, THREADS as u32), sum)
    }
}

pub(super) fn clip_coefficient(
    queue: &mut Enqueue<'_>,
    args: &ops::ClipCoefficient<'_, CudaBackend>,
) -> Result<()> {
    let slices = args.dims()?;
    let parameters = Parameters::default()
        .tensor(args.sums)
        .with(slices as i64)
        .tensor(args.norm)
        .tensor(args.coefficient)
        .tensor(args.finite)
        .with(args.max_norm);
    let grid = Grid::line(1, THREADS as u32);
    // SAFETY: the kernel's parameters.
    unsafe { queue.launch(FILE, "clip_coefficient", grid, parameters) }
}

pub(super) fn adamw(queue: &mut Enqueue<'_>, args: &ops::AdamW<'_, CudaBackend>) -> Result<()> {
    let elements = args.dims()?;
    let parameters = Parameters::default()
        .tensor(args.grad)
        .tensor(args.master)
        .tensor(args.exp_avg)
        .tensor(args.exp_avg_sq)
        .tensor(args.param)
        .with(elements as i64)
        .tensor(args.learning_rate)
        .tensor(args.step)
        .tensor(args.coefficient)
        .tensor(args.finite)
        .with(Constants {
            beta1: args.beta1,
            beta2: args.beta2,
            eps: args.eps,
            weight_decay: args.weight_decay,
        });
    let name = kernel!(args.param.dtype(), "adamw");
    let grid = Grid::line(elements.div_ceil(8 * THREADS), THREADS as u32);
    // SAFETY: the kernel's parameters; all five tensors have `elements` elements without gaps.
    unsafe { queue.launch(FILE, name, grid, parameters) }
}
