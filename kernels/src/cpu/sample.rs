//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn sample(_: &CpuBackend, args: &ops::Sample<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "sample",
        what: "not built yet".into(),
    })
}
