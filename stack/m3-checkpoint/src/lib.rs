//! Released MiniMax-M3 checkpoints, memory-mapped, a tensor at a time.
//!
//! - [`Checkpoint`] opens a directory, holds every file against itself, the index and the config before it hands out the
//!   first tensor, and never copies one.
//! - [`Writer`] writes the same layout, crash-safe; [`synthetic()`] fills one with random weights.
//! - [`TensorFiles`] is the files without the model, for converters; [`is_passed_over`] tells what is not read. The table of
//!   released names is [`m3_spec::tensors`].
//!
//! Deliberately absent: any change of dtype on disk, quantised formats, and knowledge of parameters, devices or layouts in
//! memory.

mod checkpoint;
mod error;
mod files;
mod header;
mod names;
mod pairs;
mod shard;
mod staging;
mod synthetic;
mod writer;

pub use checkpoint::{Checkpoint, TensorView};
pub use error::{Error, FileProblem, IndexProblem, PlanProblem, Result};
pub use files::{CONFIG_FILE, INDEX_FILE, RawTensor, SINGLE_FILE, TensorFiles};
pub use names::is_passed_over;
pub use safetensors::Dtype as FileDtype;
pub use synthetic::{Synthetic, synthetic};
pub use writer::{TensorPlan, Writer, plan};
