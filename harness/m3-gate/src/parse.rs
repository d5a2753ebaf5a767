//! Gate files: TOML text to gates, refusing everything that is not meant.

mod fault;
mod fields;

use crate::band::Band;
use crate::gate::{Floor, Gate, GateFile, Limit, Op, Waiver};
use crate::glob::Patterns;
use crate::metrics::Metric;
use crate::source::{Date, Source};
use crate::verdict::Severity;
pub use fault::{GateError, GateFault};
use fields::{Fields, File};
use std::collections::BTreeMap;

const GATE_KEYS: &[&str] = &[
    "id", "tensor", "metric", "op", "bound", "cases", "arch", "dtype", "severity", "source",
    "floor", "small", "band",
];
const BAND_KEYS: &[&str] = &[
    "rel",
    "floor",
    "history_min",
    "severity",
    "promoted",
    "source",
];
const WAIVER_KEYS: &[&str] = &["gate", "cases", "issue", "until", "why"];
const SOURCE_KINDS: &[&str] = &["analytic", "seed", "literature", "measured"];

/// Parses one gate file. `file` is the name that errors and failure blocks print; `today` expires
/// measurements and waivers.
///
/// # Errors
/// The first [`GateError`] in the order of the file.
pub fn parse_gates(file: &str, text: &str, today: Date) -> Result<GateFile, GateError> {
    let file = File {
        name: file,
        text,
        today,
    };
    let document = file.parse()?;
    let top = Fields::new(&file, "the file".to_owned(), &document, 0..text.len());
    top.refuse_unknown(&["gate", "waiver"])?;
    let mut parsed = GateFile::default();
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    for table in top.tables("gate")? {
        let gate = gate(&table)?;
        if let Some(first) = seen.insert(gate.id.clone(), gate.at.clone()) {
            return Err(table.fault(GateFault::DuplicateId { id: gate.id, first }));
        }
        parsed.gates.push(gate);
    }
    for table in top.tables("waiver")? {
        parsed.waivers.push(waiver(&table, &seen)?);
    }
    Ok(parsed)
}

fn gate(table: &Fields<'_>) -> Result<Gate, GateError> {
    table.refuse_unknown(GATE_KEYS)?;
    let id = table.string("id")?;
    let id = table.need(
        id,
        "id",
        "it names the gate in reports: id = \"msa_attention.o.rms\"",
    )?;
    let table = table.named(format!("gate `{id}`"));
    let names: Vec<&str> = Metric::ALL.iter().map(|m| m.name()).collect();
    let metric = table.word("metric", &names)?;
    let metric = table.need(
        metric,
        "metric",
        "say what is measured: metric = \"norm_rel\"",
    )?;
    let metric = Metric::ALL[metric];
    let limit = limit(&table, &id, metric)?;
    let band = match table.table("band")? {
        Some(band_table) => Some(band(&band_table, &id)?),
        None => None,
    };
    if limit.is_none() && band.is_none() {
        return Err(table.fault(GateFault::JudgesNothing { id }));
    }
    let floor = floor(&table, &id, metric)?;
    let small = table.string("small")?;
    refuse_misplaced(
        &table,
        &id,
        "small",
        small.is_some() && !metric.needs_twin(),
        metric,
    )?;
    Ok(Gate {
        tensor: tensor(&table, &id, metric)?,
        metric,
        limit,
        band,
        cases: table.need(
            table.patterns("cases")?,
            "cases",
            "say which: cases = \"op::*\"",
        )?,
        arch: table.patterns("arch")?.unwrap_or_else(Patterns::any),
        dtype: table.patterns("dtype")?.unwrap_or_else(Patterns::any),
        floor,
        small,
        at: table.at(),
        id,
    })
}

fn tensor(table: &Fields<'_>, id: &str, metric: Metric) -> Result<Option<Patterns>, GateError> {
    let tensor = table.patterns("tensor")?;
    if metric == Metric::Value {
        refuse_misplaced(table, id, "tensor", tensor.is_some(), metric)?;
        return Ok(None);
    }
    table
        .need(tensor, "tensor", "say which it judges: tensor = \"o\"")
        .map(Some)
}

fn refuse_misplaced(
    table: &Fields<'_>,
    id: &str,
    key: &'static str,
    misplaced: bool,
    metric: Metric,
) -> Result<(), GateError> {
    if !misplaced {
        return Ok(());
    }
    let hint = match key {
        "tensor" => "a value is handed in by the caller",
        "floor" => "max_rel, norm_rel, rms_ratio and err_ratio take it",
        _ => "only the ratios to the twin's error take it",
    };
    let fault = GateFault::Misplaced {
        id: id.to_owned(),
        key,
        metric: metric.name(),
        hint,
    };
    Err(table.fault_at(key, fault))
}

fn limit(table: &Fields<'_>, id: &str, metric: Metric) -> Result<Option<Limit>, GateError> {
    let op = table.word("op", &["<=", ">=", "=="])?;
    let severity = severity(table)?;
    let bound = table.number("bound")?;
    let Some((bound, literal)) = bound else {
        if op.is_some() || severity.is_some() || table.has("source") {
            return Err(table.missing("bound", "a relation, severity or source needs its bound"));
        }
        return Ok(None);
    };
    let op = table.need(op, "op", "say how the bound binds: op = \"<=\"")?;
    let op = [Op::Le, Op::Ge, Op::Eq][op];
    if let Some(why) = pointless(metric, op, bound) {
        let (metric, op, bound) = (metric.name(), op.name(), literal);
        let fault = GateFault::Pointless {
            id: id.to_owned(),
            metric,
            op,
            bound,
            why,
        };
        return Err(table.fault_at("bound", fault));
    }
    let source = source(table)?;
    let severity = severity.unwrap_or(Severity::Block);
    Ok(Some(Limit {
        op,
        bound,
        literal,
        severity,
        source,
    }))
}

/// Bounds that hold for any result, or for none.
fn pointless(metric: Metric, op: Op, bound: f64) -> Option<&'static str> {
    if !bound.is_finite() {
        return Some("is no bound: it must be a finite number");
    }
    match (metric, op) {
        (Metric::Value, _) => None,
        (Metric::AgreeRate, Op::Le) => Some("asks for disagreement; use >="),
        (Metric::AgreeRate, _) if !(bound > 0.0 && bound <= 1.0) => {
            Some("is outside of what a share can be asked for: above 0, at most 1")
        }
        (Metric::AgreeRate, _) => None,
        (_, Op::Ge) => Some("asks for an error; use <="),
        (_, _) if bound < 0.0 => Some("can never hold: an error is not negative"),
        _ => None,
    }
}

fn severity(table: &Fields<'_>) -> Result<Option<Severity>, GateError> {
    let word = table.word("severity", &["block", "shadow"])?;
    Ok(word.map(|i| [Severity::Block, Severity::Shadow][i]))
}

fn floor(table: &Fields<'_>, id: &str, metric: Metric) -> Result<Option<Floor>, GateError> {
    let Some(floor) = table.table("floor")? else {
        return Ok(None);
    };
    refuse_misplaced(table, id, "floor", !metric.takes_floor(), metric)?;
    floor.refuse_unknown(&["abs", "why"])?;
    let abs = floor.positive("abs")?;
    let abs = floor.need(
        abs,
        "abs",
        "the error granted, in the tensor's unit: abs = 1e-6",
    )?;
    let why = floor.string("why")?;
    let why = floor.need(why, "why", "say why this much is granted: why = \"...\"")?;
    Ok(Some(Floor { abs, why }))
}

fn band(table: &Fields<'_>, id: &str) -> Result<Band, GateError> {
    table.refuse_unknown(BAND_KEYS)?;
    let severity = severity(table)?.unwrap_or(Severity::Shadow);
    if severity == Severity::Block && table.string("promoted")?.is_none() {
        return Err(table.fault(GateFault::BandNotPromoted { id: id.to_owned() }));
    }
    let rel = table.positive("rel")?;
    let floor = table.positive("floor")?;
    let history_min = table.count("history_min")?;
    let need_history = "trusted values needed before it judges: history_min = 10";
    Ok(Band {
        rel: table.need(rel, "rel", "half-width by the median: rel = 0.05")?,
        floor: table.need(
            floor,
            "floor",
            "half-width it never falls below: floor = 1e-3",
        )?,
        history_min: table.need(history_min, "history_min", need_history)? as usize,
        severity,
        source: source(table)?,
    })
}

fn waiver(table: &Fields<'_>, gates: &BTreeMap<String, String>) -> Result<Waiver, GateError> {
    table.refuse_unknown(WAIVER_KEYS)?;
    let gate = table.string("gate")?;
    let gate = table.need(gate, "gate", "say which gate it excuses: gate = \"id\"")?;
    let table = table.named(format!("the waiver of `{gate}`"));
    if !gates.contains_key(&gate) {
        let ids: Vec<&str> = gates.keys().map(String::as_str).collect();
        let hint = fields::meant(&gate, &ids).unwrap_or_else(|| "remove the waiver".to_owned());
        return Err(table.fault_at("gate", GateFault::WaiverOfUnknownGate { gate, hint }));
    }
    let issue = table.string("issue")?;
    let issue = table.need(
        issue,
        "issue",
        "name where it is being mended: issue = \"...\"",
    )?;
    let until = table.date("until")?;
    let until = table.need(until, "until", "a waiver ends: until = 2027-01-31")?;
    if until < table.today() {
        let today = table.today();
        let fault = GateFault::ExpiredWaiver {
            gate,
            issue,
            until,
            today,
        };
        return Err(table.fault_at("until", fault));
    }
    let cases = table.patterns("cases")?;
    let cases = table.need(cases, "cases", "say which it excuses: cases = \"op::*\"")?;
    Ok(Waiver {
        gate,
        cases,
        issue,
        until,
        at: table.at(),
    })
}

fn source(parent: &Fields<'_>) -> Result<Source, GateError> {
    let Some(table) = parent.table("source")? else {
        return Err(parent.fault(GateFault::NoSource {
            table: parent.name().to_owned(),
        }));
    };
    let kind = table.word("kind", SOURCE_KINDS)?;
    let kind = table.need(kind, "kind", "one of analytic, seed, literature, measured")?;
    let keys: &[&str] = [
        &["kind", "why"][..],
        &["kind", "doc", "why"],
        &["kind", "cite", "why"],
        &["kind", "commit", "device", "n", "rule", "until"],
    ][kind];
    table.refuse_unknown(keys)?;
    let need = |key: &'static str, hint| table.need(table.string(key)?, key, hint);
    match SOURCE_KINDS[kind] {
        "analytic" => Ok(Source::Analytic {
            why: need("why", "the derivation in a sentence")?,
        }),
        "seed" => Ok(Source::Seed {
            doc: need("doc", "the document and the place in it")?,
            why: table.string("why")?,
        }),
        "literature" => Ok(Source::Literature {
            cite: need("cite", "the full reference")?,
            why: table.string("why")?,
        }),
        _ => measured(parent, &table),
    }
}

fn measured(parent: &Fields<'_>, table: &Fields<'_>) -> Result<Source, GateError> {
    let need = |key: &'static str, hint| table.need(table.string(key)?, key, hint);
    let until = table.date("until")?;
    let until = table.need(until, "until", "a measurement ends: until = 2027-01-31")?;
    if until < table.today() {
        let (name, today) = (parent.name().to_owned(), table.today());
        let fault = GateFault::ExpiredMeasurement {
            table: name,
            until,
            today,
        };
        return Err(table.fault_at("until", fault));
    }
    Ok(Source::Measured {
        commit: need("commit", "the commit that was measured")?,
        device: need("device", "the device that it was measured on")?,
        n: table.need(table.count("n")?, "n", "the number of samples")?,
        rule: need("rule", "how the bound follows: rule = \"p99.9 x 1.5\"")?,
        until,
    })
}
