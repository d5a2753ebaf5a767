//! The model on every committed checkpoint, against what transformers recorded there.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use m3_gate::record::Device;
use m3_gate::{Storage, failure_block, failure_line};
use m3_harness::gate_pipeline::{self, Subject};
use m3_harness::goldens::{Golden, Mode};
use m3_harness::lab::{Judged, Outcome};
use m3_harness::{gates, today, whole_model};
use m3_kernels::Backend;
use m3_kernels::cpu::CpuBackend;
use m3_spec::dtype::DType;

/// Largest ratio of this model's bf16 error to transformers' own, over all goldens together.
const BF16_RATIO_MAX: f64 = 1.0;

fn main() -> ExitCode {
    let goldens = Golden::all(&root()).expect("the goldens are committed");
    let mut trials = Vec::new();
    for golden in &goldens {
        let modes = [
            ("f32", Mode::F32),
            ("replayed", Mode::Replayed),
            ("bf16", Mode::Bf16),
            ("rollout", Mode::Rollout { prefill: 17 }),
        ];
        for (word, storage) in [("model_f32", DType::F32), ("model_bf16", DType::BF16)] {
            let (name, golden) = (format!("golden::{word}/{}", golden.name()), golden.clone());
            trials.push(trial(name, storage, move |backend| {
                whole_model::outcomes(&golden, backend, storage).map_err(|error| error.to_string())
            }));
        }
        for (word, mode) in modes {
            let (name, golden) = (format!("golden::{word}/{}", golden.name()), golden.clone());
            let storage = if mode == Mode::Bf16 {
                DType::BF16
            } else {
                DType::F32
            };
            trials.push(trial(name, storage, move |backend| {
                golden
                    .outcomes(backend, mode)
                    .map_err(|error| error.to_string())
            }));
        }
    }
    trials.push(Trial::test(
        "golden::bf16_pooled_beside_transformers",
        move || pooled(&goldens),
    ));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden")
}

fn trial(
    name: String,
    storage: DType,
    outcomes: impl Fn(&CpuBackend) -> Result<Vec<Outcome>, String> + Send + 'static,
) -> Trial {
    Trial::test(name.clone(), move || {
        let backend = CpuBackend::default();
        judge(&backend, &name, storage, outcomes(&backend)?)
    })
}

fn judge(
    backend: &CpuBackend,
    name: &str,
    storage: DType,
    outcomes: Vec<Outcome>,
) -> Result<(), Failed> {
    let device = Device {
        name: backend.name(),
        arch: "cpu".into(),
        ..Device::default()
    };
    let gates = gates::all(today())?;
    let lab = Judged {
        outcomes,
        ..Judged::default()
    };
    let storage = if storage == DType::BF16 {
        Storage::Bf16
    } else {
        Storage::F32
    };
    let subject = Subject {
        op: "golden",
        suite: "golden",
        storage,
        device: &device,
    };
    let record = gate_pipeline::judge(&subject, &gates, name, &lab, 0);
    match failure_block(&record) {
        None => Ok(()),
        Some(block) => {
            eprintln!(
                "{block}\nError: {}",
                failure_line(&record).unwrap_or_default()
            );
            Err(Failed::without_message())
        }
    }
}

/// bf16 without forced ids, mean error over the tokens of all goldens, beside transformers' own in bf16.
fn pooled(goldens: &[Golden]) -> Result<(), Failed> {
    let backend = CpuBackend::default();
    let (mut ours, mut theirs) = (0.0, 0.0);
    for golden in goldens.iter().filter(|golden| !golden.name().contains('-')) {
        let recorded = golden.recorded()?;
        let (exact, bf16) = (&recorded["logprobs"].2, &recorded["logprobs_bf16"].2);
        let log_probs = golden.bf16_log_probs(&backend)?;
        ours += exact
            .iter()
            .zip(&log_probs)
            .map(|(a, b)| (a - b).abs())
            .sum::<f64>();
        theirs += exact
            .iter()
            .zip(bf16)
            .map(|(a, b)| (a - b).abs())
            .sum::<f64>();
    }
    let ratio = ours / theirs;
    println!("bf16 log-prob error, pooled: {ratio:.3} of transformers' own");
    if ratio <= BF16_RATIO_MAX {
        return Ok(());
    }
    Err(
        format!("pooled bf16 error is {ratio:.3} of transformers' own, bound {BF16_RATIO_MAX}")
            .into(),
    )
}
