//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn swigluoai(_: &CpuBackend, args: &ops::Swigluoai<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "swigluoai",
        what: "not built yet".into(),
    })
}

pub(super) fn swigluoai_backward(
    _: &CpuBackend,
    args: &ops::SwigluoaiBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "swigluoai_backward",
        what: "not built yet".into(),
    })
}
