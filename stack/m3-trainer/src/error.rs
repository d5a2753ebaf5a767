//! What the trainer refuses.

/// Result of training.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a step could not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A sample or a setting that does not fit.
    #[error("{0}")]
    Input(String),
    /// The model refused its pack.
    #[error(transparent)]
    Model(#[from] m3_model::Error),
    /// An operation refused its operands or the device failed.
    #[error(transparent)]
    Kernel(#[from] m3_kernels::Error),
}
