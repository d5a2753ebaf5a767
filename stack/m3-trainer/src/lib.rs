//! Training: packs of samples, the GRPO step, AdamW over buckets of slices.
//!
//! [`Trainer::step`] is the whole step, read top to bottom. It reports through an [`Observer`] and judges nothing.

mod advantage;
mod batch;
mod error;
mod optimizer;
mod trainer;

pub use advantage::group_advantages;
pub use batch::{Batch, Sample};
pub use error::{Error, Result};
pub use optimizer::{AdamWConfig, Optimizer, Pace, Resident, State, StateStore};
pub use trainer::{Observer, StepReport, Trainer, TrainerConfig};
