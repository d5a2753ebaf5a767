//! Faults that only a whole model or a whole run can show: in loading, in weight sync, between trainer and engine.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use m3_gate::record::VerdictRecord;
use m3_gate::{GateSet, Severity, Storage};
use m3_kernels::cpu::CpuBackend;
use m3_kernels::cpu::fault::Call;
use m3_kernels::{Backend, Result as KernelResult, ops};
use safetensors::SafeTensors;

use super::plant::{Plant, STREAM, edited, exchange, plant, settings};
use super::{Caught, device};
use crate::error::{Error, Result};
use crate::gate_pipeline::{self, Subject};
use crate::goldens::{Golden, Mode};
use crate::lab::Judged;
use crate::train::recipe::Recipe;
use crate::train_pipeline::{self, Options};

/// Steps of a run with a fault in it.
const STEPS: usize = 2;

/// One fault of a component.
pub struct Fault {
    /// What is wrong, in the field's words.
    pub words: &'static str,
    place: Place,
}

enum Place {
    /// In the operations of a short training run, on the recipe's own temperature or another one.
    Run(Plant),
    /// In the weights that a golden's model is loaded from.
    Loading(fn(&mut Weights)),
    /// In the operations of a golden's model.
    Model(Plant),
}

/// fp32 tensors of a checkpoint, by released name.
type Weights = BTreeMap<String, Vec<f32>>;

/// Every fault of a component.
pub fn registry() -> Vec<Fault> {
    let run = |words, plant| Fault {
        words,
        place: Place::Run(plant),
    };
    let loading = |words, edit| Fault {
        words,
        place: Place::Loading(edit),
    };
    let model = |words, plant| Fault {
        words,
        place: Place::Model(plant),
    };
    vec![
        loading("loading: q heads grouped wrongly", regrouped_heads),
        loading("loading: FC1 halves interleaved", interleaved_halves),
        loading("loading: w1 and w3 swapped", swapped_halves),
        loading(
            "loading: +1 folded into the stored norm weights",
            |weights| {
                each(weights, "layernorm.weight", |w| {
                    w.iter_mut().for_each(|x| *x += 1.0)
                });
            },
        ),
        loading("loading: the router's bias left at 0", |weights| {
            each(weights, "e_score_correction_bias", |w| w.fill(0.0));
        }),
        loading("loading: norms of q and k exchanged", |weights| {
            let names: Vec<String> = weights
                .keys()
                .filter(|name| name.ends_with(".q_norm.weight"))
                .cloned()
                .collect();
            for name in names {
                let other = name.replace(".q_norm.", ".k_norm.");
                let (q, k) = (weights[&name].clone(), weights[&other].clone());
                weights.insert(name, k);
                weights.insert(other, q);
            }
        }),
        model(
            "model: own block not forced",
            settings!(BlockSelect {
                local_blocks: |_args| 0
            }),
        ),
        model(
            "model: scaling of the experts dropped",
            settings!(MoeCombine {
                scaling: |_args| 1.0
            }),
        ),
        model(
            "model: router in bf16",
            exchange!(RouterWeights {
                logits: |b, args| edited(b, args.logits, |_, x| super::plant::bf16(x))
            }),
        ),
        run("sync: one bucket dropped", dropped_copy(None)),
        run("sync: one row of a tensor skipped", dropped_copy(Some(1))),
        run(
            "run: the second update lost",
            plant!(AdamW, |b, args| {
                if super::plant::ints(b, args.step)?[0] == 2 {
                    return Ok(());
                }
                b.adamw(&STREAM, args)
            }),
        ),
        run(
            "run: one shard's squares missing from the gradient norm",
            plant!(SumSquares, |b, args| {
                let source = &args.source.slice(0, 0..args.source.shape()[0] / 2);
                b.sum_squares(&STREAM, &ops::SumSquares { source, ..*args })
            }),
        ),
        run(
            "trainer: scores at another temperature than the engine",
            exchange!(LogProb {
                temperature: |b, args| edited(b, args.temperature, |_, x| 1.25 * x)
            }),
        ),
        run(
            "trainer: one block fewer than the engine",
            plant!(MsaAttention, |b, args| {
                let topk = args.block_ids.shape()[2];
                let block_ids = &edited(
                    b,
                    args.block_ids,
                    |i, id| if i % topk == 0 { id } else { -1.0 },
                )?;
                b.msa_attention(&STREAM, &ops::MsaAttention { block_ids, ..*args })
            }),
        ),
        run(
            "trainer: scored twice, the second time elsewhere",
            second_score(),
        ),
    ]
}

/// Runs a fault where it belongs.
///
/// # Errors
/// What cannot be read or written; an error of the subject is the catch `runs`.
pub fn run(backend: &CpuBackend, gates: &GateSet, fault: &Fault, root: &Path) -> Result<Caught> {
    let (case, red) = match &fault.place {
        Place::Run(_) => ("train::echo", None),
        Place::Loading(edit) => {
            let dir = tempfile::tempdir().map_err(|error| Error::file(root, error))?;
            let mut golden = golden(root)?;
            rewrite(&golden.checkpoint, dir.path(), *edit)?;
            golden.checkpoint = dir.path().to_owned();
            (
                "golden::f32/basic-f32",
                Some(judged(backend, gates, &golden)),
            )
        }
        Place::Model(_) => {
            let golden = golden(root)?;
            (
                "golden::f32/basic-f32",
                Some(judged(&faulty(backend, fault), gates, &golden)),
            )
        }
    };
    let red = match red {
        Some(red) => red,
        None => trained(&faulty(backend, fault))?,
    };
    let gates = BTreeMap::from([(case.to_owned(), red)]);
    Ok(Caught {
        words: fault.words,
        gates,
    })
}

fn faulty(backend: &CpuBackend, fault: &Fault) -> CpuBackend {
    match &fault.place {
        Place::Run(plant) | Place::Model(plant) => backend.with_fault(plant.clone()),
        Place::Loading(_) => backend.clone(),
    }
}

fn trained(backend: &CpuBackend) -> Result<BTreeSet<String>> {
    let dir = tempfile::tempdir().map_err(|error| Error::file(&std::env::temp_dir(), error))?;
    let mut recipe = Recipe::echo()?;
    recipe.train.steps = STEPS;
    (recipe.data.prompts, recipe.data.samples) = (4, 4);
    let options = Options {
        out: dir.path().join("run"),
        seed: 1,
    };
    match train_pipeline::run(backend, &recipe, &options, &mut |_, _| {}) {
        Ok(outcome) => Ok(red(outcome.gates.verdicts)),
        Err(_) => Ok(BTreeSet::from(["runs".to_owned()])),
    }
}

fn judged(backend: &CpuBackend, gates: &GateSet, golden: &Golden) -> BTreeSet<String> {
    let Ok(outcomes) = golden.outcomes(backend, Mode::F32) else {
        return BTreeSet::from(["runs".to_owned()]);
    };
    let lab = Judged {
        outcomes,
        ..Judged::default()
    };
    let device = device(backend);
    let subject = Subject {
        op: "golden",
        suite: "golden",
        storage: Storage::F32,
        device: &device,
    };
    red(gate_pipeline::judge(&subject, gates, "golden::f32/basic-f32", &lab, 0).verdicts)
}

fn red(rows: Vec<VerdictRecord>) -> BTreeSet<String> {
    let blocks = rows
        .into_iter()
        .filter(|row| row.severity == Severity::Block);
    blocks
        .filter(|row| !row.verdict.is_green())
        .map(|row| row.gate)
        .collect()
}

fn golden(root: &Path) -> Result<Golden> {
    let named = |golden: &Golden| golden.name() == "basic-f32";
    let found = Golden::all(&root.join("golden"))?.into_iter().find(named);
    found.ok_or_else(|| Error::file(root, "has no golden basic-f32"))
}

/// A checkpoint copied with its tensors edited.
fn rewrite(from: &Path, to: &Path, change: fn(&mut Weights)) -> Result<()> {
    let (source, target) = (from.join("model.safetensors"), to.join("model.safetensors"));
    let failed = |error: std::io::Error| Error::file(from, error);
    std::fs::copy(from.join("config.json"), to.join("config.json")).map_err(failed)?;
    let mut bytes = std::fs::read(&source).map_err(failed)?;
    let (header, metadata) =
        SafeTensors::read_metadata(&bytes).map_err(|error| Error::file(from, error))?;
    let mut places = BTreeMap::new();
    let mut weights = Weights::new();
    for (name, info) in metadata.tensors() {
        let (start, end) = (
            8 + header + info.data_offsets.0,
            8 + header + info.data_offsets.1,
        );
        let words = bytes[start..end].chunks_exact(4);
        weights.insert(
            name.clone(),
            words
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        );
        places.insert(name, start);
    }
    change(&mut weights);
    for (name, values) in weights {
        let words: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        bytes[places[&name]..][..words.len()].copy_from_slice(&words);
    }
    std::fs::write(target, bytes).map_err(failed)
}

fn each(weights: &mut Weights, end: &str, change: impl Fn(&mut Vec<f32>)) {
    weights
        .iter_mut()
        .filter(|(name, _)| name.ends_with(end))
        .for_each(|(_, values)| change(values));
}

/// Four query heads of two groups dealt in turn.
fn regrouped_heads(weights: &mut Weights) {
    each(weights, ".q_proj.weight", |w| {
        let head = w.len() / 4;
        let dealt: Vec<f32> = [0, 2, 1, 3]
            .iter()
            .flat_map(|h| w[h * head..][..head].to_vec())
            .collect();
        *w = dealt;
    });
}

/// Every pair (w1, w3) of the experts through `change`.
fn halves(weights: &mut Weights, change: impl Fn(&[f32], &[f32]) -> (Vec<f32>, Vec<f32>)) {
    let names: Vec<String> = weights
        .keys()
        .filter(|name| name.ends_with(".w1.weight"))
        .cloned()
        .collect();
    for name in names {
        let other = name.replace(".w1.", ".w3.");
        let (first, second) = change(&weights[&name], &weights[&other]);
        weights.insert(name, first);
        weights.insert(other, second);
    }
}

fn swapped_halves(weights: &mut Weights) {
    halves(weights, |w1, w3| (w3.to_vec(), w1.to_vec()));
}

fn interleaved_halves(weights: &mut Weights) {
    halves(weights, |w1, w3| {
        let row = w1.len() / 16;
        let fused: Vec<&[f32]> = w1.chunks_exact(row).chain(w3.chunks_exact(row)).collect();
        let every = |odd: usize| {
            fused
                .iter()
                .skip(odd)
                .step_by(2)
                .copied()
                .collect::<Vec<_>>()
                .concat()
        };
        (every(0), every(1))
    });
}

/// The third copy after an update left out, or its first rows. Copies that follow an update carry weights to the engine.
fn dropped_copy(rows: Option<usize>) -> Plant {
    let copies = AtomicUsize::new(usize::MAX);
    Arc::new(move |b: &CpuBackend, call: Call<'_>| match call {
        Call::AdamW(_) => {
            copies.store(0, Ordering::Relaxed);
            call.run(b)
        }
        Call::Copy(args) => skip_third(b, args, &copies, rows),
        other => other.run(b),
    })
}

fn skip_third(
    b: &CpuBackend,
    args: &ops::Copy<'_, CpuBackend>,
    copies: &AtomicUsize,
    rows: Option<usize>,
) -> KernelResult<()> {
    let number = copies.load(Ordering::Relaxed);
    copies.store(number.saturating_add(1), Ordering::Relaxed);
    match rows {
        _ if number != 2 => b.copy(&STREAM, args),
        None => Ok(()),
        Some(rows) => {
            let rest = rows..args.source.shape()[0];
            let (source, target) = (
                &args.source.slice(0, rest.clone()),
                &args.target.slice(0, rest),
            );
            b.copy(&STREAM, &ops::Copy { source, target })
        }
    }
}

/// Log-probs of every second score a little off.
fn second_score() -> Plant {
    let odd = Mutex::new(false);
    Arc::new(move |b: &CpuBackend, call: Call<'_>| match call {
        Call::LogProb(args) => {
            call.run(b)?;
            let mut odd = odd.lock().unwrap_or_else(PoisonError::into_inner);
            *odd = !*odd;
            let shift = if *odd { 0.0 } else { 1e-3 };
            super::plant::edit(b, args.log_prob, |_, x| x - shift)
        }
        other => other.run(b),
    })
}
