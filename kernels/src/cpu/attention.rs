//! Not built yet.

pub(in crate::cpu) mod selection;

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn attention(_: &CpuBackend, args: &ops::Attention<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "attention",
        what: "not built yet".into(),
    })
}

pub(super) fn attention_backward(
    _: &CpuBackend,
    args: &ops::AttentionBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "attention_backward",
        what: "not built yet".into(),
    })
}
