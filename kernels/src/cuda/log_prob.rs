//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn log_prob(
    queue: &mut Enqueue<'_>,
    args: &ops::LogProb<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn log_prob_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::LogProbBackward<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
