//! Verdicts, when a run is green, and the identity of a series.

use crate::gate::{Bound, Gate};
use crate::record::VerdictRecord;
use serde::{Deserialize, Serialize};

/// Outcome of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Verdict {
    /// The bound holds.
    Pass,
    /// The bound does not hold, and a waiver excuses it.
    Waived,
    /// History cannot judge yet; only shadow gates may be here.
    Inactive,
    /// The bound does not hold.
    Fail,
    /// Nothing could be judged. Never waived.
    Error,
}

impl Verdict {
    /// Upper-case word, as printed and recorded.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "PASS",
            Verdict::Waived => "WAIVED",
            Verdict::Inactive => "INACTIVE",
            Verdict::Fail => "FAIL",
            Verdict::Error => "ERROR",
        }
    }

    /// True when a block gate may carry it in a green run.
    pub fn is_green(self) -> bool {
        matches!(self, Verdict::Pass | Verdict::Waived)
    }
}

/// Weight of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Turns a run red.
    Block,
    /// Is reported and turns nothing red.
    Shadow,
}

impl Severity {
    /// Lower-case word, as printed and recorded.
    pub fn name(self) -> &'static str {
        match self {
            Severity::Block => "block",
            Severity::Shadow => "shadow",
        }
    }
}

/// True iff no block verdict is other than PASS or WAIVED, and at least one block gate spoke: a
/// run that judged nothing is not green.
pub fn is_green(verdicts: &[VerdictRecord]) -> bool {
    let mut block = verdicts
        .iter()
        .filter(|v| v.severity == Severity::Block)
        .peekable();
    block.peek().is_some() && block.all(|v| v.verdict.is_green())
}

#[derive(Serialize)]
struct ContractRow<'a> {
    gate: &'a str,
    case: &'a str,
    step: Option<u64>,
    metric: &'a str,
    value: Option<f64>,
    bound: Option<Bound>,
    verdict: Verdict,
    severity: Severity,
    source: &'a str,
}

impl<'a> ContractRow<'a> {
    fn of(v: &'a VerdictRecord) -> Self {
        ContractRow {
            gate: &v.gate,
            case: &v.case,
            step: v.step,
            metric: v.metric.name(),
            value: v.value,
            bound: v.bound,
            verdict: v.verdict,
            severity: v.severity,
            source: &v.source,
        }
    }
}

#[derive(Serialize)]
struct Contract<'a> {
    schema: u32,
    verdicts: Vec<ContractRow<'a>>,
}

/// The text of `verdicts.json`: `{"schema":1,"verdicts":[…]}` in the order given.
///
/// `value` is null where nothing could be measured, `bound` a number, a pair for a band, or null
/// while a band has no history.
pub fn verdicts_json(verdicts: &[VerdictRecord]) -> String {
    let verdicts = verdicts.iter().map(ContractRow::of).collect();
    let contract = Contract {
        schema: 1,
        verdicts,
    };
    serde_json::to_string_pretty(&contract).expect("strings and numbers always serialise")
}

/// Stable identity of the series a value belongs to: 128 bits of FNV-1a over (test, suite, arch,
/// metric, literal gate text, step), in hexadecimal.
///
/// Editing what a gate judges starts a new history; fields are separated by their lengths, so no
/// two different tuples are one string.
pub fn series_id(test: &str, suite: &str, arch: &str, gate: &Gate, step: Option<u64>) -> String {
    let step = step.map_or_else(|| "-".to_owned(), |step| step.to_string());
    let gate_text = gate.literal_text();
    let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    let mut eat = |bytes: &[u8]| {
        for &byte in bytes {
            hash =
                (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    };
    for field in [
        test,
        suite,
        arch,
        gate.metric.name(),
        gate_text.as_str(),
        step.as_str(),
    ] {
        eat(&(field.len() as u64).to_le_bytes());
        eat(field.as_bytes());
    }
    format!("{hash:032x}")
}
