//! Reports from records: terminal, JSON, JUnit and HTML.
//!
//! **Absent on purpose**: tensors, gates, devices, files. Everything is made from the [`Run`] and
//! its [`CaseRecord`]s, or from a [`TrainRun`] and its verdicts, so that a report can be made
//! again, elsewhere and later.

mod gate_rows;
mod html;
mod json_lines;
mod junit;
mod page;
mod plot;
mod terminal;
mod train;

pub use gate_rows::{GateRow, gate_rows};
pub use html::html;
pub use json_lines::{ReadError, json_lines, read_json_lines};
pub use junit::junit;
pub use terminal::terminal;
pub use train::{TrainRun, train_html};

use m3_gate::record::{CaseRecord, Run};
use m3_gate::{Verdict, is_green};

/// What a report is about.
#[derive(Debug, Clone, PartialEq)]
pub struct GateRun {
    /// The invocation.
    pub run: Run,
    /// Its cases, in the order in which they ran.
    pub cases: Vec<CaseRecord>,
}

/// Counts of a run, by case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    /// Every block gate passed.
    pub passed: usize,
    /// Passed with the help of a waiver.
    pub waived: usize,
    /// A block gate failed.
    pub failed: usize,
    /// Something could not be judged.
    pub errors: usize,
    /// Did not run.
    pub skipped: usize,
    /// Gates judged, in all cases.
    pub gates: usize,
    /// At least one case ran, and no block gate is other than PASS or WAIVED.
    pub green: bool,
}

impl GateRun {
    /// Counts the cases.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary::default();
        for case in &self.cases {
            let counter = match case.verdict() {
                Verdict::Pass => &mut summary.passed,
                Verdict::Waived => &mut summary.waived,
                Verdict::Fail => &mut summary.failed,
                Verdict::Error => &mut summary.errors,
                Verdict::Inactive if case.skipped.is_some() => &mut summary.skipped,
                Verdict::Inactive => &mut summary.errors,
            };
            *counter += 1;
            summary.gates += case.verdicts.len();
        }
        let mut ran = self
            .cases
            .iter()
            .filter(|case| case.skipped.is_none())
            .peekable();
        summary.green = ran.peek().is_some() && ran.all(|case| is_green(&case.verdicts));
        summary
    }
}

/// The word for a case: its verdict, or SKIP.
fn word(case: &CaseRecord) -> &'static str {
    if case.skipped.is_some() {
        "SKIP"
    } else {
        case.verdict().name()
    }
}

impl Summary {
    /// `12 cases: 10 PASS, 1 FAIL, 1 SKIP; 34 gates; red`.
    pub fn text(&self) -> String {
        let counts = [
            (self.passed, "PASS"),
            (self.waived, "WAIVED"),
            (self.failed, "FAIL"),
            (self.errors, "ERROR"),
            (self.skipped, "SKIP"),
        ];
        let cases: usize = counts.iter().map(|(count, _)| count).sum();
        let shown: Vec<String> = counts
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, word)| format!("{count} {word}"))
            .collect();
        let shown = if shown.is_empty() {
            "nothing ran".to_owned()
        } else {
            shown.join(", ")
        };
        let colour = if self.green { "green" } else { "red" };
        format!("{cases} cases: {shown}; {} gates; {colour}", self.gates)
    }
}
