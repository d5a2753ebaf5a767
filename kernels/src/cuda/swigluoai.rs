//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn swigluoai(
    queue: &mut Enqueue<'_>,
    args: &ops::Swigluoai<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn swigluoai_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::SwigluoaiBackward<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
