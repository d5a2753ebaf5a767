//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn moe_combine(_: &CpuBackend, args: &ops::MoeCombine<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "moe_combine",
        what: "not built yet".into(),
    })
}

pub(super) fn moe_combine_backward(
    _: &CpuBackend,
    args: &ops::MoeCombineBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "moe_combine_backward",
        what: "not built yet".into(),
    })
}
