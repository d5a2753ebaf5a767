//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn copy(_: &CpuBackend, args: &ops::Copy<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "copy",
        what: "not built yet".into(),
    })
}

pub(super) fn fill(_: &CpuBackend, args: &ops::Fill<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "fill",
        what: "not built yet".into(),
    })
}

pub(super) fn accumulate(_: &CpuBackend, args: &ops::Accumulate<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "accumulate",
        what: "not built yet".into(),
    })
}

pub(super) fn digest(_: &CpuBackend, args: &ops::Digest<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "digest",
        what: "not built yet".into(),
    })
}
