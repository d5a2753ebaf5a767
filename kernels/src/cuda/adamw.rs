//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn sum_squares(
    queue: &mut Enqueue<'_>,
    args: &ops::SumSquares<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn clip_coefficient(
    queue: &mut Enqueue<'_>,
    args: &ops::ClipCoefficient<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn adamw(queue: &mut Enqueue<'_>, args: &ops::AdamW<'_, CudaBackend>) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
