//! What is written down: the only serde types of the project that leave a process.

use crate::evidence::Evidence;
use crate::gate::{Bound, Op};
use crate::metrics::Metric;
use crate::verdict::{Severity, Verdict};
use serde::{Deserialize, Serialize};

/// Version of the records below; the first line of a JSON-lines file carries it.
pub const SCHEMA_VERSION: u32 = 1;

/// Machine that a case ran on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// Model name, e.g. `H200` or `cpu (2 threads)`.
    pub name: String,
    /// Architecture that gates match: `cpu`, `sm_90a`, …
    pub arch: String,
    /// Driver version, absent on the CPU.
    pub driver: Option<String>,
    /// CUDA version, absent on the CPU.
    pub cuda: Option<String>,
}

/// One invocation of a pipeline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Identity of the run.
    pub id: String,
    /// Commit of the tree, with `-dirty` when it was not clean.
    pub commit: String,
    /// RFC 3339, UTC.
    pub started_utc: String,
    /// Seed of everything random.
    pub seed: u64,
    /// `ci` or `full`.
    pub tier: String,
    /// Machine.
    pub device: Device,
}

/// One case and all its verdicts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseRecord {
    /// `op::dtype/shape`.
    pub case: String,
    /// Seed that makes the inputs.
    pub seed: u64,
    /// Digest of the inputs.
    pub inputs_digest: String,
    /// Where this record is kept.
    pub record: String,
    /// Machine.
    pub device: Device,
    /// Wall time of the case.
    pub duration_ms: u64,
    /// Why the case did not run, e.g. `no CUDA device`; it then has no verdicts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
    /// Verdicts in stage order: tensors in the order in which the op makes them.
    pub verdicts: Vec<VerdictRecord>,
}

/// One gate on one tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerdictRecord {
    /// Gate id.
    pub gate: String,
    /// Case that was judged.
    pub case: String,
    /// Training step, for the gates of a run.
    pub step: Option<u64>,
    /// Tensor that was judged; none for a number that the caller measured.
    pub tensor: Option<String>,
    /// What was measured.
    pub metric: Metric,
    /// What came out; none when the verdict is ERROR. Always finite.
    pub value: Option<f64>,
    /// Relation, none for a band.
    pub op: Option<Op>,
    /// Right-hand side; none while a band has no history.
    pub bound: Option<Bound>,
    /// Right-hand side as the gate file spells it.
    pub bound_text: String,
    /// Outcome.
    pub verdict: Verdict,
    /// Weight.
    pub severity: Severity,
    /// Where the bound comes from.
    pub source: String,
    /// `file:line` of the gate.
    pub at: String,
    /// Series identity.
    pub series: String,
    /// Why the verdict is what it is, where the value does not say it.
    pub note: Option<String>,
    /// What is wrong where; only with verdicts that are not PASS.
    pub evidence: Option<Evidence>,
}

impl VerdictRecord {
    /// `tensor.metric`, or the gate's id when no tensor was judged: the name used on screen.
    pub fn label(&self) -> String {
        match &self.tensor {
            Some(tensor) => format!("{tensor}.{}", self.metric.name()),
            None => self.gate.clone(),
        }
    }

    /// Share of the bound that the value uses up: 1 is at the bound. For a share that has to be
    /// reached, what is missing to 1 counts. None where the bound leaves no room, or for a band.
    pub fn bound_used(&self) -> Option<f64> {
        let (Some(value), Some(Bound::Limit(bound))) = (self.value, self.bound) else {
            return None;
        };
        let used = match (self.op?, self.metric) {
            (Op::Le, _) if bound > 0.0 => value / bound,
            (Op::Ge, Metric::AgreeRate) if bound < 1.0 => (1.0 - value) / (1.0 - bound),
            _ => return None,
        };
        used.is_finite().then_some(used)
    }
}

impl CaseRecord {
    /// The worst of the block verdicts: ERROR when no block gate spoke, INACTIVE when the case was
    /// skipped.
    pub fn verdict(&self) -> Verdict {
        if self.skipped.is_some() {
            return Verdict::Inactive;
        }
        let block = self
            .verdicts
            .iter()
            .filter(|v| v.severity == Severity::Block);
        block.map(|v| v.verdict).max().unwrap_or(Verdict::Error)
    }

    /// The op of `op::dtype/shape`.
    pub fn op(&self) -> &str {
        self.case.split("::").next().unwrap_or(&self.case)
    }

    /// The verdict that uses up most of its bound.
    pub fn tightest(&self) -> Option<(&VerdictRecord, f64)> {
        let used = self
            .verdicts
            .iter()
            .filter_map(|v| Some((v, v.bound_used()?)));
        used.max_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// f64 as JSON: a number, or the words `nan`, `inf`, `-inf`, since JSON has none and null hides it.
pub(crate) mod number {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Number(f64),
        Word(String),
    }

    pub fn serialize<S: Serializer>(x: &f64, to: S) -> Result<S::Ok, S::Error> {
        if x.is_finite() {
            to.serialize_f64(*x)
        } else {
            to.serialize_str(&word(*x))
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        match Either::deserialize(from)? {
            Either::Number(x) => Ok(x),
            Either::Word(text) => match text.as_str() {
                "nan" => Ok(f64::NAN),
                "inf" => Ok(f64::INFINITY),
                "-inf" => Ok(f64::NEG_INFINITY),
                _ => Err(D::Error::custom(format!(
                    "expected a number, nan, inf or -inf, got {text}"
                ))),
            },
        }
    }

    fn word(x: f64) -> String {
        if x.is_nan() {
            "nan".to_owned()
        } else {
            format!("{x}")
        }
    }
}
