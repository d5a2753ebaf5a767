//! Properties of selections, their tile maps and block-sparse attention over random packs, on the CPU.
//!
//! `M3_TIER=full` tries 20,000 packs, the default a few hundred; `M3_SEED` takes others. A pack that breaks a property
//! is shrunk and kept beside its test as a line of `<file>.regressions`, which every later run tries first.

mod coverage;
mod isolation;
mod pack;
mod rows;
mod tile_map;
mod tiles;
mod walk;
