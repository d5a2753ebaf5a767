//! From operands and gates to verdicts.

use crate::band::{BandVerdict, judge_band};
use crate::evidence::{Decoder, Evidence};
use crate::gate::{Bound, Gate, GateSet, Limit};
use crate::metrics::{Metric, measure};
use crate::operand::Operands;
use crate::record::VerdictRecord;
use crate::storage::Storage;
use crate::verdict::{Severity, Verdict, series_id};

/// Gate id of the verdict on a tensor that no gate judges.
const UNGATED: &str = "ungated";

/// The case that is judged.
#[derive(Debug, Clone, Copy)]
pub struct Case<'a> {
    /// `op::dtype/shape`.
    pub name: &'a str,
    /// Suite that asked, part of the series identity.
    pub suite: &'a str,
    /// `cpu`, `sm_90a`, …
    pub arch: &'a str,
    /// Storage type of the case.
    pub dtype: Storage,
}

/// One output of a case. The order of a case's tensors is the order of its stages.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Name that gates match: `o`, `lse`, `dk`, …
    pub name: &'a str,
    /// Both sides and the twin.
    pub operands: Operands<'a>,
    /// Names an element in the model's terms.
    pub decoder: Option<Decoder<'a>>,
}

/// A number that the caller measured, with the trusted values of its series.
#[derive(Debug, Clone, Copy)]
pub struct Value<'a> {
    /// What was measured; none when it could not be.
    pub value: Option<f64>,
    /// Training step.
    pub step: Option<u64>,
    /// Trusted values; empty when there are none, or the gate has no band.
    pub history: &'a [f64],
}

/// Judges every gate of `gates` that applies to `case`.
///
/// A gate whose tensor the case does not have is ERROR, and so is a tensor that no gate judges:
/// what nobody looks at would otherwise pass.
pub fn judge_case(gates: &GateSet, case: &Case<'_>, tensors: &[Tensor<'_>]) -> Vec<VerdictRecord> {
    let judges = |g: &&Gate| g.tensor.is_some() && g.applies(case.name, case.arch, case.dtype);
    let applying: Vec<&Gate> = gates.gates().iter().filter(judges).collect();
    let mut verdicts = Vec::new();
    for tensor in tensors {
        let matching = applying
            .iter()
            .filter(|gate| gate_matches(gate, tensor.name));
        let before = verdicts.len();
        verdicts.extend(matching.flat_map(|gate| judge_tensor(gates, gate, case, tensor)));
        if verdicts.len() == before {
            verdicts.push(ungated(case, tensor.name));
        }
    }
    for gate in applying {
        if !tensors.iter().any(|tensor| gate_matches(gate, tensor.name)) {
            let wanted = gate.tensor.as_ref().map(|t| t.text()).unwrap_or_default();
            let note = format!("{wanted} is missing: the case produced no such tensor");
            verdicts.push(Draft::new(gate, case, None).error(Some(wanted), note));
        }
    }
    verdicts
}

/// Judges a `value` gate: one row for its bound, one for its band, under the same id.
pub fn judge_value(
    gates: &GateSet,
    gate: &Gate,
    case: &Case<'_>,
    value: Value<'_>,
) -> Vec<VerdictRecord> {
    let draft = Draft::new(gate, case, value.step);
    match value.value {
        Some(x) if x.is_finite() => draft.judge(gates, None, x, value.history),
        Some(x) => vec![draft.error(None, format!("the value is {x}"))],
        None => vec![draft.error(
            None,
            "the value is missing: nothing was measured".to_owned(),
        )],
    }
}

fn gate_matches(gate: &Gate, tensor: &str) -> bool {
    gate.tensor
        .as_ref()
        .is_some_and(|patterns| patterns.matches(tensor))
}

fn judge_tensor(
    gates: &GateSet,
    gate: &Gate,
    case: &Case<'_>,
    tensor: &Tensor<'_>,
) -> Vec<VerdictRecord> {
    let draft = Draft::new(gate, case, None);
    let mut verdicts = match measure(gate.metric, &tensor.operands, gate.ratio_terms()) {
        Ok(value) => draft.judge(gates, Some(tensor.name), value, &[]),
        Err(error) => vec![draft.error(Some(tensor.name.to_owned()), error.to_string())],
    };
    for row in verdicts
        .iter_mut()
        .filter(|row| row.verdict != Verdict::Pass)
    {
        row.evidence = Evidence::gather(gate, &tensor.operands, tensor.decoder);
    }
    verdicts
}

fn ungated(case: &Case<'_>, tensor: &str) -> VerdictRecord {
    VerdictRecord {
        gate: UNGATED.to_owned(),
        case: case.name.to_owned(),
        step: None,
        tensor: Some(tensor.to_owned()),
        metric: Metric::Value,
        value: None,
        op: None,
        bound: None,
        bound_text: String::new(),
        verdict: Verdict::Error,
        severity: Severity::Block,
        source: "analytic, what no gate judges cannot be right or wrong".to_owned(),
        at: String::new(),
        series: String::new(),
        note: Some(format!("no gate judges {tensor}")),
        evidence: None,
    }
}

/// A verdict row before it is known what to put in.
struct Draft<'a> {
    gate: &'a Gate,
    case: &'a Case<'a>,
    step: Option<u64>,
    series: String,
}

impl<'a> Draft<'a> {
    fn new(gate: &'a Gate, case: &'a Case<'a>, step: Option<u64>) -> Self {
        let series = series_id(case.name, case.suite, case.arch, gate, step);
        Draft {
            gate,
            case,
            step,
            series,
        }
    }

    fn judge(
        &self,
        gates: &GateSet,
        tensor: Option<&str>,
        value: f64,
        history: &[f64],
    ) -> Vec<VerdictRecord> {
        let limit = self
            .gate
            .limit
            .as_ref()
            .map(|limit| self.limit_row(gates, tensor, value, limit));
        let band = self.band_row(tensor, value, history);
        limit.into_iter().chain(band).collect()
    }

    fn limit_row(
        &self,
        gates: &GateSet,
        tensor: Option<&str>,
        value: f64,
        limit: &Limit,
    ) -> VerdictRecord {
        let mut row = self.row(tensor.map(str::to_owned));
        row.value = Some(value);
        let waiver = gates.waiver(&self.gate.id, self.case.name);
        (row.verdict, row.note) = match (limit.op.holds(value, limit.bound), waiver) {
            (true, None) => (Verdict::Pass, None),
            (true, Some(w)) => {
                let note = format!("passes: the waiver for {} ({}) can go", w.issue, w.at);
                (Verdict::Pass, Some(note))
            }
            (false, None) => (Verdict::Fail, None),
            (false, Some(w)) => (
                Verdict::Waived,
                Some(format!("waived until {}: {}", w.until, w.issue)),
            ),
        };
        row
    }

    fn band_row(&self, tensor: Option<&str>, value: f64, history: &[f64]) -> Option<VerdictRecord> {
        let band = self.gate.band.as_ref()?;
        let mut row = self.row(tensor.map(str::to_owned));
        row.value = Some(value);
        row.op = None;
        row.severity = band.severity;
        row.source = band.source.to_string();
        let (verdict, range, note) = match judge_band(band, value, history) {
            BandVerdict::Inside(range) => (Verdict::Pass, Some(range), None),
            BandVerdict::Outside(range) => (Verdict::Fail, Some(range), None),
            BandVerdict::Error(note) => (Verdict::Error, None, Some(note)),
            // A gate that may turn a run red has to be able to judge.
            BandVerdict::Inactive(note) if band.severity == Severity::Block => {
                (Verdict::Error, None, Some(note))
            }
            BandVerdict::Inactive(note) => (Verdict::Inactive, None, Some(note)),
        };
        (row.verdict, row.note) = (verdict, note);
        row.bound = range.map(Bound::Range);
        row.bound_text = range.map_or_else(
            || "no history".to_owned(),
            |[low, high]| format!("in [{low:.6}, {high:.6}]"),
        );
        Some(row)
    }

    fn error(&self, tensor: Option<String>, note: String) -> VerdictRecord {
        VerdictRecord {
            note: Some(note),
            ..self.row(tensor)
        }
    }

    /// An ERROR row with everything that the gate alone decides.
    fn row(&self, tensor: Option<String>) -> VerdictRecord {
        let limit = self.gate.limit.as_ref();
        let band = self.gate.band.as_ref();
        VerdictRecord {
            gate: self.gate.id.clone(),
            case: self.case.name.to_owned(),
            step: self.step,
            tensor,
            metric: self.gate.metric,
            value: None,
            op: limit.map(|limit| limit.op),
            bound: limit.map(|limit| Bound::Limit(limit.bound)),
            bound_text: limit.map_or_else(String::new, |limit| limit.literal.clone()),
            verdict: Verdict::Error,
            severity: limit
                .map(|limit| limit.severity)
                .or(band.map(|band| band.severity))
                .unwrap_or(Severity::Block),
            source: limit
                .map(|limit| limit.source.to_string())
                .or(band.map(|band| band.source.to_string()))
                .unwrap_or_default(),
            at: self.gate.at.clone(),
            series: self.series.clone(),
            note: None,
            evidence: None,
        }
    }
}
