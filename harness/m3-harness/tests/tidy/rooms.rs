//! The arrows between the rooms, and the place of an operation in each.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use m3_harness::rooms::{self, PLACES};
use serde_json::Value;

use crate::repository::{none, root, texts};

/// What a crate may use of this workspace, by the longest matching prefix of its folder. Development and build
/// dependencies count: a test of the kernels that saw the reference would share the oracle with its subject.
const ARROWS: &[(&str, &[&str])] = &[
    ("reference/m3-spec", &[]),
    ("reference", &["reference/m3-spec"]),
    ("kernels", &["reference/m3-spec"]),
    ("stack", &["reference/m3-spec", "kernels", "stack"]),
    ("harness/m3-gate", &[]),
    ("harness/m3-report", &["harness/m3-gate"]),
    (
        "harness",
        &[
            "reference/m3-spec",
            "reference/m3-reference",
            "kernels",
            "stack",
            "harness",
        ],
    ),
    ("ci", &["harness/m3-gate", "harness/m3-report", "ci"]),
];

/// Packages from outside that have one place.
const OUTSIDE: &[(&str, &[&str])] = &[
    ("cudarc", &["kernels", "stack/m3-comm"]),
    ("tch", &["reference/m3-oracle"]),
];

struct Package {
    name: String,
    /// Folder from the root.
    folder: String,
    manifest: Value,
}

impl Package {
    /// Names of all dependencies, of every kind and target.
    fn dependencies(&self) -> impl Iterator<Item = &str> {
        let list = self.manifest["dependencies"]
            .as_array()
            .into_iter()
            .flatten();
        list.filter_map(|dependency| dependency["name"].as_str())
    }
}

fn metadata() -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let output = Command::new(cargo)
        .args([
            "metadata",
            "--format-version",
            "1",
            "--offline",
            "--no-deps",
        ])
        .current_dir(root())
        .output()
        .expect("cargo starts");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON")
}

fn packages() -> Vec<Package> {
    let metadata = metadata();
    let root = metadata["workspace_root"].as_str().unwrap().to_owned();
    let list = metadata["packages"].as_array().unwrap();
    list.iter()
        .map(|manifest| {
            let path = manifest["manifest_path"].as_str().unwrap();
            let folder = path
                .strip_prefix(&root)
                .unwrap()
                .trim_end_matches("Cargo.toml");
            Package {
                name: manifest["name"].as_str().unwrap().to_owned(),
                folder: folder.trim_matches(['/', '\\']).replace('\\', "/"),
                manifest: manifest.clone(),
            }
        })
        .collect()
}

fn below(folder: &str, prefix: &str) -> bool {
    folder
        .strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn arrows_of(folder: &str) -> Option<&'static [&'static str]> {
    let fitting = ARROWS.iter().filter(|(prefix, _)| below(folder, prefix));
    fitting
        .max_by_key(|(prefix, _)| prefix.len())
        .map(|(_, may)| *may)
}

#[test]
fn dependencies_point_one_way() {
    let packages = packages();
    let folders: BTreeMap<&str, &str> = packages
        .iter()
        .map(|p| (p.name.as_str(), p.folder.as_str()))
        .collect();
    let mut complaints = Vec::new();
    for package in &packages {
        let Some(may) = arrows_of(&package.folder) else {
            complaints.push(format!("{} lies in no room", package.folder));
            continue;
        };
        for name in package.dependencies() {
            let Some(target) = folders.get(name) else {
                continue;
            };
            if !may.iter().any(|prefix| below(target, prefix)) {
                complaints.push(format!(
                    "{} must not depend on {name} ({target})",
                    package.name
                ));
            }
        }
    }
    none(&complaints);
}

#[test]
fn reference_and_kernels_never_see_each_other_and_the_stack_sees_no_judge() {
    let may = |from: &str, to: &str| {
        arrows_of(from)
            .unwrap()
            .iter()
            .any(|prefix| below(to, prefix))
    };
    for (from, to) in [
        ("reference/m3-reference", "kernels"),
        ("kernels", "reference/m3-reference"),
        ("stack/m3-model", "reference/m3-reference"),
        ("stack/m3-model", "harness/m3-gate"),
        ("stack/m3-trainer", "harness/m3-harness"),
        ("harness/m3-gate", "kernels"),
        ("ci/m3-bot", "kernels"),
        ("ci/m3-bot", "stack/m3-model"),
    ] {
        assert!(!may(from, to), "{from} -> {to}");
    }
    assert!(may("stack/m3-model", "kernels") && may("harness/m3-harness", "stack/m3-model"));
}

#[test]
fn packages_from_outside_stand_in_their_place() {
    let mut complaints = Vec::new();
    for package in packages() {
        for name in package.dependencies() {
            let place = OUTSIDE.iter().find(|(outside, _)| *outside == name);
            if place.is_some_and(|(_, folders)| !folders.contains(&package.folder.as_str())) {
                complaints.push(format!("{name} has no place in {}", package.folder));
            }
        }
    }
    none(&complaints);
}

#[test]
fn every_crate_takes_lints_and_licence_from_the_workspace() {
    let mut complaints = Vec::new();
    for package in packages() {
        let path = root().join(&package.folder).join("Cargo.toml");
        let manifest: toml::Table = fs::read_to_string(path).unwrap().parse().unwrap();
        let from_workspace = |value: Option<&toml::Value>| {
            value.and_then(|v| v.get("workspace")?.as_bool()) == Some(true)
        };
        if !from_workspace(manifest.get("lints")) {
            complaints.push(format!(
                "{}: [lints] workspace = true is missing",
                package.folder
            ));
        }
        for key in ["edition", "rust-version", "license", "publish"] {
            if !from_workspace(manifest["package"].get(key)) {
                complaints.push(format!(
                    "{}: {key}.workspace = true is missing",
                    package.folder
                ));
            }
        }
    }
    none(&complaints);
}

fn stems(folder: &str, ending: &str) -> BTreeSet<String> {
    let names = fs::read_dir(root().join(folder)).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned());
    names
        .filter_map(|name| Some(name.strip_suffix(ending)?.to_owned()))
        .filter(|stem| stem != "mod")
        .collect()
}

#[test]
fn every_operation_has_its_file_in_every_room() {
    let ops = stems(rooms::SPEC_OPS, ".rs");
    let mut complaints = Vec::new();
    for place in PLACES.iter().filter(|place| place.required) {
        let paths = ops.iter().map(|op| rooms::path(place.pattern, op));
        let missing = paths.filter(|path| !root().join(path).is_file());
        complaints.extend(missing.map(|path| format!("{path} is missing")));
    }
    none(&complaints);
    let specified: BTreeSet<String> = m3_spec::ops::all().map(|op| op.name.to_owned()).collect();
    assert_eq!(
        ops,
        specified,
        "files of {} against ops::all()",
        rooms::SPEC_OPS
    );
}

/// The gate file of a training run.
const RUN: &str = "run";

/// Gate files that belong to no operation: those of a run and of the whole model.
const WHOLE: [&str; 2] = [RUN, "golden"];

#[test]
fn no_room_has_a_file_of_an_operation_that_does_not_exist() {
    let ops = stems(rooms::SPEC_OPS, ".rs");
    // The backends have files of their own beside those of the operations.
    let mut complaints = Vec::new();
    for (folder, ending) in [
        ("reference/m3-reference/src/ops", ".rs"),
        ("harness/gates", ".toml"),
    ] {
        let found = stems(folder, ending);
        let orphans = found
            .difference(&ops)
            .filter(|stem| !WHOLE.contains(&stem.as_str()));
        let say = |stem| format!("{folder}/{stem}{ending}: no such operation");
        complaints.extend(orphans.map(say));
    }
    none(&complaints);
}

#[test]
fn every_gate_file_of_an_operation_is_compiled_in() {
    let embedded: BTreeSet<&str> = m3_harness::gates::FILES
        .iter()
        .map(|(file, _)| *file)
        .collect();
    let files = texts(&[".toml"]);
    let files = files.iter().filter(|file| file.lies_in("harness/gates"));
    let mut files: BTreeSet<&str> = files.map(|file| &file.path["harness/".len()..]).collect();
    assert!(files.remove(format!("gates/{RUN}.toml").as_str()));
    assert_eq!(embedded, files);
}
