//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn moe_combine(
    queue: &mut Enqueue<'_>,
    args: &ops::MoeCombine<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn moe_combine_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::MoeCombineBackward<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
