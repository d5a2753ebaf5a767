//! A self-contained page of a gate run: no script, no font, no address but its own.

use crate::{GateRun, word};
use m3_gate::record::{CaseRecord, Device, VerdictRecord};
use m3_gate::{UlpHistogram, Verdict, failure_block, value_text};

const STYLE: &str = "\
body{font:15px/1.45 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}\
table{border-collapse:collapse;width:100%}td,th{padding:.2rem .6rem;text-align:left;border-bottom:1px solid #ddd}\
pre{background:#f6f6f4;padding:.8rem;overflow-x:auto;font-size:13px}\
.PASS{color:#186a3b}.FAIL,.ERROR{color:#b03a2e;font-weight:600}.WAIVED,.INACTIVE,.SKIP{color:#7d6608}\
.bar{fill:#5d6d7e}.num{text-align:right;font-variant-numeric:tabular-nums}summary{cursor:pointer}";

/// The page: summary, failures with their ulp histograms, then every case with its gates.
pub fn html(report: &GateRun) -> String {
    let run = &report.run;
    let Device {
        name,
        arch,
        driver,
        cuda,
    } = &run.device;
    let mut machine = format!("{name} ({arch})");
    for (what, version) in [("driver", driver), ("CUDA", cuda)] {
        if let Some(version) = version {
            machine += &format!(", {what} {version}");
        }
    }
    let about = format!(
        "run {} · commit {} · {} · seed 0x{:x} · tier {} · {machine}",
        run.id, run.commit, run.started_utc, run.seed, run.tier
    );
    let failures: String = report.cases.iter().filter_map(failure).collect();
    let cases: String = report.cases.iter().map(case).collect();
    let summary = report.summary().text();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <title>Gates: {title}</title><style>{STYLE}</style></head><body>\n\
         <h1>Gates</h1>\n<p>{title}</p>\n<p>{about}</p>\n{failures}<h2>Cases</h2>\n{cases}</body></html>\n",
        title = escape(&summary),
        about = escape(&about),
    )
}

fn failure(case: &CaseRecord) -> Option<String> {
    let block = failure_block(case)?;
    let red = case
        .verdicts
        .iter()
        .filter(|v| matches!(v.verdict, Verdict::Fail | Verdict::Error));
    let evidence = red.filter_map(|v| v.evidence.as_ref()).next();
    let histogram = evidence.map_or_else(String::new, |evidence| bars(&evidence.ulp));
    Some(format!(
        "<h2 class=\"{word}\">{word} {name}</h2>\n<pre>{block}</pre>\n{histogram}",
        word = word(case),
        name = escape(&case.case),
        block = escape(&block),
    ))
}

/// Distances in representable values, on a logarithmic scale so that a single element shows.
fn bars(h: &UlpHistogram) -> String {
    const WIDTH: f64 = 360.0;
    let buckets = [
        ("0", h.zero),
        ("1", h.one),
        ("2", h.two),
        ("3-4", h.three_to_four),
        ("5+", h.five_up),
    ];
    let logs = buckets.map(|(_, count)| (1.0 + count as f64).log10());
    let top = logs
        .iter()
        .fold(1.0, |top: f64, &log| if log > top { log } else { top });
    let mut rows = String::new();
    for (i, ((name, count), log)) in buckets.iter().zip(logs).enumerate() {
        let (y, width) = (18 * i, WIDTH * log / top);
        rows += &format!(
            "<text x=\"0\" y=\"{}\">{name}</text>\
             <rect class=\"bar\" x=\"40\" y=\"{y}\" width=\"{width:.1}\" height=\"14\"/>\
             <text x=\"{:.1}\" y=\"{}\">{count}</text>",
            y + 12,
            46.0 + width,
            y + 12
        );
    }
    format!(
        "<figure><svg width=\"520\" height=\"92\" font-size=\"12\" role=\"img\">{rows}</svg>\
         <figcaption>elements by distance in representable values (log scale)</figcaption></figure>\n"
    )
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
         <p>seed 0x{:x}, inputs {}</p>\n<table><tr><th>verdict</th><th>gate</th><th class=\"num\">value</th>\
         <th>bound</th><th class=\"num\">used</th><th>source</th><th>at</th></tr>\n{rows}</table></details>\n",
        case.seed,
        escape(&case.inputs_digest),
    )
}

fn verdict_row(v: &VerdictRecord) -> String {
    let value = v.value.map_or_else(|| "none".to_owned(), value_text);
    let op = v.op.map_or("", |op| op.name());
    let used = v
        .bound_used()
        .map_or_else(String::new, |used| format!("{used:.2}"));
    let shadow = if v.severity == m3_gate::Severity::Shadow {
        " (shadow)"
    } else {
        ""
    };
    let note = v
        .note
        .as_ref()
        .map_or_else(String::new, |note| format!(" — {}", escape(note)));
    format!(
        "<tr><td class=\"{verdict}\">{verdict}{shadow}</td><td>{label}{note}</td><td class=\"num\">{value}</td>\
         <td>{op} {bound}</td><td class=\"num\">{used}</td><td>{source}</td><td>{at}</td></tr>\n",
        verdict = v.verdict.name(),
        label = escape(&v.label()),
        op = escape(op),
        bound = escape(&v.bound_text),
        source = escape(&v.source),
        at = escape(&v.at),
    )
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            _ => escaped.push(c),
        }
    }
    escaped
}
