//! The gate files of the project themselves.

use m3_gate::{Date, GateFile, GateSet, parse_gates};
use std::fs;
use std::path::Path;

/// Expiry is judged by the harness on the day of a run; here only the form is.
const ANY_DAY: Date = Date {
    year: 2000,
    month: 1,
    day: 1,
};

/// The one file that belongs to no operation: the gates of a training run.
const RUN: &str = "run";

fn files() -> Vec<(String, GateFile)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gates");
    let entries = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let tables = entries.filter(|path| path.extension().is_some_and(|ext| ext == "toml"));
    let mut files: Vec<(String, GateFile)> = tables
        .map(|path| {
            let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let text = fs::read_to_string(&path).unwrap();
            let parsed = parse_gates(&format!("gates/{stem}.toml"), &text, ANY_DAY);
            (stem, parsed.unwrap_or_else(|error| panic!("{error}")))
        })
        .collect();
    files.sort_by(|a, b| a.0.cmp(&b.0));
    files
}

#[test]
fn every_gate_file_parses_and_ids_are_unique() {
    let files = files();
    assert!(!files.is_empty());
    GateSet::new(files.into_iter().map(|(_, file)| file)).unwrap();
}

#[test]
fn gates_of_an_op_carry_its_stem_and_judge_its_cases_alone() {
    let of_ops = files().into_iter().filter(|(stem, _)| stem != RUN);
    for (stem, file) in of_ops {
        for gate in &file.gates {
            assert!(
                gate.id.starts_with(&format!("{stem}.")),
                "{} in {stem}.toml",
                gate.id
            );
            let cases = gate.cases.text();
            for pattern in cases.split(',').filter(|pattern| !pattern.starts_with('!')) {
                assert!(
                    pattern.starts_with(&format!("{stem}::")),
                    "{}: {pattern}",
                    gate.id
                );
            }
        }
    }
}
