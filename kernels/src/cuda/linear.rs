//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn gemm(queue: &mut Enqueue<'_>, args: &ops::Gemm<'_, CudaBackend>) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
