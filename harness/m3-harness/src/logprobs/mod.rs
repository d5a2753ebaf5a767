//! Log-probabilities of a checkpoint: tokens → pack → model → report, dump and gradients.

mod dump;
mod replay;
mod report;
mod tokens;

use std::path::{Path, PathBuf};

use m3_checkpoint::Checkpoint;
use m3_comm::Solo;
use m3_kernels::{Arena, Backend, Tensor, ops};
use m3_model::layer::Saved;
use m3_model::schedule::{self, Keep};
use m3_model::{Constants, Hooks, Model, Pack, Scores, Step};
use m3_rollout::Engine;
use m3_spec::dtype::DType;

use crate::error::{Error, Result};
use crate::files;
use dump::Dump;
pub use report::Report;
pub use tokens::Tokens;

/// Activation memory is taken in pieces of this size.
const CHUNK_BYTES: usize = 16 << 20;

/// Which side computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The trainer: whole sequences, packed.
    Trainer,
    /// The rollout engine: so many tokens of every sequence at once, the rest one at a time through the cache.
    Rollout {
        /// Tokens of the first pass; none takes half of the longest sequence.
        prefill: Option<usize>,
    },
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Trainer or rollout engine.
    pub side: Side,
    /// Directory of a released-format checkpoint.
    pub model: PathBuf,
    /// JSON file of token ids.
    pub tokens: PathBuf,
    /// Storage dtype of weights and activations.
    pub dtype: DType,
    /// Divisor of the logits.
    pub temperature: f32,
    /// Whether gradients of the mean nll are computed.
    pub backward: bool,
    /// Whether activations are recomputed for the gradients instead of kept.
    pub recompute: bool,
    /// Where selections, last logits and small gradients go, as safetensors.
    pub dump: Option<PathBuf>,
    /// Selections to force, as safetensors.
    pub replay: Option<PathBuf>,
    /// Where the report goes, as JSON.
    pub json: Option<PathBuf>,
}

/// Runs the request on a device.
///
/// # Errors
/// [`Error::Input`] for what does not fit, [`Error::Write`] for outputs, [`Error::NonFinite`], what the device reports.
pub fn run<B: Backend>(backend: &B, request: &Request) -> Result<Report> {
    request.check()?;
    let tokens = Tokens::read(&request.tokens)?;
    let checkpoint = Checkpoint::open(&request.model)?;
    let report = match request.side {
        Side::Trainer => trainer(backend, request, &tokens, &checkpoint)?,
        Side::Rollout { prefill } => rollout(backend, request, &tokens, &checkpoint, prefill)?,
    };
    if let Some(path) = &request.json {
        files::write_whole(path, report.json()?.as_bytes())?;
    }
    Ok(report)
}

/// Scores with the rollout engine.
fn rollout<B: Backend>(
    backend: &B,
    request: &Request,
    tokens: &Tokens,
    checkpoint: &Checkpoint,
    prefill: Option<usize>,
) -> Result<Report> {
    let stream = backend.stream();
    let config = &checkpoint.config().text;
    let longest = tokens.lengths().into_iter().max().unwrap_or(0);
    let positions = longest.clamp(1, config.max_position_embeddings);
    let mut engine = Engine::new(backend, &stream, config, request.dtype, positions)?;
    engine.model.load(backend, &stream, checkpoint)?;
    let prefill = prefill.unwrap_or(longest.div_ceil(2));
    let (sequences, temperature) = (&tokens.sequences, request.temperature);
    let scored = engine.log_probs(backend, &stream, sequences, temperature, prefill)?;
    // A row a token, as the pack has them; the last one of a sequence scores nothing.
    let rows: Vec<f32> = scored
        .iter()
        .flat_map(|row| row.iter().copied().chain([0.0]))
        .collect();
    Report::new(tokens, &rows)
}

/// Scores with the trainer, and runs its gradients.
fn trainer<B: Backend>(
    backend: &B,
    request: &Request,
    tokens: &Tokens,
    checkpoint: &Checkpoint,
) -> Result<Report> {
    let stream = backend.stream();
    let config = checkpoint.config().text.clone();
    let mut pack = Pack::new(backend, &stream, &config, &tokens.sequences)?;
    if let Some(path) = &request.replay {
        pack.replay = replay::read(backend, &stream, path, &config, &tokens.lengths())?;
    }
    let model = Model::zeros(backend, Solo, &config, request.dtype, request.backward)?;
    model.load(backend, &stream, checkpoint)?;

    let constants = Constants::new(backend, &stream, &config, pack.longest)?;
    let temperature = Tensor::from_slice(backend, &stream, &[request.temperature], [1])?;
    let stages = schedule::layer_stages(config.num_layers());
    let step = Step {
        model: &model,
        backend,
        stream: &stream,
        constants: &constants,
        stages: &stages,
        temperature: &temperature,
        placed: None,
    };
    let mut watch = Watch {
        step: &step,
        lengths: tokens.lengths(),
        log_probs: Vec::new(),
        dump: request.dump.is_some().then(|| Dump::new(&tokens.lengths())),
        backward: request.backward,
    };
    let mut arena = Arena::new(CHUNK_BYTES, usize::MAX);
    let packs = [pack];
    step.run(
        &mut arena,
        &packs,
        &request.schedule(stages.len()),
        &mut watch,
    )?;
    let mut report = Report::new(tokens, &watch.log_probs)?;
    if request.backward {
        report.gradients = Some(report::gradients(&model, backend, &stream)?);
    }
    if let (Some(path), Some(mut dump)) = (&request.dump, watch.dump) {
        if request.backward {
            dump.gradients(&model, backend, &stream)?;
        }
        files::write_whole(path, &dump.bytes()?)?;
    }
    Ok(report)
}

impl Request {
    fn check(&self) -> Result<()> {
        m3_rollout::check_temperature(self.temperature)?;
        let trainer_only = [
            ("--backward", self.backward),
            ("--dump", self.dump.is_some()),
            ("--replay", self.replay.is_some()),
        ];
        let given = trainer_only.iter().find(|(_, given)| *given);
        if let (Side::Rollout { .. }, Some((flag, _))) = (self.side, given) {
            return Err(Error::Input(format!("{flag} needs --engine trainer")));
        }
        let outputs: Vec<&Path> = [&self.dump, &self.json]
            .into_iter()
            .flatten()
            .map(PathBuf::as_path)
            .collect();
        let inputs = [Some(&self.model), Some(&self.tokens), self.replay.as_ref()];
        let inputs: Vec<&Path> = inputs.into_iter().flatten().map(PathBuf::as_path).collect();
        files::check_distinct(&outputs, &inputs)?;
        outputs.into_iter().try_for_each(files::check_writable)
    }

    fn schedule(&self, stages: usize) -> Vec<schedule::Action> {
        match (self.backward, self.recompute) {
            (false, _) => schedule::forward_only(1, stages),
            (true, false) => schedule::sequential(1, stages, Keep::All),
            (true, true) => schedule::sequential(1, stages, Keep::Inputs),
        }
    }
}

/// Takes scores and selections out of the running step.
struct Watch<'a, B: Backend> {
    step: &'a Step<'a, B, Solo>,
    lengths: Vec<usize>,
    log_probs: Vec<f32>,
    dump: Option<Dump>,
    backward: bool,
}

impl<B: Backend> Hooks<B> for Watch<'_, B> {
    fn layer(&mut self, _: usize, layer: usize, saved: &Saved<B>) -> m3_model::Result<()> {
        match &mut self.dump {
            Some(dump) => dump.layer(self.step.backend, self.step.stream, layer, saved),
            None => Ok(()),
        }
    }

    fn scores(&mut self, _: usize, scores: &Scores<B>) -> m3_model::Result<Option<Tensor<B>>> {
        let (backend, stream) = (self.step.backend, self.step.stream);
        self.log_probs = scores.log_prob.to_vec(backend, stream)?;
        if let Some(dump) = &mut self.dump {
            let rows = last_rows(backend, stream, &scores.hidden, &self.lengths)?;
            let vocab = self.step.model.config.vocab_size;
            let logits = Tensor::zeros(backend, DType::F32, [self.lengths.len(), vocab])?;
            self.step.model.logits(backend, stream, &rows, &logits)?;
            dump.last_logits(logits.to_vec(backend, stream)?, vocab);
        }
        if !self.backward {
            return Ok(None);
        }
        let gradient = nll_gradient(&self.lengths);
        Ok(Some(Tensor::from_slice(
            backend,
            stream,
            &gradient,
            [gradient.len()],
        )?))
    }
}

/// The row of every sequence's last token.
fn last_rows<B: Backend>(
    backend: &B,
    stream: &B::Stream,
    hidden: &Tensor<B>,
    lengths: &[usize],
) -> m3_kernels::Result<Tensor<B>> {
    let rows = Tensor::zeros(backend, hidden.dtype(), [lengths.len(), hidden.shape()[1]])?;
    let mut end = 0;
    for (number, length) in lengths.iter().enumerate() {
        end += length;
        let (source, target) = (
            hidden.slice(0, end - 1..end),
            rows.slice(0, number..number + 1),
        );
        backend.copy(
            stream,
            &ops::Copy {
                source: &source,
                target: &target,
            },
        )?;
    }
    Ok(rows)
}

/// d(mean nll)/d(log_prob): −1/n at each of the n tokens that have a successor.
fn nll_gradient(lengths: &[usize]) -> Vec<f32> {
    let scored: usize = lengths.iter().map(|length| length - 1).sum();
    let share = -1.0 / scored.max(1) as f32;
    lengths
        .iter()
        .flat_map(|&length| (0..length).map(move |at| if at + 1 < length { share } else { 0.0 }))
        .collect()
}
