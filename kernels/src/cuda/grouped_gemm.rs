//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn grouped_gemm(
    queue: &mut Enqueue<'_>,
    args: &ops::GroupedGemm<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn grouped_gemm_weights(
    queue: &mut Enqueue<'_>,
    args: &ops::GroupedGemmWeights<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
