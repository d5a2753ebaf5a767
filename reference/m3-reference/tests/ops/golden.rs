//! The whole model against recordings of Hugging Face transformers: log-probabilities, choices, every gradient.
//!
//! The recordings are fp32 and the reading here is exact, so the bounds are those of fp32 through a whole model.

use crate::check::assert_close;
use m3_reference::Rounding;
use m3_reference::layers::attention::Pack;
use m3_reference::math::{dot, sequences};
use m3_reference::model::{self, Mlp, Replay, Weights};
use m3_spec::config::{Config, TextConfig};
use m3_spec::rope::RotaryTable;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;

/// |log-prob difference|, natural log. Largest seen 1.4e-6: the fp32 rounding of transformers through up to four layers.
const LOG_PROB_BOUND: f64 = 5e-6;
/// ‖g − golden‖ / ‖golden‖ of each weight. Largest seen below 3e-6.
const GRADIENT_BOUND: f64 = 1e-5;
/// |difference| of the routing weights, which are fp32 and at most 1.
const EXPERT_WEIGHT_BOUND: f64 = 2e-6;

const GOLDENS: [&str; 9] = [
    "basic",
    "interleaved",
    "all_sparse",
    "block128",
    "block128_theta1e7",
    "one_kv_head",
    "odd_constants",
    "no_sparse",
    "wide_dense",
];

fn golden_dir() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden"))
}

fn read(path: &str) -> Vec<u8> {
    let path = golden_dir().join(path);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// All float tensors as f64 and all integer tensors.
fn tensors(path: &str) -> (Weights, BTreeMap<String, Vec<i32>>) {
    let bytes = read(path);
    let (mut floats, mut ids) = (Weights::new(), BTreeMap::new());
    for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().iter() {
        let data = tensor.data();
        let words = || {
            data.chunks_exact(4)
                .map(|b| <[u8; 4]>::try_from(b).unwrap())
        };
        match tensor.dtype() {
            Dtype::F32 => {
                let values = words().map(|b| f64::from(f32::from_le_bytes(b)));
                floats.insert(name.to_string(), values.collect());
            }
            Dtype::BF16 => {
                let values = data
                    .chunks_exact(2)
                    .map(|b| f32::from_le_bytes([0, 0, b[0], b[1]]));
                floats.insert(name.to_string(), values.map(f64::from).collect());
            }
            Dtype::I32 => {
                ids.insert(name.to_string(), words().map(i32::from_le_bytes).collect());
            }
            other => panic!("{path}: {name} is {other:?}"),
        }
    }
    (floats, ids)
}

/// The next token of the own sequence; the last one is not scored.
fn next_tokens(ids: &[i32], cu_seqlens: &[i32]) -> Vec<i32> {
    let mut targets = vec![-1; ids.len()];
    for sequence in sequences(cu_seqlens).filter(|sequence| !sequence.is_empty()) {
        let next = sequence.start + 1..sequence.end;
        targets[sequence.start..sequence.end - 1].copy_from_slice(&ids[next]);
    }
    targets
}

/// A checkpoint, its tokens, and what transformers made of them.
struct Golden {
    name: &'static str,
    config: TextConfig,
    weights: Weights,
    floats: Weights,
    choices: BTreeMap<String, Vec<i32>>,
    positions: Vec<i32>,
    targets: Vec<i32>,
    table: RotaryTable,
}

impl Golden {
    fn read(name: &'static str) -> Self {
        let json = String::from_utf8(read(&format!("checkpoints/{name}/config.json"))).unwrap();
        let config = Config::from_json(&json).unwrap().text;
        let (weights, _) = tensors(&format!("checkpoints/{name}/model.safetensors"));
        let (floats, choices) = tensors(&format!("transformers/{name}.safetensors"));
        let (ids, cu_seqlens) = (&choices["input_ids"], &choices["cu_seqlens"]);
        let positions = sequences(cu_seqlens)
            .flat_map(|s| 0..s.len() as i32)
            .collect();
        let targets = next_tokens(ids, cu_seqlens);
        let table = RotaryTable::new(config.rope_theta, config.rotary_dim, ids.len());
        Self {
            name,
            config,
            weights,
            floats,
            choices,
            positions,
            targets,
            table,
        }
    }

    fn inputs<'a>(&'a self, replay: &'a Replay) -> model::Inputs<'a> {
        model::Inputs {
            config: &self.config,
            weights: &self.weights,
            pack: Pack {
                cu_seqlens: &self.choices["cu_seqlens"],
                positions: &self.positions,
                cos_sin: &self.table.cos_sin,
            },
            ids: &self.choices["input_ids"],
            targets: &self.targets,
            temperature: 1.0,
            replay,
        }
    }

    fn scored(&self, log_probs: &[f64]) -> Vec<f64> {
        let scored = (0..log_probs.len()).filter(|&t| self.targets[t] >= 0);
        scored.map(|t| log_probs[t]).collect()
    }

    /// d(mean nll) / d(log-prob).
    fn dlog_probs(&self) -> Vec<f64> {
        let scored = self.floats["logprobs"].len() as f64;
        self.targets
            .iter()
            .map(|&t| if t >= 0 { -1.0 / scored } else { 0.0 })
            .collect()
    }

    /// The choices of transformers, to be forced.
    fn replay(&self) -> Replay {
        let of =
            |i: usize, what: &str| Some((i, self.choices.get(&format!("{what}.{i}"))?.clone()));
        let layers = 0..self.config.num_layers();
        Replay {
            blocks: layers.clone().filter_map(|i| of(i, "blocks")).collect(),
            experts: layers.filter_map(|i| of(i, "experts")).collect(),
        }
    }
}

fn mean_abs_diff(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f64>() / a.len() as f64
}

fn assert_choices(golden: &Golden, output: &model::Output) {
    let Golden {
        name,
        choices,
        floats,
        ..
    } = golden;
    for (i, layer) in output.layers.iter().enumerate() {
        let blocks = choices.get(&format!("blocks.{i}"));
        assert!(
            layer.attention.block_ids.as_ref() == blocks,
            "{name}: blocks of layer {i}"
        );
        if let Mlp::Moe(moe) = &layer.mlp {
            assert!(
                moe.route.expert_ids == choices[&format!("experts.{i}")],
                "{name}: layer {i}"
            );
            let expected = &floats[&format!("expert_weights.{i}")];
            assert_close(&moe.route.expert_weights, expected, EXPERT_WEIGHT_BOUND);
        }
    }
}

fn assert_gradients(golden: &Golden, gradients: &Weights) {
    let Golden {
        name,
        floats,
        choices,
        ..
    } = golden;
    let mut compared = 0;
    for (tensor, gradient) in gradients {
        let (got, expected) = match floats.get(&format!("grad.{tensor}")) {
            Some(expected) => (gradient.clone(), expected),
            None => {
                let picked = choices[&format!("grad_index.{tensor}")].iter();
                let got = picked.map(|&i| gradient[i as usize]).collect();
                (got, &floats[&format!("grad_sample.{tensor}")])
            }
        };
        assert_eq!(got.len(), expected.len(), "{name}: {tensor}");
        let diff: Vec<f64> = got.iter().zip(expected).map(|(a, b)| a - b).collect();
        let (error, norm) = (dot(&diff, &diff).sqrt(), dot(expected, expected).sqrt());
        assert!(
            error <= GRADIENT_BOUND * norm,
            "{name}: {tensor}: {error:.1e} of {norm:.1e}"
        );
        compared += 1;
    }
    let recorded = floats
        .keys()
        .filter(|k| k.starts_with("grad.") || k.starts_with("grad_sample."));
    assert_eq!(
        compared,
        recorded.count(),
        "{name}: every recorded gradient is compared"
    );
}

#[test]
fn log_probs_choices_and_gradients_equal_those_of_transformers() {
    for golden in GOLDENS.map(Golden::read) {
        let replay = Replay::default();
        let inputs = golden.inputs(&replay);
        let output = model::forward(&inputs, &Rounding::Exact);
        assert_choices(&golden, &output);
        let log_probs = golden.scored(&output.log_prob.log_probs);
        assert_close(&log_probs, &golden.floats["logprobs"], LOG_PROB_BOUND);
        let dlog_probs = golden.dlog_probs();
        let grads = model::Grads {
            dlog_probs: &dlog_probs,
        };
        let gradients = model::backward(&inputs, &output, &grads, &Rounding::Exact);
        assert_gradients(&golden, &gradients);
    }
}

/// transformers rounds more often in bf16 than profile S does, and chooses by rounded routing scores.
#[test]
fn the_bf16_twin_is_closer_to_fp32_than_transformers_in_bf16() {
    for golden in GOLDENS.map(Golden::read) {
        let expected = &golden.floats["logprobs"];
        let theirs = mean_abs_diff(&golden.floats["logprobs_bf16"], expected);
        let replay = golden.replay();
        let output = model::forward(&golden.inputs(&replay), &Rounding::BF16);
        let ours = mean_abs_diff(&golden.scored(&output.log_prob.log_probs), expected);
        assert!(
            ours > 0.0 && ours <= theirs,
            "{}: {ours:.1e} against {theirs:.1e}",
            golden.name
        );
    }
}

#[test]
fn replaying_the_own_choices_changes_no_bit() {
    let golden = Golden::read("odd_constants");
    let run = |replay| {
        model::forward(&golden.inputs(replay), &Rounding::Exact)
            .log_prob
            .log_probs
    };
    assert_eq!(run(&golden.replay()), run(&Replay::default()));
}
