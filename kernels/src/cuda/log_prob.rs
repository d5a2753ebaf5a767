//! Log-probabilities of target tokens, in blocks of tokens and chunks of the vocabulary; the full logits are never held.
//!
//! The chunks are a function of the vocabulary alone and are merged in ascending order, so a row's bits depend on the
//! row alone. A block of tokens only bounds the scratch memory; it is part of the definition of the head's gradient,
//! which sums over rows.

use m3_spec::dtype::DType;

use super::CudaBackend;
use super::launch::{Grid, Parameters, address, kernel};
use super::linear::{Experts, Matrix, Product, enqueue};
use super::stream::Enqueue;
use crate::error::Result;
use crate::ops;

const FILE: &str = "log_prob.cu";

/// Vocabulary ids of a chunk: 64 tiles of the product.
const CHUNK: usize = 8192;

/// Tokens of a block: with [`CHUNK`], 128 MiB of logits.
const BLOCK: usize = 4096;

/// Threads of a block; `THREADS` of the kernels.
const THREADS: usize = 256;

/// Size of the kernels' `struct Sums`, in bytes.
const SUMS_BYTES: usize = 16;

pub(super) fn log_prob(
    queue: &mut Enqueue<'_>,
    args: &ops::LogProb<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let rows = dims.tokens.min(BLOCK);
    let width = dims.vocab.min(CHUNK);
    let [logits, sums] = queue.scratch([rows * width * 4, rows * SUMS_BYTES])?;
    let head = Matrix::of(args.weight);
    for first in (0..dims.tokens).step_by(BLOCK) {
        let rows = BLOCK.min(dims.tokens - first);
        let x = Matrix::of(args.x).at_row(first);
        let targets = address(args.targets) + 4 * first as u64;
        for id in (0..dims.vocab).step_by(CHUNK) {
            let width = CHUNK.min(dims.vocab - id);
            scores(
                queue,
                x,
                head.at_row(id),
                logits,
                [rows, width, dims.hidden],
            )?;
            let parameters = Parameters::default()
                .with(logits)
                .with(width as i32)
                .with(id as i32)
                .with(dims.vocab as i32)
                .with(targets)
                .tensor(args.temperature)
                .with(sums)
                .with(queue.fault())
                .with(queue.site("targets"))
                .with(queue.site("temperature"));
            let grid = Grid::line(rows, THREADS as u32);
            // SAFETY: the kernel's parameters; a block reads its row of the chunk.
            unsafe { queue.launch(FILE, "chunk_sums", grid, parameters)? };
        }
        let at = 4 * first as u64;
        let parameters = Parameters::default()
            .with(sums)
            .with(targets)
            .with(rows as i32)
            .with(address(args.log_prob) + at)
            .with(address(args.lse) + at)
            .with(address(args.entropy) + at);
        let grid = Grid::line(rows.div_ceil(THREADS), THREADS as u32);
        // SAFETY: the kernel's parameters; the outputs hold a value per token.
        unsafe { queue.launch(FILE, "finish", grid, parameters)? };
    }
    Ok(())
}

pub(super) fn log_prob_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::LogProbBackward<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let (rows, width) = (dims.tokens.min(BLOCK), dims.vocab.min(CHUNK));
    let storage = args.x.dtype();
    let parts = [
        rows * width * 4,
        rows * width * storage.size(),
        rows * dims.hidden * storage.size(),
        rows * dims.hidden * 4,
    ];
    let scratch = queue.scratch(parts)?;
    for first in (0..dims.tokens).step_by(BLOCK) {
        backward_block(queue, args, &dims, first, scratch)?;
    }
    Ok(())
}

/// Gradients of the tokens from `first` on; `scratch` holds logits, their gradients, scored rows and summed dx.
fn backward_block(
    queue: &Enqueue<'_>,
    args: &ops::LogProbBackward<'_, CudaBackend>,
    dims: &ops::LogProbDims,
    first: usize,
    scratch: [u64; 4],
) -> Result<()> {
    let [logits, gradients, scored, dx_sum] = scratch;
    let (rows, storage) = (BLOCK.min(dims.tokens - first), args.x.dtype());
    let targets = address(args.targets) + 4 * first as u64;
    let grid = Grid::line(rows, THREADS as u32);
    let gather = Parameters::default()
        .with(address(args.x) + (first * args.x.strides()[0] * storage.size()) as u64)
        .with(args.x.strides()[0] as i64)
        .with(targets)
        .with(scored)
        .with(dims.hidden as i32);
    // SAFETY: the kernel's parameters; the scratch holds the block's rows.
    unsafe { queue.launch(FILE, kernel!(storage, "scored_rows"), grid, gather)? };
    let x = Matrix::row_major(scored, dims.hidden, storage);
    let dx = Matrix::row_major(dx_sum, dims.hidden, DType::F32);
    for id in (0..dims.vocab).step_by(CHUNK) {
        let width = CHUNK.min(dims.vocab - id);
        let head = Matrix::of(args.weight).at_row(id);
        scores(queue, x, head, logits, [rows, width, dims.hidden])?;
        logit_gradients(
            queue,
            args,
            dims,
            [first, rows, id, width],
            [logits, gradients],
        )?;
        let d_logits = Matrix::row_major(gradients, width, storage);
        let products = [
            Product {
                a: d_logits,
                b: head,
                c: dx,
                extents: [rows, dims.hidden, width],
                accumulate: id > 0,
            },
            Product {
                a: d_logits.transposed(),
                b: x,
                c: Matrix::of(args.d_weight).at_row(id),
                extents: [width, dims.hidden, rows],
                accumulate: true,
            },
        ];
        for product in &products {
            enqueue(queue, product, &Experts::NONE)?;
        }
    }
    let dx_bytes = first * args.dx.strides()[0] * args.dx.dtype().size();
    let round = Parameters::default()
        .with(dx_sum)
        .with(targets)
        .with(address(args.dx) + dx_bytes as u64)
        .with(args.dx.strides()[0] as i64)
        .with(dims.hidden as i32);
    // SAFETY: the kernel's parameters; the output holds the block's rows.
    unsafe { queue.launch(FILE, kernel!(args.dx.dtype(), "round_rows"), grid, round) }
}

fn logit_gradients(
    queue: &Enqueue<'_>,
    args: &ops::LogProbBackward<'_, CudaBackend>,
    dims: &ops::LogProbDims,
    [first, rows, id, width]: [usize; 4],
    [logits, gradients]: [u64; 2],
) -> Result<()> {
    let at = 4 * first as u64;
    let parameters = Parameters::default()
        .with(logits)
        .with(width as i32)
        .with(id as i32)
        .with(dims.vocab as i32)
        .with(address(args.targets) + at)
        .tensor(args.temperature)
        .with(address(args.lse) + at)
        .with(address(args.d_log_prob) + at)
        .with(gradients)
        .with(queue.fault())
        .with(queue.site("targets"));
    let grid = Grid {
        blocks: [rows, width.div_ceil(THREADS), 1],
        threads: THREADS as u32,
        shared_bytes: 0,
    };
    let name = kernel!(args.x.dtype(), "logit_gradients");
    // SAFETY: the kernel's parameters; a thread handles one logit of the chunk.
    unsafe { queue.launch(FILE, name, grid, parameters) }
}

/// `logits[rows, width] = x · headᵀ`, fp32.
fn scores(
    queue: &Enqueue<'_>,
    x: Matrix,
    head: Matrix,
    logits: u64,
    extents: [usize; 3],
) -> Result<()> {
    let product = Product {
        a: x,
        b: head.transposed(),
        c: Matrix::row_major(logits, extents[1], DType::F32),
        extents,
        accumulate: false,
    };
    enqueue(queue, &product, &Experts::NONE)
}
