//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn log_prob(_: &CpuBackend, args: &ops::LogProb<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "log_prob",
        what: "not built yet".into(),
    })
}

pub(super) fn log_prob_backward(
    _: &CpuBackend,
    args: &ops::LogProbBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "log_prob_backward",
        what: "not built yet".into(),
    })
}
