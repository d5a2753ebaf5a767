//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn moe_plan(
    queue: &mut Enqueue<'_>,
    args: &ops::MoePlan<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn moe_permute(
    queue: &mut Enqueue<'_>,
    args: &ops::MoePermute<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn moe_permute_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::MoePermuteBackward<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
