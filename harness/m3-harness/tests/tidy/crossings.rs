//! Who crosses from the device to the host. A crossing inside a step would stall the device and keep the step out of a
//! CUDA graph.

use crate::repository::{Text, none, texts};

/// Files of the stack that may upload, download or wait, with the reason. The harness stands on the host and has no list.
const CALLERS: &[(&str, &str)] = &[
    (
        "stack/m3-model/src/context.rs",
        "a pack's ids and boundaries, before its step",
    ),
    (
        "stack/m3-model/src/model.rs",
        "parameters, once, when a checkpoint is loaded",
    ),
    (
        "stack/m3-rollout/src/cache.rs",
        "the page table, before a batch",
    ),
    (
        "stack/m3-rollout/src/engine.rs",
        "sampling limits and rows up, sampled tokens down, batch by batch",
    ),
    (
        "stack/m3-rollout/src/sync.rs",
        "a seeded pattern before the first update, digests after every one",
    ),
    (
        "stack/m3-trainer/src/trainer.rs",
        "a batch before its step, loss and norms after it",
    ),
];

/// Words in the name of a file that holds a layer or an optimizer step. None of them is ever a caller.
const INSIDE_A_STEP: &[&str] = &[
    "attention",
    "layer",
    "linear",
    "mlp",
    "moe",
    "norm",
    "optimizer",
    "adamw",
    "schedule",
];

/// Calls that cross; the helpers of a tensor take the backend as their first argument.
fn crosses(line: &str) -> bool {
    let call = |name: &str| {
        line.match_indices(name).any(|(at, _)| {
            let rest = &line[at + name.len()..];
            let arguments = match rest
                .strip_prefix("::<")
                .and_then(|rest| rest.split_once('>'))
            {
                Some((_, arguments)) => arguments,
                None => rest,
            };
            arguments.starts_with('(') && !arguments.starts_with("()")
        })
    };
    [
        ".upload",
        ".download",
        ".sync",
        ".to_vec",
        "Tensor::from_slice",
    ]
    .iter()
    .any(|name| call(name))
}

/// The text without its unit tests, which stand last.
fn without_tests(file: &Text) -> &str {
    file.text.split("#[cfg(test)]").next().unwrap_or_default()
}

#[test]
fn only_listed_files_of_the_stack_cross_to_the_host() {
    let mut complaints = Vec::new();
    let files = texts(&[".rs"]);
    let judged = |file: &&Text| file.lies_in("stack") && file.path.contains("/src/");
    for file in files.iter().filter(judged) {
        let listed = CALLERS.iter().any(|(path, _)| *path == file.path);
        let found = without_tests(file).lines().position(crosses);
        match found {
            Some(line) if !listed => {
                complaints.push(format!("{}:{}: crosses to the host", file.path, line + 1));
            }
            None if listed => complaints.push(format!("{} no longer needs its entry", file.path)),
            _ => {}
        }
    }
    none(&complaints);
}

#[test]
fn no_layer_and_no_optimizer_is_listed() {
    let stands_inside = |path: &&str| {
        let name = path.rsplit('/').next().unwrap_or_default();
        INSIDE_A_STEP.iter().any(|word| name.contains(word))
    };
    let inside: Vec<&str> = CALLERS
        .iter()
        .map(|(path, _)| *path)
        .filter(stands_inside)
        .collect();
    assert!(inside.is_empty(), "{inside:?}");
}

#[test]
fn every_spelling_of_a_crossing_is_seen() {
    for line in [
        "backend.upload(stream, &slice.value, bytes)?;",
        "    .to_vec::<f32>(&backend, &stream)",
        "let n = loss.to_vec(&backend, &stream)?;",
        "backend.sync(&stream)?;",
        "Tensor::from_slice(backend, stream, values, shape)",
    ] {
        assert!(crosses(line), "{line}");
    }
    for line in [
        "names.to_vec()",
        "file.sync()?",
        "fn upload(&self)",
        "self.upload_bytes(1)",
    ] {
        assert!(!crosses(line), "{line}");
    }
}
