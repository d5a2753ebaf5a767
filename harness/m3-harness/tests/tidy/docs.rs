//! Documents that agree with what they describe.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use m3_gate::{Gate, Metric, parse_gates};
use m3_harness::today;

use crate::repository::{none, root, texts};

/// Around the tables of gates that README.md shows.
const MARKS: (&str, &str) = ("<!-- gates -->\n", "<!-- /gates -->");

#[test]
fn links_lead_to_files() {
    let mut complaints = Vec::new();
    for page in texts(&[".md"]) {
        let folder = root().join(&page.path).parent().unwrap().to_path_buf();
        for (number, line) in page.lines() {
            let targets = line
                .split("](")
                .skip(1)
                .filter_map(|rest| rest.split(')').next());
            for target in
                targets.filter(|target| !target.contains("://") && !target.starts_with('#'))
            {
                let file = target.split('#').next().unwrap_or_default();
                if !folder.join(file).exists() {
                    complaints.push(format!("{}:{number}: {target} does not exist", page.path));
                }
            }
        }
    }
    none(&complaints);
}

#[test]
fn every_decision_record_is_linked_from_the_architecture() {
    let architecture = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut numbers = BTreeSet::new();
    for page in texts(&[".md"])
        .iter()
        .filter(|page| page.lies_in("docs/adr"))
    {
        assert!(
            architecture.contains(&page.path),
            "ARCHITECTURE.md does not link {}",
            page.path
        );
        let number = page.path["docs/adr/".len()..]
            .split('-')
            .next()
            .unwrap_or_default();
        assert!(
            numbers.insert(number.to_owned()),
            "{}: number {number} is taken",
            page.path
        );
    }
    assert!(!numbers.is_empty());
}

/// The gates of one file, or of all files but that one, as `harness/gates` has them.
fn gates_of(wanted: impl Fn(&str) -> bool) -> Vec<Gate> {
    let texts = texts(&[".toml"]);
    let files = texts.iter().filter(|file| file.lies_in("harness/gates"));
    files
        .filter(|file| wanted(&file.path))
        .map(|file| parse_gates(&file.path, &file.text, today()))
        .flat_map(|parsed| parsed.unwrap_or_else(|error| panic!("{error}")).gates)
        .collect()
}

/// Position of the metric, bound, storage, source.
type Row = (usize, String, String, String);

/// Equal bounds with equal reasons are one row; the operations that share it.
fn rows(gates: &[Gate]) -> BTreeMap<Row, BTreeSet<&str>> {
    let mut rows: BTreeMap<Row, BTreeSet<&str>> = BTreeMap::new();
    for gate in gates {
        let place = Metric::ALL.iter().position(|known| *known == gate.metric);
        let storage = match gate.dtype.text().as_str() {
            "*" => "any".to_owned(),
            dtype => dtype.to_owned(),
        };
        let (bound, source) = bound_and_source(gate);
        let row = (place.unwrap_or(usize::MAX), bound, storage, source);
        rows.entry(row)
            .or_default()
            .extend(gate.id.split('.').next());
    }
    rows
}

fn bound_and_source(gate: &Gate) -> (String, String) {
    let metric = gate.metric.name();
    match (&gate.limit, &gate.band) {
        (Some(limit), _) => {
            let (relation, bound) = (limit.op.name(), &limit.literal);
            let source = limit.source.to_string();
            (format!("`{metric}` {relation} {bound}"), source)
        }
        (None, Some(band)) => {
            let bound = format!("`{metric}` within {} of its history", band.rel);
            (bound, band.source.to_string())
        }
        (None, None) => unreachable!("the parser refuses a gate that judges nothing"),
    }
}

fn tables() -> String {
    let run = |path: &str| path.ends_with("/run.toml");
    let mut text =
        String::from("| bound | storage | source of the bound | operations |\n|---|---|---|---|\n");
    for ((_, bound, storage, source), ops) in rows(&gates_of(|path| !run(path))) {
        let ops = ops.into_iter().collect::<Vec<_>>().join(", ");
        text += &format!("| {bound} | {storage} | {} | {ops} |\n", cell(&source));
    }
    text += "\nOf a training run:\n\n| gate | bound | source of the bound |\n|---|---|---|\n";
    for gate in gates_of(run) {
        let (bound, source) = bound_and_source(&gate);
        text += &format!("| {} | {bound} | {} |\n", gate.id, cell(&source));
    }
    text
}

/// Text for a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

#[test]
fn the_readme_shows_every_bound_with_its_source() {
    let path = root().join("README.md");
    let readme = fs::read_to_string(&path).unwrap();
    let parts = readme.split_once(MARKS.0).and_then(|(before, rest)| {
        let (shown, after) = rest.split_once(MARKS.1)?;
        Some((before, shown, after))
    });
    let (before, shown, after) = parts.expect("README.md has both marks, in order");
    let wanted = tables();
    if shown == wanted {
        return;
    }
    let rewrite = std::env::var_os("M3_UPDATE").is_some() && std::env::var_os("CI").is_none();
    assert!(
        rewrite,
        "the tables of gates are stale; M3_UPDATE=1 ci/test -p m3-harness the_readme_shows rewrites them"
    );
    fs::write(path, [before, MARKS.0, &wanted, MARKS.1, after].concat()).unwrap();
}
