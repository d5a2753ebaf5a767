//! The parity ladder and what else must not change a bit: storage, packing, recomputation, threads, batch, decode.

use std::path::{Path, PathBuf};

use m3_checkpoint::{Synthetic, synthetic};
use m3_harness::generate;
use m3_harness::logprobs::{self, Report, Request, Side};
use m3_kernels::cpu::CpuBackend;
use m3_rollout::{Engine, Generation, Prompt, Sampling};
use m3_spec::config::{AttentionKind, Config};
use m3_spec::dtype::DType;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../golden")
        .join(name)
}

fn request(model: &Path, tokens: &Path, dtype: DType) -> Request {
    Request {
        side: Side::Trainer,
        model: model.into(),
        tokens: tokens.into(),
        dtype,
        temperature: 1.0,
        backward: false,
        recompute: false,
        dump: None,
        replay: None,
        json: None,
    }
}

/// Bits of every log-prob, sequence by sequence.
fn bits(report: &Report) -> Vec<Vec<u32>> {
    let row = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
    report
        .sequences
        .iter()
        .map(|sequence| row(&sequence.logprobs))
        .collect()
}

fn run(backend: &CpuBackend, request: &Request) -> Report {
    logprobs::run(backend, request).unwrap()
}

/// A checkpoint of the `tiny` shape and a tokens file, in a directory that goes with the guard.
struct Tiny {
    dir: tempfile::TempDir,
}

impl Tiny {
    fn new(config: &Config, lengths: &[usize]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let weights = Synthetic {
            norm_std: 0.2,
            router_bias_std: 0.1,
            ..Synthetic::new(3, 0.15)
        };
        synthetic(dir.path().join("model"), config, &weights).unwrap();
        let tiny = Tiny { dir };
        let vocab = config.text.vocab_size;
        let sequences: Vec<Vec<usize>> = lengths
            .iter()
            .enumerate()
            .map(|(s, &n)| (0..n).map(|t| (t * 37 + s * 101 + t * t) % vocab).collect())
            .collect();
        let text = serde_json::json!({ "sequences": sequences }).to_string();
        std::fs::write(tiny.tokens(), text).unwrap();
        tiny
    }

    fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    fn tokens(&self) -> PathBuf {
        self.dir.path().join("tokens.json")
    }

    fn request(&self, dtype: DType) -> Request {
        request(&self.model(), &self.tokens(), dtype)
    }

    /// The sequence `number` in a file of its own.
    fn alone(&self, number: usize) -> PathBuf {
        let text = std::fs::read_to_string(self.tokens()).unwrap();
        let all: serde_json::Value = serde_json::from_str(&text).unwrap();
        let path = self.dir.path().join(format!("alone-{number}.json"));
        let one = serde_json::json!({ "input_ids": all["sequences"][number] });
        std::fs::write(&path, one.to_string()).unwrap();
        path
    }
}

const LENGTHS: [usize; 4] = [150, 1, 63, 97];

#[test]
fn every_form_of_the_same_weights_gives_the_same_bits() {
    let backend = CpuBackend::default();
    let tokens = golden("transformers/basic.tokens.json");
    let all = ["basic", "basic-released", "basic-sharded", "basic-f32"].map(|name| {
        let model = golden("checkpoints").join(name);
        bits(&run(&backend, &request(&model, &tokens, DType::F32)))
    });
    assert!(all.iter().all(|bits| *bits == all[0]));
}

#[test]
fn a_packed_sequence_has_the_bits_it_has_alone() {
    let backend = CpuBackend::default();
    let tiny = Tiny::new(&Config::tiny(), &LENGTHS);
    for dtype in [DType::F32, DType::BF16] {
        let packed = bits(&run(&backend, &tiny.request(dtype)));
        for (number, packed) in packed.iter().enumerate() {
            let tokens = tiny.alone(number);
            let alone = bits(&run(
                &backend,
                &Request {
                    tokens,
                    ..tiny.request(dtype)
                },
            ));
            assert_eq!(*packed, alone[0], "{dtype:?}, sequence {number}");
        }
    }
}

#[test]
fn recomputation_and_threads_change_no_bit_of_scores_and_gradients() {
    let tiny = Tiny::new(&Config::tiny(), &LENGTHS);
    for dtype in [DType::F32, DType::BF16] {
        let of = |threads: usize, recompute: bool| {
            let backend = CpuBackend::new(threads).unwrap();
            let dump = tiny.dir.path().join("dump.safetensors");
            let request = Request {
                backward: true,
                recompute,
                dump: Some(dump.clone()),
                ..tiny.request(dtype)
            };
            let report = run(&backend, &request);
            let norms: Vec<u64> = report
                .gradients
                .iter()
                .flat_map(|g| g.grad_norms.values())
                .map(|x| x.to_bits())
                .collect();
            (bits(&report), norms, std::fs::read(dump).unwrap())
        };
        let kept = of(2, false);
        assert!(kept == of(2, true), "{dtype:?}: recomputed");
        assert!(kept == of(1, false), "{dtype:?}: one thread");
    }
}

#[test]
fn sparse_layers_are_dense_ones_as_long_as_every_block_is_chosen() {
    let backend = CpuBackend::default();
    let sparse = Config::tiny();
    let index = sparse.text.index.clone().unwrap();
    let longest = index.topk_blocks * index.block_size;
    let tiny = Tiny::new(&sparse, &[longest, longest - 1, 17]);
    let mut dense = sparse.clone();
    dense.text.attention.fill(AttentionKind::Full);
    let copy = tiny.dir.path().join("dense");
    let weights = Synthetic {
        norm_std: 0.2,
        router_bias_std: 0.1,
        ..Synthetic::new(3, 0.15)
    };
    synthetic(&copy, &dense, &weights).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let sparse = bits(&run(&backend, &tiny.request(dtype)));
        let dense = bits(&run(
            &backend,
            &Request {
                model: copy.clone(),
                ..tiny.request(dtype)
            },
        ));
        assert!(sparse == dense, "{dtype:?}");
    }
}

#[test]
fn the_engine_has_the_trainers_bits_in_prefill_and_decode() {
    let backend = CpuBackend::default();
    let tiny = Tiny::new(&Config::tiny(), &LENGTHS);
    for dtype in [DType::F32, DType::BF16] {
        let trainer = bits(&run(&backend, &tiny.request(dtype)));
        for prefill in [150, 1, 64, 83] {
            let side = Side::Rollout {
                prefill: Some(prefill),
            };
            let engine = bits(&run(
                &backend,
                &Request {
                    side,
                    ..tiny.request(dtype)
                },
            ));
            assert!(trainer == engine, "{dtype:?}, prefill {prefill}");
        }
    }
}

fn engine(backend: &CpuBackend, tiny: &Tiny, dtype: DType) -> Engine<CpuBackend> {
    use m3_kernels::Backend;
    let stream = backend.stream();
    let checkpoint = m3_checkpoint::Checkpoint::open(tiny.model()).unwrap();
    let config = &checkpoint.config().text;
    let engine = Engine::new(backend, &stream, config, dtype, 128).unwrap();
    engine.model.load(backend, &stream, &checkpoint).unwrap();
    engine
}

fn prompts(count: u32) -> Vec<Prompt> {
    let tokens = |number: u32| {
        (0..5 + number % 7)
            .map(|t| i64::from((t * 31 + number * 7) % 512))
            .collect()
    };
    (0..count)
        .map(|number| Prompt {
            tokens: tokens(number),
            number,
            sample: number % 3,
        })
        .collect()
}

#[test]
fn a_sample_has_the_same_tokens_and_bits_alone_in_a_batch_and_in_another_order() {
    use m3_kernels::Backend;
    let backend = CpuBackend::default();
    let stream = backend.stream();
    let tiny = Tiny::new(&Config::tiny(), &[4]);
    let sampling = Sampling {
        temperature: 0.8,
        top_p: 1.0,
        top_k: 0,
        max_new_tokens: 9,
        stop: vec![7],
        seed: 11,
    };
    let mut engine = engine(&backend, &tiny, DType::BF16);
    let mut generate = |prompts: &[Prompt]| -> Vec<Generation> {
        engine
            .generate(&backend, &stream, prompts, &sampling)
            .unwrap()
    };
    let prompts = prompts(32);
    let batch = generate(&prompts);
    let mut reversed: Vec<Prompt> = prompts.clone();
    reversed.reverse();
    let mut other_order = generate(&reversed);
    other_order.reverse();
    assert!(batch == other_order);
    for number in [0, 5, 31] {
        let alone = generate(&prompts[number..=number]);
        assert_eq!(alone[0], batch[number]);
    }
    assert!(
        batch
            .iter()
            .flat_map(|g| &g.log_probs)
            .all(|&x| x <= 0.0 && x.is_finite())
    );
}

#[test]
fn every_token_but_the_last_has_one_row_of_routes() {
    use m3_kernels::Backend;
    let backend = CpuBackend::default();
    let tiny = Tiny::new(&Config::tiny(), &[4]);
    let sampling = Sampling {
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        max_new_tokens: 2,
        stop: Vec::new(),
        seed: 1,
    };
    let prompt = Prompt {
        tokens: vec![3, 1, 4],
        number: 0,
        sample: 0,
    };
    let mut engine = engine(&backend, &tiny, DType::F32);
    let generations = engine.generate(&backend, &backend.stream(), &[prompt], &sampling);
    let routes = &generations.unwrap()[0].routes;
    let moe = Config::tiny().text.moe.unwrap();
    assert_eq!(routes.layers, [2, 3]);
    for ids in &routes.expert_ids {
        // Three prompt tokens and the first of two sampled ones were inputs.
        assert_eq!(ids.len(), 4 * moe.experts_per_token);
    }
}

#[test]
fn a_sampled_token_is_scored_by_the_trainer_with_the_bits_it_was_drawn_with() {
    let backend = CpuBackend::default();
    let tiny = Tiny::new(&Config::tiny(), &[3, 20]);
    let json = tiny.dir.path().join("generated.json");
    let sampling = Sampling {
        temperature: 0.8,
        top_p: 1.0,
        top_k: 0,
        max_new_tokens: 40,
        stop: Vec::new(),
        seed: 5,
    };
    let request = generate::Request {
        model: tiny.model(),
        tokens: tiny.tokens(),
        dtype: DType::BF16,
        sampling,
        json: Some(json),
    };
    let generations = generate::run(&backend, &request).unwrap();
    let text = std::fs::read_to_string(tiny.tokens()).unwrap();
    let file: serde_json::Value = serde_json::from_str(&text).unwrap();
    let prompts: Vec<Vec<i64>> = serde_json::from_value(file["sequences"].clone()).unwrap();
    let whole: Vec<Vec<i64>> = prompts
        .iter()
        .zip(&generations)
        .map(|(p, g)| [p.as_slice(), &g.tokens].concat())
        .collect();
    let tokens = tiny.dir.path().join("whole.json");
    std::fs::write(
        &tokens,
        serde_json::json!({ "sequences": whole }).to_string(),
    )
    .unwrap();
    let request = Request {
        tokens,
        temperature: 0.8,
        ..tiny.request(DType::BF16)
    };
    let scored = bits(&run(&backend, &request));
    for ((prompt, generation), scored) in prompts.iter().zip(&generations).zip(&scored) {
        let drawn: Vec<u32> = generation.log_probs.iter().map(|x| x.to_bits()).collect();
        assert_eq!(drawn, scored[prompt.len() - 1..]);
    }
}
