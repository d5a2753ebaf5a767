//! Why a gate file is refused, in words that say what to write instead.

use crate::source::Date;
use std::fmt;

/// A refused gate file: where, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct GateError {
    /// `file:line`.
    pub at: String,
    /// What is wrong there.
    pub fault: GateFault,
}

impl fmt::Display for GateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.fault)
    }
}

impl std::error::Error for GateError {}

/// Why a gate file is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GateFault {
    /// Not TOML.
    #[error("not TOML: {message}")]
    Syntax {
        /// The parser's words.
        message: String,
    },
    /// A key that means nothing here.
    #[error("unknown key `{key}`; {hint}")]
    UnknownKey {
        /// The key.
        key: String,
        /// The key that was meant, or the keys there are.
        hint: String,
    },
    /// A key that must be there.
    #[error("{table} without `{key}`; {hint}")]
    MissingKey {
        /// Which table.
        table: String,
        /// The key.
        key: &'static str,
        /// What to write.
        hint: &'static str,
    },
    /// A value of another type.
    #[error("`{key}` must be {expected}, got {got}")]
    WrongType {
        /// The key.
        key: String,
        /// What is taken.
        expected: &'static str,
        /// What was found.
        got: String,
    },
    /// A word outside a closed set.
    #[error("`{key}` cannot be `{got}`; {hint}")]
    UnknownWord {
        /// The key.
        key: &'static str,
        /// The word.
        got: String,
        /// The word that was meant, or the words there are.
        hint: String,
    },
    /// A bound that nobody can defend.
    #[error(
        "{table} has a bound and no source; say where the bound comes from: \
         source = {{ kind = \"analytic\", why = \"...\" }}"
    )]
    NoSource {
        /// Which table.
        table: String,
    },
    /// A measurement past its date.
    #[error("{table}: the measured bound expired on {until} (today is {today}); measure it again")]
    ExpiredMeasurement {
        /// Which table.
        table: String,
        /// Last valid day.
        until: Date,
        /// Today.
        today: Date,
    },
    /// A waiver past its date.
    #[error(
        "the waiver of `{gate}` expired on {until} (today is {today}); mend {issue} or renew the waiver"
    )]
    ExpiredWaiver {
        /// Gate it excused.
        gate: String,
        /// Its issue.
        issue: String,
        /// Last valid day.
        until: Date,
        /// Today.
        today: Date,
    },
    /// A waiver for nothing.
    #[error("the waiver names gate `{gate}`, which this file does not have; {hint}")]
    WaiverOfUnknownGate {
        /// The gate it names.
        gate: String,
        /// The gate that was meant, or what to do.
        hint: String,
    },
    /// One id twice.
    #[error("gate id `{id}` stands already at {first}; ids are unique over all files")]
    DuplicateId {
        /// The id.
        id: String,
        /// `file:line` of the first.
        first: String,
    },
    /// Neither a bound nor a band.
    #[error("gate `{id}` judges nothing; give it `op` and `bound`, or a `band`")]
    JudgesNothing {
        /// The gate.
        id: String,
    },
    /// A bound that cannot bind.
    #[error("gate `{id}`: `{metric} {op} {bound}` {why}")]
    Pointless {
        /// The gate.
        id: String,
        /// Its metric.
        metric: &'static str,
        /// Its relation.
        op: &'static str,
        /// Its bound as written.
        bound: String,
        /// Why it cannot bind.
        why: &'static str,
    },
    /// A key on a gate that does not take it.
    #[error("gate `{id}`: `{key}` means nothing for {metric}; {hint}")]
    Misplaced {
        /// The gate.
        id: String,
        /// The key.
        key: &'static str,
        /// Its metric.
        metric: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// A number outside its range.
    #[error("`{key}` is {got}; it must be {expected}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// What was found, as written.
        got: String,
        /// What is taken.
        expected: &'static str,
    },
    /// A band that turns runs red without having proven itself.
    #[error(
        "gate `{id}`: a band starts in shadow; to let it block, say since when it has been quiet: \
         promoted = \"...\""
    )]
    BandNotPromoted {
        /// The gate.
        id: String,
    },
}
