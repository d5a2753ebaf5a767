//! Rollout: paged cache, prefill and decode, sampling, weight sync.
//!
//! The engine has weights of its own, in the fused storage of [`m3_model`], and runs the same operations as the trainer
//! on the same tiles, so that a row's bits do not depend on which of the two computed it.

mod cache;
mod engine;
mod error;
mod sync;

pub use cache::PagedCache;
pub use engine::{Engine, Generation, Prompt, Routes, Sampling, check_temperature};
pub use error::{Error, Result};
pub use sync::{SyncReport, WeightSync};
