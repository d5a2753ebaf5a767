//! How a failure reads: at most 14 lines, in a fixed order. What broke, by how much, why the bound
//! is that, which element in the model's terms, is it local, which stage first, how to repeat.

use crate::evidence::{Evidence, UlpHistogram, Worst};
use crate::gate::Op;
use crate::record::{CaseRecord, Device, VerdictRecord};
use crate::verdict::{Severity, Verdict};
use std::fmt::Write;

/// Column at which the device stands in the first line, if the case's name leaves room.
const DEVICE_COLUMN: usize = 70;
/// Column at which the gate's file and line stand, if the reason leaves room.
const PLACE_COLUMN: usize = 82;

/// The block of a case's first red gate, with what else is red in a line; none when nothing is.
///
/// Block gates come before shadow gates, then stage order decides. Every line is made from the
/// record alone, so an old failure reads as it did on the day.
pub fn failure_block(record: &CaseRecord) -> Option<String> {
    let first = first_red(record)?;
    let mut block = head(record, first);
    block += &gate_lines(first);
    if let Some(evidence) = &first.evidence {
        block += &evidence_lines(first, evidence);
    }
    if let Some(stages) = stages(record) {
        block += &line("stages", &stages);
    }
    let red = record.verdicts.iter().filter(|v| is_red(v));
    let others: Vec<String> = red
        .filter(|v| !std::ptr::eq(*v, first))
        .map(VerdictRecord::label)
        .collect();
    if !others.is_empty() {
        block += &line("also", &shortened(&others));
    }
    block += &repeat_lines(record);
    Some(block)
}

/// The same failure in one line, for logs and test reports: `case gate value > bound at tensor[i]`.
pub fn failure_line(record: &CaseRecord) -> Option<String> {
    let first = first_red(record)?;
    let mut text = format!("{} {} {}", first.verdict.name(), record.case, first.label());
    if let Some(value) = first.value {
        let broken = match first.op {
            Some(Op::Le) => ">",
            Some(Op::Ge) => "<",
            Some(Op::Eq) => "!=",
            None => "not",
        };
        text += &format!(" {} {broken} {}", value_text(value), first.bound_text);
    }
    if let Some(note) = &first.note {
        text += &format!(": {note}");
    }
    let worst = first
        .evidence
        .as_ref()
        .and_then(|evidence| evidence.worst.as_ref());
    if let (Some(worst), Some(tensor)) = (worst, &first.tensor) {
        text += &format!(" at {tensor}{:?}", worst.at);
    }
    Some(text)
}

/// Block before shadow, then the order of the record, which is the order of the stages.
fn first_red(record: &CaseRecord) -> Option<&VerdictRecord> {
    let red = record.verdicts.iter().filter(|v| is_red(v));
    red.min_by_key(|v| v.severity == Severity::Shadow)
}

fn is_red(v: &VerdictRecord) -> bool {
    matches!(v.verdict, Verdict::Fail | Verdict::Error)
}

fn line(name: &str, text: &str) -> String {
    format!("  {name:<8}{text}").trim_end().to_owned() + "\n"
}

/// `left`, then `right` at `column` or after two blanks.
fn two_columns(left: &str, right: &str, column: usize) -> String {
    let gap = column.saturating_sub(left.chars().count()).max(2);
    format!("{left}{:gap$}{right}", "").trim_end().to_owned() + "\n"
}

fn head(record: &CaseRecord, first: &VerdictRecord) -> String {
    let Device {
        name,
        arch,
        driver,
        cuda,
    } = &record.device;
    let mut device = if name == arch {
        name.clone()
    } else {
        format!("{name} {arch}")
    };
    if let Some(driver) = driver {
        device += &format!(" · driver {driver}");
    }
    if let Some(cuda) = cuda {
        device += &format!(" · cuda {cuda}");
    }
    device += &format!(" · {} ms", record.duration_ms);
    two_columns(
        &format!("{} {}", first.verdict.name(), record.case),
        &device,
        DEVICE_COLUMN,
    )
}

fn gate_lines(v: &VerdictRecord) -> String {
    let value = v.value.map_or_else(|| "none".to_owned(), value_text);
    let bound = match v.op {
        Some(op) => format!("bound {} {}", op.name(), v.bound_text),
        None => format!("band {}", v.bound_text),
    };
    let step = v
        .step
        .map_or_else(String::new, |step| format!(" at step {step}"));
    let severity = v.severity.name();
    let mut lines = line(
        "gate",
        &format!("{} = {value}{step}, {bound} ({severity})", v.label()),
    );
    if let Some(note) = &v.note {
        lines += &line("", &format!("because {note}"));
    }
    lines += &two_columns(&format!("          why: {}", v.source), &v.at, PLACE_COLUMN);
    lines
}

fn evidence_lines(v: &VerdictRecord, evidence: &Evidence) -> String {
    let name = v.tensor.as_deref().unwrap_or(&v.gate);
    let Evidence {
        shape,
        storage,
        elements,
        over,
        nan,
        inf,
        ..
    } = evidence;
    let share = percent(*over as f64 / *elements as f64);
    let mut lines = line(
        "tensor",
        &format!(
            "{name} {} {shape:?}  {elements} elements: {over} over bound ({share}), NaN {nan}, Inf {inf}",
            storage.name()
        ),
    );
    if let Some(worst) = &evidence.worst {
        lines += &worst_lines(name, worst);
    }
    if let Some(locality) = &evidence.locality {
        lines += &line("where", locality);
    }
    lines + &line("ulp", &histogram_text(&evidence.ulp))
}

fn worst_lines(name: &str, worst: &Worst) -> String {
    let Worst {
        at,
        reference,
        got,
        reference_bits,
        got_bits,
        ..
    } = worst;
    let (right, wrong) = (six_digits(*reference), six_digits(*got));
    let mut text =
        format!("{name}{at:?}  ref {right} ({reference_bits})  got {wrong} ({got_bits})");
    let abs = (got - reference).abs();
    if abs.is_finite() {
        text += &format!("  abs {abs:.1e}");
        if *reference != 0.0 {
            text += &format!("  rel {:.1e}", abs / reference.abs());
        }
        text += &format!("  {} ulp", worst.ulp);
    }
    let mut lines = line("worst", &text);
    if !worst.terms.is_empty() {
        lines += &line("", &format!("= {}", worst.terms));
    }
    lines
}

/// `lse ok, delta ok, dv ok, dk FAIL (first)`; none where no tensors were judged.
fn stages(record: &CaseRecord) -> Option<String> {
    let mut stages: Vec<(&str, Verdict)> = Vec::new();
    for v in record
        .verdicts
        .iter()
        .filter(|v| v.severity == Severity::Block)
    {
        let Some(tensor) = v.tensor.as_deref() else {
            continue;
        };
        match stages.iter_mut().find(|(name, _)| *name == tensor) {
            Some((_, worst)) => *worst = (*worst).max(v.verdict),
            None => stages.push((tensor, v.verdict)),
        }
    }
    let first_red = stages.iter().position(|(_, verdict)| !verdict.is_green());
    let words: Vec<String> = stages
        .iter()
        .enumerate()
        .map(|(i, (name, verdict))| {
            let word = if verdict.is_green() {
                "ok"
            } else {
                verdict.name()
            };
            format!(
                "{name} {word}{}",
                if Some(i) == first_red { " (first)" } else { "" }
            )
        })
        .collect();
    (!words.is_empty()).then(|| words.join(", "))
}

fn shortened(labels: &[String]) -> String {
    const SHOWN: usize = 4;
    let shown = labels
        .iter()
        .take(SHOWN)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    match labels.len().saturating_sub(SHOWN) {
        0 => format!("{shown} red"),
        more => format!("{shown} and {more} more red"),
    }
}

fn repeat_lines(record: &CaseRecord) -> String {
    let CaseRecord {
        case,
        seed,
        inputs_digest,
        record: path,
        ..
    } = record;
    let mut origin = format!("0x{seed:x}   inputs {inputs_digest}");
    if !path.is_empty() {
        origin += &format!("   record {path}");
    }
    line("seed", &origin)
        + &line("rerun", &format!("m3 gate '{case}' --seed 0x{seed:x}"))
        + &line("bot", &format!("/rerun-test {case}"))
}

/// `0: 91.2 %   1: 8.1 %   2: 0.7 %   3-4: 9   5+: 41`: shares from 0.1 % up, counts below.
fn histogram_text(h: &UlpHistogram) -> String {
    let buckets = [
        ("0", h.zero),
        ("1", h.one),
        ("2", h.two),
        ("3-4", h.three_to_four),
        ("5+", h.five_up),
    ];
    let total: u64 = buckets.iter().map(|(_, count)| count).sum();
    let mut text = String::new();
    for (name, count) in buckets {
        let permille = (1000 * count).checked_div(total).unwrap_or(0);
        // Rounded down, so that 100.0 % is all of them.
        let shown = if permille > 0 {
            format!("{}.{} %", permille / 10, permille % 10)
        } else {
            count.to_string()
        };
        let gap = if text.is_empty() { "" } else { "   " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{gap}{name}: {shown}");
    }
    text
}

/// Percent with one digit that counts.
fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    if percent == 0.0 || percent >= 1.0 {
        return format!("{percent:.1} %");
    }
    let decimals = (-percent.log10().floor()).clamp(1.0, 9.0) as usize;
    format!("{percent:.decimals$} %")
}

/// A value as reports print it: whole numbers in full, shares with up to six decimals (so
/// that 0.99996 does not read as 1.00), others with three significant digits.
pub fn value_text(x: f64) -> String {
    let magnitude = x.abs();
    if x.fract() == 0.0 && magnitude < 1e9 {
        format!("{x}")
    } else if (1e-2..1.0).contains(&magnitude) {
        format!("{x:.6}").trim_end_matches('0').to_owned()
    } else if (1.0..1e4).contains(&magnitude) {
        format!("{x:.2}")
    } else {
        format!("{x:.2e}")
    }
}

fn six_digits(x: f64) -> String {
    let magnitude = x.abs();
    if x == 0.0 || !x.is_finite() {
        format!("{x}")
    } else if (1e-4..1e6).contains(&magnitude) {
        let decimals = (5.0 - magnitude.log10().floor()).clamp(0.0, 9.0) as usize;
        format!("{x:.decimals$}")
    } else {
        format!("{x:.5e}")
    }
}
