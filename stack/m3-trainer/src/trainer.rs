//! The GRPO step.

use std::ops::Range;

use m3_comm::Communicator;
use m3_kernels::{Arena, Backend, Tensor, ops};
use m3_model::layer::Saved;
use m3_model::schedule::{self, Keep};
use m3_model::{Constants, Hooks, Model, Pack, Scores, Slice, Step};
use m3_spec::dtype::DType;

use crate::batch::Batch;
use crate::error::Result;
use crate::optimizer::{Optimizer, Pace, StateStore};

/// Activation memory is taken in pieces of this size.
const CHUNK_BYTES: usize = 16 << 20;

/// What a run sets once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainerConfig {
    /// Divisor of the logits; the one that sampling used.
    pub temperature: f32,
    /// Lower clip of the ratio.
    pub eps_low: f32,
    /// Upper clip of the ratio.
    pub eps_high: f32,
    /// Which activations survive the forward pass.
    pub keep: Keep,
    /// Longest sequence that tables are laid out for.
    pub positions: usize,
}

/// What a step computed.
#[derive(Clone, Debug, Default)]
pub struct StepReport {
    /// Log-probability of every response token before the step, by sample.
    pub log_probs: Vec<Vec<f32>>,
    /// Entropy at every response token before the step, by sample.
    pub entropies: Vec<Vec<f32>>,
    /// Loss.
    pub loss: f64,
    /// Mean of old − new log-prob.
    pub ppo_kl: f64,
    /// Share of clipped tokens.
    pub clipfrac: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Whether the step was taken: not when the norm is not finite.
    pub taken: bool,
}

/// What a caller sees while a step runs.
pub trait Observer<B: Backend> {
    /// A layer of the pass that scores the samples has run; `saved` is valid during the call.
    ///
    /// # Errors
    /// Whatever the caller meets; the step ends with it.
    fn scored_layer(&mut self, micro_batch: usize, layer: usize, saved: &Saved<B>) -> Result<()> {
        let _ = (micro_batch, layer, saved);
        Ok(())
    }

    /// Gradients are complete and not yet clipped.
    ///
    /// # Errors
    /// Whatever the caller meets; the step ends with it.
    fn gradients(&mut self, slices: &[Slice<B>]) -> Result<()> {
        let _ = slices;
        Ok(())
    }
}

/// A model in training on a device.
pub struct Trainer<B: Backend, C, S> {
    /// The model.
    pub model: Model<B, C>,
    config: TrainerConfig,
    constants: Constants<B>,
    optimizer: Optimizer<B, S>,
    arena: Arena<B>,
    stages: Vec<Range<usize>>,
    temperature: Tensor<B>,
    steps: i32,
}

impl<B: Backend, C: Communicator<B>, S: StateStore<B>> Trainer<B, C, S> {
    /// Takes over a loaded model and its optimizer.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(
        backend: &B,
        stream: &B::Stream,
        model: Model<B, C>,
        optimizer: Optimizer<B, S>,
        config: TrainerConfig,
    ) -> Result<Self> {
        let constants = Constants::new(backend, stream, &model.config, config.positions)?;
        let temperature = Tensor::from_slice(backend, stream, &[config.temperature], [1])?;
        let stages = schedule::layer_stages(model.layers.len());
        let arena = Arena::new(CHUNK_BYTES, usize::MAX);
        Ok(Trainer {
            model,
            config,
            constants,
            optimizer,
            arena,
            stages,
            temperature,
            steps: 0,
        })
    }

    /// One step: score the samples with the weights as they are, run the loss and its gradients, update.
    ///
    /// # Errors
    /// What the observer meets or the device reports.
    pub fn step(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        batch: &Batch,
        learning_rate: f32,
        observer: &mut dyn Observer<B>,
    ) -> Result<StepReport> {
        let packs = self.packs(backend, stream, batch)?;
        let mut report = StepReport::default();
        let scored = self.score(backend, stream, &packs, observer)?;
        (report.log_probs, report.entropies) = scored.by_sample(batch);

        self.model.zero_gradients(backend, stream)?;
        let losses = Losses::new(backend, stream, batch, &scored, self.config)?;
        self.backward(backend, stream, &packs, &losses)?;
        observer.gradients(&self.model.slices())?;

        self.steps += 1;
        let pace = Pace {
            learning_rate: Tensor::from_slice(backend, stream, &[learning_rate], [1])?,
            step: Tensor::from_slice(backend, stream, &[self.steps], [1])?,
        };
        self.optimizer.step(backend, stream, &pace)?;
        losses.sum_into(backend, stream, &mut report)?;
        report.grad_norm = self.optimizer.norm().to_vec(backend, stream)?[0];
        report.taken = self.optimizer.finite().to_vec::<i32>(backend, stream)?[0] == 1;
        Ok(report)
    }

    fn packs(&self, backend: &B, stream: &B::Stream, batch: &Batch) -> Result<Vec<Pack<B>>> {
        (0..batch.micro_batches.len())
            .map(|micro_batch| {
                let sequences = batch.sequences(micro_batch);
                Ok(Pack::new(backend, stream, &self.model.config, &sequences)?)
            })
            .collect()
    }

    /// Log-probs and entropies of every row, with the weights as they are.
    fn score(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        packs: &[Pack<B>],
        observer: &mut dyn Observer<B>,
    ) -> Result<Scored> {
        let mut hooks = ScoreHooks {
            backend,
            stream,
            observer,
            scored: Scored::default(),
        };
        let actions = schedule::forward_only(packs.len(), self.stages.len());
        self.run(backend, stream, packs, &actions, &mut hooks)?;
        Ok(hooks.scored)
    }

    fn backward(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        packs: &[Pack<B>],
        losses: &Losses<B>,
    ) -> Result<()> {
        let actions = schedule::sequential(packs.len(), self.stages.len(), self.config.keep);
        self.run(
            backend,
            stream,
            packs,
            &actions,
            &mut LossHooks {
                backend,
                stream,
                losses,
            },
        )
    }

    fn run(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        packs: &[Pack<B>],
        actions: &[schedule::Action],
        hooks: &mut dyn Hooks<B>,
    ) -> Result<()> {
        let step = Step {
            model: &self.model,
            backend,
            stream,
            constants: &self.constants,
            stages: &self.stages,
            temperature: &self.temperature,
            placed: None,
        };
        Ok(step.run(&mut self.arena, packs, actions, hooks)?)
    }
}

/// Scores of every row, by micro-batch.
#[derive(Default)]
struct Scored {
    log_probs: Vec<Vec<f32>>,
    entropies: Vec<Vec<f32>>,
}

impl Scored {
    fn by_sample(&self, batch: &Batch) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let split = |rows: &[Vec<f32>]| {
            let mut samples = vec![Vec::new(); batch.samples.len()];
            for (micro_batch, rows) in rows.iter().enumerate() {
                for (number, values) in batch.responses(micro_batch, rows) {
                    samples[number] = values;
                }
            }
            samples
        };
        (split(&self.log_probs), split(&self.entropies))
    }
}

struct ScoreHooks<'a, B: Backend> {
    backend: &'a B,
    stream: &'a B::Stream,
    observer: &'a mut dyn Observer<B>,
    scored: Scored,
}

impl<B: Backend> Hooks<B> for ScoreHooks<'_, B> {
    fn layer(
        &mut self,
        micro_batch: usize,
        layer: usize,
        saved: &Saved<B>,
    ) -> m3_model::Result<()> {
        let seen = self.observer.scored_layer(micro_batch, layer, saved);
        seen.map_err(|error| m3_model::Error::Input(error.to_string()))
    }

    fn scores(&mut self, _: usize, scores: &Scores<B>) -> m3_model::Result<Option<Tensor<B>>> {
        self.scored
            .log_probs
            .push(scores.log_prob.to_vec(self.backend, self.stream)?);
        self.scored
            .entropies
            .push(scores.entropy.to_vec(self.backend, self.stream)?);
        Ok(None)
    }
}

/// Operands and results of the loss, by micro-batch.
struct Losses<B: Backend> {
    parts: Vec<LossPart<B>>,
    eps_low: f32,
    eps_high: f32,
}

struct LossPart<B: Backend> {
    old_log_prob: Tensor<B>,
    advantage: Tensor<B>,
    weight: Tensor<B>,
    loss: Tensor<B>,
    d_log_prob: Tensor<B>,
    stats: Tensor<B>,
}

impl<B: Backend> Losses<B> {
    fn new(
        backend: &B,
        stream: &B::Stream,
        batch: &Batch,
        scored: &Scored,
        config: TrainerConfig,
    ) -> Result<Self> {
        let upload = |values: &[f32]| Tensor::from_slice(backend, stream, values, [values.len()]);
        let parts = scored
            .log_probs
            .iter()
            .enumerate()
            .map(|(micro_batch, old)| {
                Ok(LossPart {
                    old_log_prob: upload(old)?,
                    advantage: upload(&batch.row_advantages(micro_batch))?,
                    weight: upload(&batch.row_weights(micro_batch))?,
                    loss: Tensor::zeros(backend, DType::F32, [1])?,
                    d_log_prob: Tensor::zeros(backend, DType::F32, [old.len()])?,
                    stats: Tensor::zeros(backend, DType::F32, [2])?,
                })
            });
        let parts = parts.collect::<Result<_>>()?;
        Ok(Losses {
            parts,
            eps_low: config.eps_low,
            eps_high: config.eps_high,
        })
    }

    /// Weights already hold every denominator, so the parts add up.
    fn sum_into(&self, backend: &B, stream: &B::Stream, report: &mut StepReport) -> Result<()> {
        for part in &self.parts {
            report.loss += f64::from(part.loss.to_vec::<f32>(backend, stream)?[0]);
            let stats = part.stats.to_vec::<f32>(backend, stream)?;
            report.ppo_kl += f64::from(stats[0]);
            report.clipfrac += f64::from(stats[1]);
        }
        Ok(())
    }
}

struct LossHooks<'a, B: Backend> {
    backend: &'a B,
    stream: &'a B::Stream,
    losses: &'a Losses<B>,
}

impl<B: Backend> Hooks<B> for LossHooks<'_, B> {
    fn scores(
        &mut self,
        micro_batch: usize,
        scores: &Scores<B>,
    ) -> m3_model::Result<Option<Tensor<B>>> {
        let part = &self.losses.parts[micro_batch];
        let args = ops::GrpoLoss {
            log_prob: &scores.log_prob,
            old_log_prob: &part.old_log_prob,
            advantage: &part.advantage,
            weight: &part.weight,
            loss: &part.loss,
            d_log_prob: &part.d_log_prob,
            stats: &part.stats,
            eps_low: self.losses.eps_low,
            eps_high: self.losses.eps_high,
        };
        self.backend.grpo_loss(self.stream, &args)?;
        Ok(Some(part.d_log_prob.clone()))
    }
}
