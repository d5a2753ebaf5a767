//! The page of a gate run.

use crate::page::{escape, page};
use crate::plot::histogram;
use crate::{GateRun, word};
use m3_gate::record::{CaseRecord, Device, VerdictRecord};
use m3_gate::{Severity, Verdict, failure_block, value_text};

/// The page: summary, failures with their ulp histograms, then every case with its gates.
pub fn html(report: &GateRun) -> String {
    let run = &report.run;
    let about = format!(
        "run {} · commit {} · {} · seed 0x{:x} · tier {} · {}",
        run.id,
        run.commit,
        run.started_utc,
        run.seed,
        run.tier,
        machine(&run.device)
    );
    let failures: String = report.cases.iter().filter_map(failure).collect();
    let cases: String = report.cases.iter().map(case).collect();
    let summary = report.summary().text();
    let (title, about) = (escape(&summary), escape(&about));
    let body = format!(
        "<h1>Gates</h1>\n<p>{title}</p>\n<p>{about}</p>\n{failures}<h2>Cases</h2>\n{cases}"
    );
    page(&format!("Gates: {summary}"), "", &body)
}

/// `H200 (sm_90a), driver …, CUDA …`.
pub(crate) fn machine(device: &Device) -> String {
    let Device {
        name,
        arch,
        driver,
        cuda,
    } = device;
    let mut machine = if name.starts_with(arch.as_str()) {
        name.clone()
    } else {
        format!("{name} ({arch})")
    };
    for (what, version) in [("driver", driver), ("CUDA", cuda)] {
        if let Some(version) = version {
            machine += &format!(", {what} {version}");
        }
    }
    machine
}

fn failure(case: &CaseRecord) -> Option<String> {
    let block = failure_block(case)?;
    let red = case
        .verdicts
        .iter()
        .filter(|v| matches!(v.verdict, Verdict::Fail | Verdict::Error));
    let evidence = red.filter_map(|v| v.evidence.as_ref()).next();
    let histogram = evidence.map_or_else(String::new, |evidence| histogram(&evidence.ulp));
    Some(format!(
        "<h2 class=\"{word}\">{word} {name}</h2>\n<pre>{block}</pre>\n{histogram}",
        word = word(case),
        name = escape(&case.case),
        block = escape(&block),
    ))
}

fn case(case: &CaseRecord) -> String {
    let word = word(case);
    let about = match &case.skipped {
        Some(why) => escape(why),
        None => format!("{} gates, {} ms", case.verdicts.len(), case.duration_ms),
    };
    let rows: String = case.verdicts.iter().map(verdict_row).collect();
    let name = escape(&case.case);
    format!(
        "<details><summary><span class=\"{word}\">{word}</span> {name} — {about}</summary>\n\
         <p>seed 0x{:x}, inputs {}</p>\n<div class=\"scroll\"><table><tr><th>verdict</th><th>gate</th><th class=\"num\">value</th>\
         <th>bound</th><th class=\"num\">used</th><th>source</th><th>at</th></tr>\n{rows}</table></div></details>\n",
        case.seed,
        escape(&case.inputs_digest),
    )
}

fn verdict_row(v: &VerdictRecord) -> String {
    let value = value_of(v);
    let used = v
        .bound_used()
        .map_or_else(String::new, |used| format!("{used:.2}"));
    let note = v
        .note
        .as_ref()
        .map_or_else(String::new, |note| format!(" — {}", escape(note)));
    format!(
        "<tr><td>{word}</td><td>{label}{note}</td><td class=\"num\">{value}</td>\
         <td>{bound}</td><td class=\"num\">{used}</td><td>{source}</td><td>{at}</td></tr>\n",
        word = verdict_word(v.verdict, v.severity),
        label = escape(&v.label()),
        bound = escape(&bound_of(v)),
        source = escape(&v.source),
        at = escape(&v.at),
    )
}

/// The verdict's word in its colour, with its weight where that turns nothing red.
pub(crate) fn verdict_word(verdict: Verdict, severity: Severity) -> String {
    let shadow = match severity {
        Severity::Shadow => " <span class=\"muted\">(shadow)</span>",
        Severity::Block => "",
    };
    let word = verdict.name();
    format!("<span class=\"{word}\">{word}</span>{shadow}")
}

/// What was measured, or `none`.
pub(crate) fn value_of(v: &VerdictRecord) -> String {
    v.value.map_or_else(|| "none".to_owned(), value_text)
}

/// `<= 5e-3`, or a band as the record spells it.
pub(crate) fn bound_of(v: &VerdictRecord) -> String {
    match v.op {
        Some(op) => format!("{} {}", op.name(), v.bound_text),
        None if v.bound_text.is_empty() => "a band".to_owned(),
        None => v.bound_text.clone(),
    }
}
