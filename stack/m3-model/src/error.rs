//! What the model refuses.

/// Result of building, loading or running a model.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a model could not be built, loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Tokens or ids given by the user do not fit the model.
    #[error("{0}")]
    Input(String),
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] m3_checkpoint::Error),
    /// An operation refused its operands or the device failed.
    #[error(transparent)]
    Kernel(#[from] m3_kernels::Error),
}
