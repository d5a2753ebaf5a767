//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn gemm(_: &CpuBackend, args: &ops::Gemm<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "gemm",
        what: "not built yet".into(),
    })
}
