//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn embedding(_: &CpuBackend, args: &ops::Embedding<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "embedding",
        what: "not built yet".into(),
    })
}

pub(super) fn embedding_backward(
    _: &CpuBackend,
    args: &ops::EmbeddingBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "embedding_backward",
        what: "not built yet".into(),
    })
}
