//! Residual add and gemma norm, and its gradient.

use m3_spec::dtype::DType;

use super::CudaBackend;
use super::elementwise::widen;
use super::launch::{Grid, Parameters, address, code};
use super::slices::{Slices, add_slices};
use super::stream::Enqueue;
use crate::error::{Error, Result};
use crate::ops;

const FILE: &str = "rms_norm.cu";

/// Slices that d_weight is summed over: enough to fill a large GPU, and the same on every one.
const SLICES: Slices = Slices {
    most: 512,
    rows_least: 4,
};

pub(super) fn rms_norm(
    queue: &mut Enqueue<'_>,
    args: &ops::RmsNorm<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let (threads, chunks) = width(queue.op, dims.hidden)?;
    let mut parameters = Parameters::default().rows(args.residual);
    parameters = match args.y {
        Some(y) => parameters.rows(y),
        None => parameters.with(0u64).with(0i64),
    };
    parameters = parameters
        .tensor(args.weight)
        .with(code(args.weight.dtype()));
    parameters = match args.residual_out {
        Some(sum) => parameters.rows(sum),
        None => parameters.with(0u64).with(0i64),
    };
    let parameters = parameters
        .rows(args.out)
        .tensor(args.rstd)
        .with(dims.hidden as i32)
        .with(args.eps);
    let name = match (chunks, args.residual.dtype()) {
        (1, DType::BF16) => "rms_norm_1_bf16",
        (1, _) => "rms_norm_1_f32",
        (3, DType::BF16) => "rms_norm_3_bf16",
        (3, _) => "rms_norm_3_f32",
        (_, DType::BF16) => "rms_norm_6_bf16",
        (_, _) => "rms_norm_6_f32",
    };
    // SAFETY: the kernel's parameters; a block reads and writes one row of `hidden` elements.
    unsafe { queue.launch(FILE, name, Grid::line(dims.tokens, threads), parameters) }
}

pub(super) fn rms_norm_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::RmsNormBackward<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let (threads, chunks) = width(queue.op, dims.hidden)?;
    let (slices, rows_per_slice) = SLICES.of(dims.tokens);
    let storage = args.residual.dtype();
    let passed = args.d_residual_in;
    let uniform = [Some(args.d_out), passed]
        .iter()
        .flatten()
        .all(|d| d.dtype() == storage);
    let row_bytes = if uniform {
        0
    } else {
        dims.tokens * dims.hidden * 4
    };
    let [partial, wide_d_out, wide_passed] =
        queue.scratch([slices * dims.hidden * 4, row_bytes, row_bytes])?;
    let mut parameters = Parameters::default()
        .rows(args.residual)
        .tensor(args.weight)
        .with(code(args.weight.dtype()))
        .tensor(args.rstd);
    for (gradient, wide) in [(Some(args.d_out), wide_d_out), (passed, wide_passed)] {
        parameters = match gradient {
            None => parameters.with(0u64).with(0i64),
            Some(gradient) if uniform => parameters.rows(gradient),
            Some(gradient) => {
                widen(queue, gradient, wide)?;
                parameters.with(wide).with(dims.hidden as i64)
            }
        };
    }
    let parameters = parameters
        .rows(args.d_residual)
        .with(partial)
        .with(dims.tokens as i32)
        .with(dims.hidden as i32)
        .with(rows_per_slice as i32);
    let name = backward_name(chunks, storage, uniform);
    let grid = Grid {
        shared_bytes: 8 * chunks * threads as usize * 4,
        ..Grid::line(slices, threads)
    };
    // SAFETY: as above; a block writes one slice of the partial sums.
    unsafe { queue.launch(FILE, name, grid, parameters)? };
    add_slices(queue, partial, slices, dims.hidden, address(args.d_weight))
}

/// The kernel for a width and storage; gradients of another dtype than the storage arrive in F32.
fn backward_name(chunks: usize, storage: DType, uniform: bool) -> &'static str {
    match (chunks, storage, uniform) {
        (1, DType::BF16, true) => "rms_norm_backward_1_bf16",
        (1, DType::BF16, false) => "rms_norm_backward_1_mixed",
        (1, _, _) => "rms_norm_backward_1_f32",
        (3, DType::BF16, true) => "rms_norm_backward_3_bf16",
        (3, DType::BF16, false) => "rms_norm_backward_3_mixed",
        (3, _, _) => "rms_norm_backward_3_f32",
        (_, DType::BF16, true) => "rms_norm_backward_6_bf16",
        (_, DType::BF16, false) => "rms_norm_backward_6_mixed",
        (_, _, _) => "rms_norm_backward_6_f32",
    }
}

/// Threads of a block and runs of eight elements per thread, for rows of `hidden` elements.
fn width(op: &'static str, hidden: usize) -> Result<(u32, usize)> {
    let runs = hidden.div_ceil(8);
    match runs {
        0..=256 => Ok((runs.max(1).next_multiple_of(32) as u32, 1)),
        257..=768 => Ok((256, 3)),
        769..=1536 => Ok((256, 6)),
        _ => Err(Error::Argument {
            op,
            what: format!("rows of {hidden} elements are wider than the kernel's 12288"),
        }),
    }
}
