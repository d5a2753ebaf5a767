//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn msa_attention(
    _: &CpuBackend,
    args: &ops::MsaAttention<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "msa_attention",
        what: "not built yet".into(),
    })
}

pub(super) fn msa_attention_backward(
    _: &CpuBackend,
    args: &ops::MsaAttentionBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "msa_attention_backward",
        what: "not built yet".into(),
    })
}
