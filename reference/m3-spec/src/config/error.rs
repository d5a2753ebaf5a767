//! Why a configuration is refused.

/// A configuration that cannot be read or that describes no supported model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON.
    #[error("config.json is not valid json: {0}")]
    Json(String),
    /// A required key is absent or null.
    #[error("{key} is missing; {hint}")]
    Missing {
        /// Dotted path of the key.
        key: String,
        /// What would do.
        hint: &'static str,
    },
    /// A key has a value of another type.
    #[error("{key} must be {expected}, got {got}")]
    WrongType {
        /// Dotted path of the key.
        key: String,
        /// The type in words.
        expected: &'static str,
        /// The value, shortened.
        got: String,
    },
    /// Another model family.
    #[error("{key} {got:?} is not a MiniMax-M3 model; known: {known}")]
    UnknownModelType {
        /// Dotted path of the key.
        key: String,
        /// The value.
        got: String,
        /// The accepted values.
        known: String,
    },
    /// A variant that no implementation here has.
    #[error("{key} is {got}, only {supported} is supported")]
    Unsupported {
        /// Dotted path of the key.
        key: String,
        /// The value.
        got: String,
        /// The one value that is.
        supported: String,
    },
    /// Two keys for one quantity, with different values.
    #[error("{first} is {first_value} but {second} is {second_value}; remove one of the two")]
    Disagree {
        /// Dotted path of the one key.
        first: String,
        /// Its value.
        first_value: String,
        /// Dotted path of the other.
        second: String,
        /// Its value.
        second_value: String,
    },
    /// Values that do not fit each other.
    #[error("{0}")]
    Constraint(String),
}

impl ConfigError {
    pub(crate) fn constraint(message: impl Into<String>) -> Self {
        ConfigError::Constraint(message.into())
    }
}
