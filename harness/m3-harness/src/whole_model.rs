//! The whole model against the whole reference: the same weights, tokens and selections, in f64, in the rounded twin, and
//! on a device.

use m3_checkpoint::Checkpoint;
use m3_kernels::Backend;
use m3_reference::Rounding;
use m3_reference::layers::attention::Pack;
use m3_reference::model::{self, Replay, Weights};
use m3_spec::config::TextConfig;
use m3_spec::dtype::DType;
use m3_spec::rope::RotaryTable;
use m3_spec::round::to_bf16;

use crate::error::{Error, Result};
use crate::goldens::{Golden, Mode, Tensors};
use crate::lab::{Outcome, cu_seqlens, positions};
use crate::logprobs::Tokens;

/// What the reference model computes of a golden.
struct Computed {
    log_probs: Vec<f64>,
    last_logits: Vec<f64>,
    gradients: Weights,
}

/// Log-probs, last logits and gradients of a golden's checkpoint in the storage dtype, with the recorded ids forced on
/// every side.
///
/// # Errors
/// As [`Golden::run`].
pub fn outcomes<B: Backend>(golden: &Golden, backend: &B, storage: DType) -> Result<Vec<Outcome>> {
    let mode = if storage == DType::BF16 {
        Mode::Bf16
    } else {
        Mode::Replayed
    };
    let (report, dump) = golden.run(backend, mode)?;
    let case = Case::new(golden, storage)?;
    let [exact, twin] =
        [Rounding::Exact, Rounding::Twin { storage }].map(|rounding| case.compute(&rounding));
    let log_probs: Vec<f64> = report
        .sequences
        .iter()
        .flat_map(|s| &s.logprobs)
        .map(|&x| f64::from(x))
        .collect();
    let logits = dump["logits.last"].2.clone();
    let mut outcomes = vec![
        outcome("logprobs", exact.log_probs, twin.log_probs, log_probs),
        outcome("logits.last", exact.last_logits, twin.last_logits, logits),
    ];
    if storage == DType::F32 {
        for (name, reference) in exact.gradients {
            let name = format!("grad.{name}");
            let Some((_, _, got)) = dump.get(&name) else {
                return Err(Error::file(
                    &golden.checkpoint,
                    format_args!("the run has no {name}"),
                ));
            };
            outcomes.push(outcome(&name, reference.clone(), reference, got.clone()));
        }
    }
    Ok(outcomes)
}

fn outcome(name: &str, reference: Vec<f64>, twin: Vec<f64>, got: Vec<f64>) -> Outcome {
    let (tensor, shape) = (name.to_owned(), vec![reference.len()]);
    Outcome {
        tensor,
        shape,
        storage: DType::F32,
        reference,
        twin,
        got,
    }
}

/// A golden as the reference model reads it.
struct Case {
    config: TextConfig,
    weights: Weights,
    ids: Vec<i32>,
    targets: Vec<i32>,
    cu_seqlens: Vec<i32>,
    positions: Vec<i32>,
    table: RotaryTable,
    replay: Replay,
}

impl Case {
    fn new(golden: &Golden, storage: DType) -> Result<Self> {
        let checkpoint = Checkpoint::open(&golden.checkpoint)?;
        let config = checkpoint.config().text.clone();
        let tokens = Tokens::read(&golden.tokens())?;
        let lengths = tokens.lengths();
        let mut targets = Vec::new();
        for sequence in &tokens.sequences {
            targets.extend(sequence[1..].iter().map(|&id| id as i32).chain([-1]));
        }
        let longest = lengths.iter().max().copied().unwrap_or(1);
        Ok(Case {
            weights: weights(&checkpoint, storage)?,
            ids: tokens
                .sequences
                .concat()
                .into_iter()
                .map(|id| id as i32)
                .collect(),
            targets,
            cu_seqlens: cu_seqlens(&lengths),
            positions: positions(&lengths),
            table: RotaryTable::new(config.rope_theta, config.rotary_dim, longest),
            replay: replay(&golden.recorded()?, &config),
            config,
        })
    }

    fn compute(&self, rounding: &Rounding) -> Computed {
        let inputs = model::Inputs {
            config: &self.config,
            weights: &self.weights,
            pack: Pack {
                cu_seqlens: &self.cu_seqlens,
                positions: &self.positions,
                cos_sin: &self.table.cos_sin,
            },
            ids: &self.ids,
            targets: &self.targets,
            temperature: 1.0,
            replay: &self.replay,
        };
        let output = model::forward(&inputs, rounding);
        let scored = self.targets.iter().filter(|&&target| target >= 0).count() as f64;
        let share = |&target: &i32| if target >= 0 { -1.0 / scored } else { 0.0 };
        let dlog_probs: Vec<f64> = self.targets.iter().map(share).collect();
        let grads = model::Grads {
            dlog_probs: &dlog_probs,
        };
        let rows = output.log_prob.log_probs.iter().zip(&self.targets);
        Computed {
            log_probs: rows
                .filter(|(_, target)| **target >= 0)
                .map(|(&x, _)| x)
                .collect(),
            last_logits: self.last_logits(&output.norm.out),
            gradients: model::backward(&inputs, &output, &grads, rounding),
        }
    }

    /// Logits of every sequence's last token.
    fn last_logits(&self, hidden: &[f64]) -> Vec<f64> {
        let width = self.config.hidden_size;
        let head = &self.weights["language_model.lm_head.weight"];
        let dot = |row: &[f64], w: &[f64]| row.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
        self.cu_seqlens[1..]
            .iter()
            .flat_map(|&end| {
                let row = &hidden[(end as usize - 1) * width..end as usize * width];
                head.chunks_exact(width).map(move |w| dot(row, w))
            })
            .collect()
    }
}

/// Every text tensor, rounded to the storage dtype but for those that stay F32.
fn weights(checkpoint: &Checkpoint, storage: DType) -> Result<Weights> {
    let mut weights = Weights::new();
    for spec in checkpoint.specs() {
        let tensor = checkpoint.tensor(&spec.name)?;
        let mut values = vec![0.0f32; tensor.elements()];
        tensor.read_f32(&mut values)?;
        let rounds = storage == DType::BF16 && spec.dtype == DType::BF16;
        let wide = values.iter().map(|&x| f64::from(x));
        let values = wide.map(|x| if rounds { to_bf16(x) } else { x }).collect();
        weights.insert(spec.name.clone(), values);
    }
    Ok(weights)
}

fn replay(recorded: &Tensors, config: &TextConfig) -> Replay {
    let of = |kind: &str| {
        let ids = |layer: usize| {
            let (_, _, values) = recorded.get(&format!("{kind}.{layer}"))?;
            Some((layer, values.iter().map(|&id| id as i32).collect()))
        };
        (0..config.num_layers()).filter_map(ids).collect()
    };
    Replay {
        blocks: of("blocks"),
        experts: of("experts"),
    }
}
