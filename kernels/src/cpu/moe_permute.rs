//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn moe_plan(_: &CpuBackend, args: &ops::MoePlan<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "moe_plan",
        what: "not built yet".into(),
    })
}

pub(super) fn moe_permute(_: &CpuBackend, args: &ops::MoePermute<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "moe_permute",
        what: "not built yet".into(),
    })
}

pub(super) fn moe_permute_backward(
    _: &CpuBackend,
    args: &ops::MoePermuteBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "moe_permute_backward",
        what: "not built yet".into(),
    })
}
