//! Where a bound comes from. A bound without a source is refused.

use std::fmt;

/// A calendar day. Today's is passed in: this crate has no clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Date {
    /// Year of the common era.
    pub year: u16,
    /// 1 to 12.
    pub month: u8,
    /// 1 to 31.
    pub day: u8,
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04}-{:02}-{:02}", self.year, self.month, self.day)
    }
}

/// Where a bound comes from; `why` is the reason in words where the kind does not carry one itself.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// Follows from arithmetic.
    Analytic {
        /// The derivation in a sentence.
        why: String,
    },
    /// Taken from one of the documents that the project implements.
    Seed {
        /// Which document and where.
        doc: String,
        /// What the number means there.
        why: Option<String>,
    },
    /// Published elsewhere.
    Literature {
        /// Full reference.
        cite: String,
        /// What the number means there.
        why: Option<String>,
    },
    /// Measured by us, and valid until a date.
    Measured {
        /// Commit that was measured.
        commit: String,
        /// Device that it was measured on.
        device: String,
        /// Number of samples.
        n: u64,
        /// How the bound follows from the samples.
        rule: String,
        /// Last day on which the gate may be used.
        until: Date,
    },
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, text, why) = match self {
            Source::Analytic { why } => ("analytic", why, &None),
            Source::Seed { doc, why } => ("seed", doc, why),
            Source::Literature { cite, why } => ("literature", cite, why),
            Source::Measured {
                commit,
                device,
                n,
                rule,
                until,
            } => {
                return write!(
                    f,
                    "measured, {rule} of {n} on {device} at {commit}, until {until}"
                );
            }
        };
        write!(f, "{kind}, {text}")?;
        why.as_ref().map_or(Ok(()), |why| write!(f, ": {why}"))
    }
}
