//! The terminal report: a line per case, the blocks of what failed, a summary.

use crate::{GateRun, word};
use m3_gate::record::{CaseRecord, VerdictRecord};
use m3_gate::{failure_block, value_text};

/// One line per case, then the failure blocks, then what was waived, then the summary with the
/// value that came nearest to its bound.
pub fn terminal(report: &GateRun) -> String {
    let width = report
        .cases
        .iter()
        .map(|c| c.case.chars().count())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for case in &report.cases {
        text += &case_line(case, width);
    }
    for block in report.cases.iter().filter_map(failure_block) {
        text += &format!("\n{block}");
    }
    let noted: Vec<&VerdictRecord> = report
        .cases
        .iter()
        .flat_map(|c| &c.verdicts)
        .filter(|v| is_noted(v))
        .collect();
    for v in noted {
        let note = v.note.as_deref().unwrap_or_default();
        text += &format!("\n{} {} {}: {note}", v.verdict.name(), v.case, v.label());
    }
    text + &format!("\n{}\n", summary_line(report))
}

/// A verdict that is not red and still has something to say: waivers and waiting bands.
fn is_noted(v: &VerdictRecord) -> bool {
    use m3_gate::Verdict::{Inactive, Pass, Waived};
    v.note.is_some() && matches!(v.verdict, Pass | Waived | Inactive)
}

fn case_line(case: &CaseRecord, width: usize) -> String {
    let word = word(case);
    if let Some(why) = &case.skipped {
        return format!("{word:<8} {:<width$}  {why}\n", case.case);
    }
    let tightest = case.tightest().map_or_else(String::new, |(v, used)| {
        let value = v.value.map(value_text).unwrap_or_default();
        format!(
            "  nearest {} {value} of {} ({used:.2})",
            v.label(),
            v.bound_text
        )
    });
    let gates = case.verdicts.len();
    let time = case.duration_ms;
    format!(
        "{word:<8} {:<width$}  {gates:>3} gates  {time:>6} ms{tightest}\n",
        case.case
    )
}

fn summary_line(report: &GateRun) -> String {
    let tightest = report.cases.iter().filter_map(CaseRecord::tightest);
    let top = tightest.max_by(|a, b| a.1.total_cmp(&b.1));
    let summary = report.summary().text();
    match top {
        Some((v, used)) => {
            format!(
                "{summary}; nearest to its bound: {} {} ({used:.2})",
                v.case,
                v.label()
            )
        }
        None => summary,
    }
}
