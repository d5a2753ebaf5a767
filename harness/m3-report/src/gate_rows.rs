//! A run judges a gate once a step: one row for all its verdicts.

use m3_gate::record::VerdictRecord;
use m3_gate::{Bound, Op, Severity, Verdict};

/// All verdicts of one gate, case and severity.
#[derive(Debug, Clone)]
pub struct GateRow<'a> {
    /// The worst verdict, and among equal ones the value nearest to its bound or farthest beyond.
    pub worst: &'a VerdictRecord,
    /// Every verdict, in the order given.
    pub verdicts: Vec<&'a VerdictRecord>,
}

impl<'a> GateRow<'a> {
    /// Verdicts other than PASS.
    pub fn not_passed(&self) -> impl Iterator<Item = &'a VerdictRecord> {
        let verdicts = self.verdicts.iter().copied();
        verdicts.filter(|v| v.verdict != Verdict::Pass)
    }

    /// True when it turns the run red.
    pub fn is_red(&self) -> bool {
        self.worst.severity == Severity::Block && !self.worst.verdict.is_green()
    }
}

/// Groups verdicts by gate, case and severity (a gate's limit apart from its band), in the order of their first appearance.
pub fn gate_rows(verdicts: &[VerdictRecord]) -> Vec<GateRow<'_>> {
    let mut rows: Vec<GateRow<'_>> = Vec::new();
    for v in verdicts {
        // A run has a dozen gates and many steps, so the row is found near the front.
        match rows.iter_mut().find(|row| same_row(row.worst, v)) {
            Some(row) => {
                row.verdicts.push(v);
                if is_worse(v, row.worst) {
                    row.worst = v;
                }
            }
            None => rows.push(GateRow {
                worst: v,
                verdicts: vec![v],
            }),
        }
    }
    rows
}

/// A limit and a band of one gate are rows of their own: a band has no relation. The text of a bound
/// tells nothing apart, since a band's moves with its history.
fn same_row(a: &VerdictRecord, b: &VerdictRecord) -> bool {
    (a.metric, a.op, a.severity) == (b.metric, b.op, b.severity)
        && (&a.gate, &a.case, &a.tensor, &a.at) == (&b.gate, &b.case, &b.tensor, &b.at)
}

fn is_worse(a: &VerdictRecord, b: &VerdictRecord) -> bool {
    let by_value = || excess(a).total_cmp(&excess(b));
    a.verdict.cmp(&b.verdict).then_with(by_value).is_gt()
}

/// Grows towards the bound and beyond; a value that could not be measured is beyond all.
fn excess(v: &VerdictRecord) -> f64 {
    let Some(value) = v.value else {
        return f64::INFINITY;
    };
    match (v.op, v.bound) {
        (Some(Op::Le), _) => value,
        (Some(Op::Ge), _) => -value,
        (Some(Op::Eq), Some(Bound::Limit(bound))) => (value - bound).abs(),
        (_, Some(Bound::Range([low, high]))) => (value - 0.5 * (low + high)).abs() / (high - low),
        _ => 0.0,
    }
}
