//! What the engine refuses.

/// Result of the engine.
pub type Result<T> = std::result::Result<T, Error>;

/// Why the engine could not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A prompt or a setting that does not fit.
    #[error("{0}")]
    Input(String),
    /// An update that does not match the engine's tensors.
    #[error("weight sync: {0}")]
    Sync(String),
    /// The model refused its rows.
    #[error(transparent)]
    Model(#[from] m3_model::Error),
    /// An operation refused its operands or the device failed.
    #[error(transparent)]
    Kernel(#[from] m3_kernels::Error),
}
