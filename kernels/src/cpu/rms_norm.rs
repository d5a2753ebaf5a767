//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn rms_norm(_: &CpuBackend, args: &ops::RmsNorm<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "rms_norm",
        what: "not built yet".into(),
    })
}

pub(super) fn rms_norm_backward(
    _: &CpuBackend,
    args: &ops::RmsNormBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "rms_norm_backward",
        what: "not built yet".into(),
    })
}
