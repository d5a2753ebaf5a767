//! What a pipeline refuses or fails with, one line each.

use std::io;
use std::path::{Path, PathBuf};

/// Result of the pipelines.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a pipeline ended without a result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something the user gave does not fit; nothing has been written.
    #[error("{0}")]
    Input(String),
    /// An output could not be written.
    #[error("{}: cannot be written: {source}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The computation gave a value that is not finite.
    #[error("{0} is not finite; check the weights and the dtype")]
    NonFinite(String),
    /// The model or its checkpoint refused.
    #[error(transparent)]
    Model(#[from] m3_model::Error),
    /// The trainer refused.
    #[error(transparent)]
    Trainer(#[from] m3_trainer::Error),
    /// The rollout engine refused.
    #[error(transparent)]
    Rollout(#[from] m3_rollout::Error),
    /// A device refused or failed.
    #[error(transparent)]
    Kernel(#[from] m3_kernels::Error),
}

impl From<m3_checkpoint::Error> for Error {
    fn from(error: m3_checkpoint::Error) -> Self {
        Error::Model(error.into())
    }
}

impl Error {
    /// A file given by the user that cannot be used.
    pub(crate) fn file(path: &Path, what: impl std::fmt::Display) -> Self {
        Error::Input(format!("{}: {what}", path.display()))
    }
}
