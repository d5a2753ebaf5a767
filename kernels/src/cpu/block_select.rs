//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn block_select(_: &CpuBackend, args: &ops::BlockSelect<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "block_select",
        what: "not built yet".into(),
    })
}
