//! Properties of selections, their tile maps and block-sparse attention over random packs, on the CPU.
//!
//! The default tries a few hundred packs in seconds, `M3_TIER=full cargo test -p m3-harness --test props` 28,800 in a
//! quarter of an hour; `M3_SEED` takes others. A pack that breaks a property is shrunk and kept beside its test as a
//! line of `<file>.regressions`, which every later run tries first.

mod coverage;
mod isolation;
mod offsets;
mod pack;
mod rows;
mod tile_map;
mod tiles;
mod walk;
