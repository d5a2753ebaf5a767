//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn sum_squares(_: &CpuBackend, args: &ops::SumSquares<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "sum_squares",
        what: "not built yet".into(),
    })
}

pub(super) fn clip_coefficient(
    _: &CpuBackend,
    args: &ops::ClipCoefficient<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "clip_coefficient",
        what: "not built yet".into(),
    })
}

pub(super) fn adamw(_: &CpuBackend, args: &ops::AdamW<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "adamw",
        what: "not built yet".into(),
    })
}
