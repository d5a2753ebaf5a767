//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn qk_norm_rope(_: &CpuBackend, args: &ops::QkNormRope<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "qk_norm_rope",
        what: "not built yet".into(),
    })
}

pub(super) fn qk_norm_rope_backward(
    _: &CpuBackend,
    args: &ops::QkNormRopeBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "qk_norm_rope_backward",
        what: "not built yet".into(),
    })
}
