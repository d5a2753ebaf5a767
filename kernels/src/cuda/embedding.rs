//! Rows of the embedding table, and its gradient.

use super::CudaBackend;
use super::launch::{Grid, Parameters, kernel};
use super::stream::Enqueue;
use crate::error::Result;
use crate::ops;

const FILE: &str = "embedding.cu";

/// Threads of a block; each handles eight columns.
const THREADS: u32 = 256;

pub(super) fn embedding(
    queue: &mut Enqueue<'_>,
    args: &ops::Embedding<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .tensor(args.ids)
        .rows(args.table)
        .rows(args.out);
    let parameters = indexed(queue, parameters, &dims);
    let name = kernel!(args.table.dtype(), "embedding");
    // SAFETY: the kernel's parameters; ids outside the table are not followed.
    unsafe { queue.launch(FILE, name, grid(&dims), parameters) }
}

pub(super) fn embedding_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::EmbeddingBackward<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let parameters = Parameters::default()
        .tensor(args.ids)
        .with(dims.tokens as i32)
        .rows(args.d_out)
        .rows(args.d_table);
    let parameters = indexed(queue, parameters, &dims);
    let name = kernel!(args.d_out.dtype(), "embedding_backward");
    // SAFETY: as above.
    unsafe { queue.launch(FILE, name, grid(&dims), parameters) }
}

/// The parameters both kernels end with.
fn indexed(queue: &Enqueue<'_>, parameters: Parameters, dims: &ops::EmbeddingDims) -> Parameters {
    parameters
        .with(dims.vocab as i32)
        .with(dims.hidden as i32)
        .with(queue.fault())
        .with(queue.site("ids"))
}

fn grid(dims: &ops::EmbeddingDims) -> Grid {
    Grid {
        blocks: [dims.tokens, dims.hidden.div_ceil(8 * THREADS as usize), 1],
        threads: THREADS,
        shared_bytes: 0,
    }
}
