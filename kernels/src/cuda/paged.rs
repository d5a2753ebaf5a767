//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn page_write(
    queue: &mut Enqueue<'_>,
    args: &ops::PageWrite<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn paged_attention(
    queue: &mut Enqueue<'_>,
    args: &ops::PagedAttention<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn paged_score(
    queue: &mut Enqueue<'_>,
    args: &ops::PagedScore<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
