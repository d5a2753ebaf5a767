//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn page_write(_: &CpuBackend, args: &ops::PageWrite<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "page_write",
        what: "not built yet".into(),
    })
}

pub(super) fn paged_attention(
    _: &CpuBackend,
    args: &ops::PagedAttention<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "paged_attention",
        what: "not built yet".into(),
    })
}

pub(super) fn paged_score(_: &CpuBackend, args: &ops::PagedScore<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "paged_score",
        what: "not built yet".into(),
    })
}
