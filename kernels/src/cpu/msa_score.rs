//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn msa_score(_: &CpuBackend, args: &ops::MsaScore<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "msa_score",
        what: "not built yet".into(),
    })
}
