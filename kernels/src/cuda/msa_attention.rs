//! Not built yet.

use super::stream::Enqueue;
use super::{CudaBackend, not_built};
use crate::error::Result;
use crate::ops;

pub(super) fn msa_attention(
    queue: &mut Enqueue<'_>,
    args: &ops::MsaAttention<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}

pub(super) fn msa_attention_backward(
    queue: &mut Enqueue<'_>,
    args: &ops::MsaAttentionBackward<'_, CudaBackend>,
) -> Result<()> {
    args.dims()?;
    Err(not_built(queue.op))
}
