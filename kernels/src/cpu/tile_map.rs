//! Not built yet.

use super::CpuBackend;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn tile_map(_: &CpuBackend, args: &ops::TileMap<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    Err(Error::Argument {
        op: "tile_map",
        what: "not built yet".into(),
    })
}
