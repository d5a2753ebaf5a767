//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn attention(
    queue: &mut Enqueue<'_>,
    args: &ops::Attention<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn attention_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::AttentionBackward<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
