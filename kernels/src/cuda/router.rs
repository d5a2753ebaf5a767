//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn router_select(
    queue: &mut Enqueue<'_>,
    args: &ops::RouterSelect<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn router_weights(
    queue: &mut Enqueue<'_>,
    args: &ops::RouterWeights<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn router_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::RouterBackward<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
