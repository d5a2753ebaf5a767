//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn grouped_gemm(_: &CpuBackend, args: &ops::GroupedGemm<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "grouped_gemm",
        what: "not built yet".into(),
    })
}

pub(super) fn grouped_gemm_weights(
    _: &CpuBackend,
    args: &ops::GroupedGemmWeights<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "grouped_gemm_weights",
        what: "not built yet".into(),
    })
}
