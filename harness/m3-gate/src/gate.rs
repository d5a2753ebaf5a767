//! Gates: what must hold, as data.

use crate::band::Band;
use crate::glob::Patterns;
use crate::metrics::{Metric, RatioTerms};
use crate::parse::{GateError, GateFault};
use crate::source::{Date, Source};
use crate::storage::Storage;
use crate::verdict::Severity;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Relation between a value and its bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// value <= bound.
    #[serde(rename = "<=")]
    Le,
    /// value >= bound.
    #[serde(rename = ">=")]
    Ge,
    /// value == bound.
    #[serde(rename = "==")]
    Eq,
}

impl Op {
    /// Spelling in gate files.
    pub fn name(self) -> &'static str {
        match self {
            Op::Le => "<=",
            Op::Ge => ">=",
            Op::Eq => "==",
        }
    }

    /// True iff the relation holds. Asked this way round, so that a NaN holds nothing.
    pub fn holds(self, value: f64, bound: f64) -> bool {
        match self {
            Op::Le => value <= bound,
            Op::Ge => value >= bound,
            Op::Eq => value == bound,
        }
    }
}

/// What is added to a divisor (the twin's error, or the reference's size), with the reason for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Floor {
    /// In the unit of the tensor.
    pub abs: f64,
    /// Why this much.
    pub why: String,
}

/// The absolute part of a gate.
#[derive(Debug, Clone, PartialEq)]
pub struct Limit {
    /// Relation that must hold.
    pub op: Op,
    /// Right-hand side.
    pub bound: f64,
    /// The bound as the file spells it: part of the series identity.
    pub literal: String,
    /// Weight of the verdict.
    pub severity: Severity,
    /// Where the bound comes from.
    pub source: Source,
}

/// Right-hand side of a verdict, as records carry it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Bound {
    /// One number.
    Limit(f64),
    /// Lower and upper end of a band.
    Range([f64; 2]),
}

/// One `[[gate]]` table.
#[derive(Debug, Clone, PartialEq)]
pub struct Gate {
    /// Unique over all files of a [`GateSet`].
    pub id: String,
    /// Tensors it judges; empty patterns do not exist, a `value` gate has none.
    pub tensor: Option<Patterns>,
    /// What is measured.
    pub metric: Metric,
    /// Absolute bound; a gate has this, or a band, or both.
    pub limit: Option<Limit>,
    /// Band round trusted history.
    pub band: Option<Band>,
    /// Cases it applies to.
    pub cases: Patterns,
    /// Architectures it applies to (`cpu`, `sm_90a`, …).
    pub arch: Patterns,
    /// Storage types it applies to.
    pub dtype: Patterns,
    /// Floor of a metric that divides.
    pub floor: Option<Floor>,
    /// Why a ratio over fewer than [`crate::RATIO_ELEMENTS_MIN`] elements is meaningful here.
    pub small: Option<String>,
    /// `file:line` of the table.
    pub at: String,
}

impl Gate {
    /// True when the gate speaks about this case at all.
    pub fn applies(&self, case: &str, arch: &str, storage: Storage) -> bool {
        self.cases.matches(case) && self.arch.matches(arch) && self.dtype.matches(storage.name())
    }

    /// What [`crate::measure`] takes from the gate.
    pub fn ratio_terms(&self) -> RatioTerms {
        RatioTerms {
            floor: self.floor.as_ref().map_or(0.0, |floor| floor.abs),
            small: self.small.is_some(),
        }
    }

    /// The parts that decide a verdict, in one canonical line: editing any of them starts a new
    /// series, rewording a reason does not.
    pub fn literal_text(&self) -> String {
        let mut text = format!("{} {}", self.id, self.metric.name());
        if let Some(tensor) = &self.tensor {
            text += &format!(" tensor={}", tensor.text());
        }
        if let Some(limit) = &self.limit {
            text += &format!(" {} {}", limit.op.name(), limit.literal);
        }
        if let Some(floor) = &self.floor {
            text += &format!(" floor={:?}", floor.abs);
        }
        if let Some(band) = &self.band {
            text += &format!(" band={:?}/{:?}/{}", band.rel, band.floor, band.history_min);
        }
        let (cases, arch, dtype) = (self.cases.text(), self.arch.text(), self.dtype.text());
        text + &format!(
            " cases={cases} arch={arch} dtype={dtype} small={}",
            self.small.is_some()
        )
    }
}

/// One `[[waiver]]` table: a failure that is known, has an issue, and ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Waiver {
    /// Gate it excuses.
    pub gate: String,
    /// Cases it excuses.
    pub cases: Patterns,
    /// Where the failure is being worked on.
    pub issue: String,
    /// Last day on which it counts.
    pub until: Date,
    /// `file:line` of the table.
    pub at: String,
}

/// The gates and waivers of one file, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GateFile {
    /// `[[gate]]` tables.
    pub gates: Vec<Gate>,
    /// `[[waiver]]` tables; each names a gate of the same file.
    pub waivers: Vec<Waiver>,
}

/// All gates of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GateSet {
    gates: Vec<Gate>,
    waivers: Vec<Waiver>,
}

impl GateSet {
    /// Joins files.
    ///
    /// # Errors
    /// [`GateFault::DuplicateId`] when two files define one id.
    pub fn new(files: impl IntoIterator<Item = GateFile>) -> Result<Self, GateError> {
        let mut set = GateSet::default();
        let mut seen: BTreeMap<String, String> = BTreeMap::new();
        for file in files {
            for gate in file.gates {
                if let Some(first) = seen.insert(gate.id.clone(), gate.at.clone()) {
                    let fault = GateFault::DuplicateId { id: gate.id, first };
                    return Err(GateError { at: gate.at, fault });
                }
                set.gates.push(gate);
            }
            set.waivers.extend(file.waivers);
        }
        Ok(set)
    }

    /// Every gate, in the order given.
    pub fn gates(&self) -> &[Gate] {
        &self.gates
    }

    /// The gate of this id.
    pub fn gate(&self, id: &str) -> Option<&Gate> {
        self.gates.iter().find(|gate| gate.id == id)
    }

    /// The waiver that excuses `gate` in `case`, if any.
    pub fn waiver(&self, gate: &str, case: &str) -> Option<&Waiver> {
        self.waivers
            .iter()
            .find(|w| w.gate == gate && w.cases.matches(case))
    }
}
