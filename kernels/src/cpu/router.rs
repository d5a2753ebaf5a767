//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn router_select(
    _: &CpuBackend,
    args: &ops::RouterSelect<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "router_select",
        what: "not built yet".into(),
    })
}

pub(super) fn router_weights(
    _: &CpuBackend,
    args: &ops::RouterWeights<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "router_weights",
        what: "not built yet".into(),
    })
}

pub(super) fn router_backward(
    _: &CpuBackend,
    args: &ops::RouterBackward<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "router_backward",
        what: "not built yet".into(),
    })
}
