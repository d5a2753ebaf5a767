//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn qk_norm_rope(
    queue: &mut Enqueue<'_>,
    args: &ops::QkNormRope<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn qk_norm_rope_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::QkNormRopeBackward<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
