//! Clipped policy loss, its gradient and statistics.

use super::CudaBackend;
use super::launch::{Grid, Parameters};
use super::stream::Enqueue;
use crate::error::Result;
use crate::ops;

const FILE: &str = "grpo_loss.cu";

/// Threads of a block; each handles a token. `THREADS` of the kernels.
const THREADS: usize = 256;

pub(super) fn grpo_loss(
    queue: &mut Enqueue<'_>,
    args: &ops::GrpoLoss<'_, CudaBackend>,
) -> Result<()> {
    let tokens = args.dims()?;
    let blocks = tokens.div_ceil(THREADS);
    let [partial] = queue.scratch([blocks * 3 * 4])?;
    let of_tokens = Parameters::default()
        .tensor(args.log_prob)
        .tensor(args.old_log_prob)
        .tensor(args.advantage)
        .tensor(args.weight)
        .tensor(args.d_log_prob)
        .with(partial)
        .with(tokens as i64)
        .with(args.eps_low)
        .with(args.eps_high);
    let sums = Parameters::default()
        .with(partial)
        .with(blocks as i64)
        .tensor(args.loss)
        .tensor(args.stats);
    // SAFETY: the kernels' parameters; the first writes a partial sum per block, the second reads as many.
    unsafe {
        queue.launch(
            FILE,
            "grpo_tokens",
            Grid::line(blocks, THREADS as u32),
            of_tokens,
        )?;
        queue.launch(FILE, "grpo_sums", Grid::line(1, THREADS as u32), sums)
    }
}
