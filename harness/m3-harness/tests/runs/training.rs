//! A whole run: it learns behind its gates, its seed repeats it, and its sparse layers are alive.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use m3_harness::logprobs::{self, Request, Side};
use m3_harness::train::recipe::Recipe;
use m3_harness::train_pipeline::{self, Options, Outcome};
use m3_kernels::cpu::CpuBackend;
use m3_spec::dtype::DType;
use serde_json::Value;

fn train(backend: &CpuBackend, out: &Path, steps: usize, seed: u64) -> Outcome {
    let mut recipe = Recipe::echo().unwrap();
    recipe.train.steps = steps;
    let options = Options {
        out: out.into(),
        seed,
    };
    train_pipeline::run(backend, &recipe, &options, &mut |_, _| {}).unwrap()
}

/// Lines of `metrics.jsonl` without what may differ.
fn metrics(out: &Path) -> Vec<BTreeMap<String, Value>> {
    let text = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let line = |line: &str| {
        let mut object: BTreeMap<String, Value> = serde_json::from_str(line).unwrap();
        object.retain(|name, _| !name.starts_with("perf/"));
        object
    };
    text.lines().map(line).collect()
}

#[test]
fn the_echo_run_learns_behind_its_gates_and_its_sparse_path_is_alive() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let backend = CpuBackend::default();
    let outcome = train(&backend, &out, 60, 1);
    assert!(outcome.gates.is_green(), "{}", outcome.gates.table());
    assert!(outcome.best_blind_reward < 0.2);
    let verdicts: Value =
        serde_json::from_str(&fs::read_to_string(out.join("verdicts.json")).unwrap()).unwrap();
    assert_eq!(verdicts["schema"], 1);
    let gates: Vec<&str> = verdicts["verdicts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["gate"].as_str().unwrap())
        .collect();
    for gate in [
        "weights_equal",
        "logprob_gap",
        "kl_k3",
        "ppo_kl_first",
        "grad_norm",
        "changed_words",
        "weight_version",
        "route_overlap",
        "reward",
    ] {
        assert!(gates.contains(&gate), "{gate} is not among the verdicts");
    }
    assert_eq!(
        gates
            .iter()
            .filter(|&&gate| gate == "weights_equal")
            .count(),
        61
    );
    moved_by_other_blocks(&backend, dir.path());
}

/// Forces another block than the own one where there is a choice, and looks at how far log-probs move.
fn moved_by_other_blocks(backend: &CpuBackend, dir: &Path) {
    let tokens = dir.join("tokens.json");
    fs::write(
        &tokens,
        r#"{"input_ids": [0, 5, 1, 9, 3, 14, 7, 2, 11, 6, 13, 4, 10, 8, 12, 15]}"#,
    )
    .unwrap();
    let dump = dir.join("dump.safetensors");
    let request = Request {
        side: Side::Trainer,
        model: dir.join("run/checkpoint"),
        tokens,
        dtype: DType::BF16,
        temperature: 1.0,
        backward: false,
        recompute: false,
        dump: Some(dump.clone()),
        replay: None,
        json: None,
    };
    let own = logprobs::run(backend, &request).unwrap();
    let bytes = fs::read(&dump).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut forced = Vec::new();
    for (name, view) in file
        .tensors()
        .into_iter()
        .filter(|(name, _)| name.starts_with("blocks."))
    {
        let shape = view.shape().to_vec();
        let ids = view
            .data()
            .chunks_exact(4)
            .map(|b| i32::from_le_bytes(b.try_into().unwrap()));
        let mut ids: Vec<i32> = ids.collect();
        for (number, row) in ids.chunks_exact_mut(shape[2]).enumerate() {
            let own_block = (number % shape[1]) as i32 / 4;
            // Two of the blocks before the own one, spread by the row's number.
            if own_block >= 2 {
                let first = number as i32 % (own_block - 1);
                row.copy_from_slice(&[first, first + 1]);
            }
        }
        let data: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        forced.push((name, shape, data));
    }
    let views = forced.iter().map(|(name, shape, data)| {
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::I32, shape.clone(), data);
        (name.as_str(), view.unwrap())
    });
    let replay = dir.join("replay.safetensors");
    fs::write(&replay, safetensors::serialize(views, None).unwrap()).unwrap();
    let request = Request {
        dump: None,
        replay: Some(replay),
        ..request
    };
    let other = logprobs::run(backend, &request).unwrap();
    let pairs = own.sequences[0]
        .logprobs
        .iter()
        .zip(&other.sequences[0].logprobs);
    let moved: Vec<f32> = pairs.map(|(a, b)| (a - b).abs()).collect();
    assert!(
        moved.iter().any(|&by| by > 1e-3),
        "log-probs moved by {moved:?}"
    );
}

#[test]
fn a_seed_repeats_a_run_whatever_the_threads_and_another_seed_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, threads: usize, seed: u64| {
        let out = dir.path().join(name);
        train(&CpuBackend::new(threads).unwrap(), &out, 3, seed);
        metrics(&out)
    };
    let first = run("first", 2, 4);
    assert_eq!(first.len(), 3);
    assert!(first == run("again", 2, 4));
    assert!(first == run("one-thread", 1, 4));
    assert!(first != run("other", 2, 5));
}

#[test]
fn what_is_frozen_keeps_its_bits_and_everything_trained_moves() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    train(&CpuBackend::default(), &out, 2, 6);
    let open = |name: &str| m3_checkpoint::Checkpoint::open(out.join(name)).unwrap();
    let (before, after) = (open("initial"), open("checkpoint"));
    for spec in before.specs() {
        let (old, new) = (
            before.tensor(&spec.name).unwrap(),
            after.tensor(&spec.name).unwrap(),
        );
        assert_eq!(old.bytes != new.bytes, spec.trained, "{}", spec.name);
    }
}

#[test]
fn recomputed_activations_train_to_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let run = |recompute: bool| {
        let mut recipe = Recipe::echo().unwrap();
        recipe.train.steps = 2;
        recipe.train.recompute = recompute;
        recipe.train.max_tokens = 700;
        let options = Options {
            out: dir.path().join(recompute.to_string()),
            seed: 2,
        };
        let backend = CpuBackend::default();
        train_pipeline::run(&backend, &recipe, &options, &mut |_, _| {}).unwrap();
        fs::read(options.out.join("checkpoint/model.safetensors")).unwrap()
    };
    assert!(run(false) == run(true));
}
