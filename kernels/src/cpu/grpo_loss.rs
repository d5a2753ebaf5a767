//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn grpo_loss(_: &CpuBackend, args: &ops::GrpoLoss<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "grpo_loss",
        what: "not built yet".into(),
    })
}
