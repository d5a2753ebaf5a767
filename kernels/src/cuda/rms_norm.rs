//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn rms_norm(
    queue: &mut Enqueue<'_>,
    args: &ops::RmsNorm<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn rms_norm_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::RmsNormBackward<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
