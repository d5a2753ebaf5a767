//! The engine: prefill and decode over a paged cache, one batch of sequences at a time.

use std::ops::Range;

use m3_comm::Solo;
use m3_kernels::{Arena, Backend, Tensor, ops};
use m3_model::layer::Saved;
use m3_model::schedule;
use m3_model::{Constants, Hooks, Model, Pack, Placed, Scores, Step, check_sequence};
use m3_spec::config::TextConfig;
use m3_spec::dtype::DType;

use crate::cache::PagedCache;
use crate::error::{Error, Result};

/// Activation memory is taken in pieces of this size.
const CHUNK_BYTES: usize = 16 << 20;

/// Rows of one forward pass: longer prompts are prefilled in several.
const ROWS_MAX: usize = 16_384;

/// How tokens are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits, above 0.
    pub temperature: f32,
    /// Probability mass that is kept; 1 keeps all.
    pub top_p: f32,
    /// Ids that are kept; 0 keeps all.
    pub top_k: usize,
    /// Tokens after which a response ends.
    pub max_new_tokens: usize,
    /// Tokens that end a response.
    pub stop: Vec<i64>,
    /// Seed of the run.
    pub seed: u64,
}

/// A prompt and its place in the random stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Token ids, at least one.
    pub tokens: Vec<i64>,
    /// Running number of the prompt in the run.
    pub number: u32,
    /// Sample of the prompt.
    pub sample: u32,
}

/// A sampled continuation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Generation {
    /// Sampled ids.
    pub tokens: Vec<i64>,
    /// Log-probability of every sampled id in the tempered distribution, when it was drawn.
    pub log_probs: Vec<f32>,
    /// Experts of every token that was an input: prompt and response but for the last.
    pub routes: Routes,
    /// Weights that sampled it.
    pub weight_version: u64,
}

/// Expert ids of a sequence's tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Routes {
    /// Layers that route, ascending.
    pub layers: Vec<usize>,
    /// Ids of every layer: `[tokens, k]`, ascending within a token.
    pub expert_ids: Vec<Vec<i32>>,
}

/// A model that only runs forward, with a cache.
pub struct Engine<B: Backend> {
    /// Weights, in storage of their own.
    pub model: Model<B, Solo>,
    pub(crate) weight_version: u64,
    constants: Constants<B>,
    arena: Arena<B>,
    stages: Vec<Range<usize>>,
}

/// Rows of one forward pass.
#[derive(Default)]
struct Rows {
    ids: Vec<i32>,
    positions: Vec<i32>,
    targets: Vec<i32>,
    slots: Vec<i32>,
}

impl Rows {
    /// Tokens `range` of a sequence.
    fn push(&mut self, slot: usize, tokens: &[i64], range: Range<usize>) {
        for position in range {
            self.ids.push(tokens[position] as i32);
            self.positions.push(position as i32);
            self.targets
                .push(tokens.get(position + 1).map_or(-1, |&next| next as i32));
            self.slots.push(slot as i32);
        }
    }
}

impl<B: Backend> Engine<B> {
    /// An engine with zero weights for sequences of up to `positions` tokens.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(
        backend: &B,
        stream: &B::Stream,
        config: &TextConfig,
        dtype: DType,
        positions: usize,
    ) -> Result<Self> {
        let model = Model::zeros(backend, Solo, config, dtype, false)?;
        let constants = Constants::new(backend, stream, config, positions)?;
        let stages = schedule::layer_stages(config.num_layers());
        let arena = Arena::new(CHUNK_BYTES, usize::MAX);
        Ok(Engine {
            model,
            weight_version: 0,
            constants,
            arena,
            stages,
        })
    }

    /// Version of the weights: 0 before the first update, then 1, 2, …
    pub fn weight_version(&self) -> u64 {
        self.weight_version
    }

    /// Continues every prompt. A prompt's tokens and log-probs do not depend on the others of the batch.
    ///
    /// # Errors
    /// [`Error::Input`] for a prompt or a setting that does not fit; what the device reports.
    pub fn generate(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        prompts: &[Prompt],
        sampling: &Sampling,
    ) -> Result<Vec<Generation>> {
        self.check(prompts, sampling)?;
        let longest = prompts
            .iter()
            .map(|prompt| prompt.tokens.len())
            .max()
            .unwrap_or(0);
        let room = longest + sampling.max_new_tokens;
        let config = self.model.config.clone();
        let mut cache = PagedCache::new(backend, &config, self.model.dtype, prompts.len(), room)?;
        let draw = Draw::new(backend, stream, sampling)?;
        let mut sequences: Vec<Sequence> = prompts.iter().map(Sequence::new).collect();
        for sequence in &mut sequences {
            sequence.generation.weight_version = self.weight_version;
        }
        if sampling.max_new_tokens == 0 {
            return Ok(sequences
                .into_iter()
                .map(|sequence| sequence.generation)
                .collect());
        }
        let mut active: Vec<usize> = (0..prompts.len()).collect();
        while !active.is_empty() {
            for batch in batches(&active, &sequences) {
                let mut rows = Rows::default();
                for &slot in batch {
                    let sequence = &sequences[slot];
                    cache.reserve(slot, sequence.tokens.len())?;
                    rows.push(
                        slot,
                        &sequence.tokens,
                        sequence.cached..sequence.tokens.len(),
                    );
                }
                cache.upload(backend, stream)?;
                let drawn =
                    self.draw(backend, stream, &cache, &rows, batch, &mut sequences, &draw)?;
                for ((&slot, token), log_prob) in batch.iter().zip(drawn.0).zip(drawn.1) {
                    sequences[slot].take(token, log_prob);
                }
            }
            active.retain(|&slot| {
                let done = sequences[slot].is_done(sampling);
                if done {
                    cache.release(slot);
                }
                !done
            });
        }
        Ok(sequences
            .into_iter()
            .map(|sequence| sequence.generation)
            .collect())
    }

    /// Log-probability of every token after the first: the first `prefill` tokens of a sequence in one pass, the rest
    /// one token at a time.
    ///
    /// # Errors
    /// [`Error::Input`] for a sequence that does not fit; what the device reports.
    pub fn log_probs(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        sequences: &[Vec<i64>],
        temperature: f32,
        prefill: usize,
    ) -> Result<Vec<Vec<f32>>> {
        if sequences.is_empty() {
            return Err(Error::Input(
                "there is no sequence; give at least one".into(),
            ));
        }
        for (number, sequence) in sequences.iter().enumerate() {
            self.fits(number, sequence, 0)?;
        }
        let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
        let config = self.model.config.clone();
        let mut cache =
            PagedCache::new(backend, &config, self.model.dtype, sequences.len(), longest)?;
        for (slot, sequence) in sequences.iter().enumerate() {
            cache.reserve(slot, sequence.len())?;
        }
        cache.upload(backend, stream)?;
        let temperature = Tensor::from_slice(backend, stream, &[temperature], [1])?;
        let mut scored: Vec<Vec<f32>> = vec![Vec::new(); sequences.len()];
        let mut from = 0;
        while from < longest {
            let to = if from == 0 { prefill.max(1) } else { from + 1 };
            let mut rows = Rows::default();
            for (slot, sequence) in sequences.iter().enumerate() {
                rows.push(
                    slot,
                    sequence,
                    from.min(sequence.len())..to.min(sequence.len()),
                );
            }
            let mut hooks = ScoreHooks {
                backend,
                stream,
                log_probs: Vec::new(),
            };
            self.forward(backend, stream, &cache, &rows, &temperature, &mut hooks)?;
            for ((&slot, &target), log_prob) in
                rows.slots.iter().zip(&rows.targets).zip(hooks.log_probs)
            {
                if target >= 0 {
                    scored[slot as usize].push(log_prob);
                }
            }
            from = to;
        }
        Ok(scored)
    }

    fn check(&self, prompts: &[Prompt], sampling: &Sampling) -> Result<()> {
        let refused = |what: String| Err(Error::Input(what));
        if prompts.is_empty() {
            return refused("there is no prompt".into());
        }
        let Sampling {
            temperature, top_p, ..
        } = *sampling;
        check_temperature(temperature)?;
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refused(format!("top_p {top_p} must be above 0 and at most 1"));
        }
        for (number, prompt) in prompts.iter().enumerate() {
            self.fits(number, &prompt.tokens, sampling.max_new_tokens)?;
        }
        Ok(())
    }

    /// The model can read the sequence and the engine's tables reach over it.
    fn fits(&self, number: usize, tokens: &[i64], more: usize) -> Result<()> {
        check_sequence(&self.model.config, number, tokens)?;
        let (total, limit) = (
            tokens.len().saturating_add(more),
            self.constants.cos_sin.shape()[0],
        );
        if total > limit {
            let what =
                format!("sequence {number}: {total} tokens exceed the engine's {limit} positions");
            return Err(Error::Input(what));
        }
        Ok(())
    }

    /// Runs the rows and draws one token for every sequence of the batch.
    fn draw(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        cache: &PagedCache<B>,
        rows: &Rows,
        batch: &[usize],
        sequences: &mut [Sequence],
        draw: &Draw<B>,
    ) -> Result<(Vec<i32>, Vec<f32>)> {
        let lengths: Vec<usize> = batch
            .iter()
            .map(|&slot| sequences[slot].tokens.len() - sequences[slot].cached)
            .collect();
        let counters: Vec<i32> = batch
            .iter()
            .flat_map(|&slot| {
                let Sequence {
                    number,
                    sample,
                    tokens,
                    ..
                } = &sequences[slot];
                [*number as i32, *sample as i32, tokens.len() as i32]
            })
            .collect();
        let mut hooks = DrawHooks {
            backend,
            stream,
            draw,
            lengths,
            counters,
            head: self.model.head.value.clone(),
            routes: Vec::new(),
            tokens: Vec::new(),
            log_probs: Vec::new(),
        };
        self.forward(backend, stream, cache, rows, &draw.temperature, &mut hooks)?;
        for (layer, topk, ids) in &hooks.routes {
            let mut start = 0;
            for (&slot, length) in batch.iter().zip(&hooks.lengths) {
                sequences[slot].route(*layer, &ids[start * topk..(start + length) * topk]);
                start += length;
            }
        }
        Ok((hooks.tokens, hooks.log_probs))
    }

    fn forward(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        cache: &PagedCache<B>,
        rows: &Rows,
        temperature: &Tensor<B>,
        hooks: &mut dyn Hooks<B>,
    ) -> Result<()> {
        let pack = Pack::rows(backend, stream, [&rows.ids, &rows.positions, &rows.targets])?;
        let slots = Tensor::from_slice(backend, stream, &rows.slots, [rows.slots.len()])?;
        let step = Step {
            model: &self.model,
            backend,
            stream,
            constants: &self.constants,
            stages: &self.stages,
            temperature,
            placed: Some(Placed {
                cache: &cache.cache,
                slots: &slots,
            }),
        };
        let actions = schedule::forward_only(1, self.stages.len());
        Ok(step.run(&mut self.arena, &[pack], &actions, hooks)?)
    }
}

/// Coldest temperature: below it logits of some tens leave fp32.
const TEMPERATURE_MIN: f32 = 1e-4;

/// Refuses a temperature that has no distribution in fp32.
///
/// # Errors
/// [`Error::Input`] naming it.
pub fn check_temperature(temperature: f32) -> Result<()> {
    if temperature >= TEMPERATURE_MIN && temperature.is_finite() {
        return Ok(());
    }
    let what = format!("temperature {temperature} must be finite and at least {TEMPERATURE_MIN}");
    Err(Error::Input(what))
}

/// Groups of sequences whose new tokens fit one forward pass.
fn batches<'a>(active: &'a [usize], sequences: &[Sequence]) -> Vec<&'a [usize]> {
    let mut groups = Vec::new();
    let (mut start, mut rows) = (0, 0);
    for (at, &slot) in active.iter().enumerate() {
        let new = sequences[slot].tokens.len() - sequences[slot].cached;
        if at > start && rows + new > ROWS_MAX {
            groups.push(&active[start..at]);
            (start, rows) = (at, 0);
        }
        rows += new;
    }
    groups.push(&active[start..]);
    groups
}

/// A sequence that is being continued.
struct Sequence {
    number: u32,
    sample: u32,
    /// Prompt and response so far.
    tokens: Vec<i64>,
    /// Tokens whose keys and values are in the cache.
    cached: usize,
    generation: Generation,
}

impl Sequence {
    fn new(prompt: &Prompt) -> Self {
        let Prompt {
            tokens,
            number,
            sample,
        } = prompt.clone();
        Sequence {
            number,
            sample,
            tokens,
            cached: 0,
            generation: Generation::default(),
        }
    }

    fn take(&mut self, token: i32, log_prob: f32) {
        self.cached = self.tokens.len();
        self.tokens.push(i64::from(token));
        self.generation.tokens.push(i64::from(token));
        self.generation.log_probs.push(log_prob);
    }

    fn route(&mut self, layer: usize, ids: &[i32]) {
        let routes = &mut self.generation.routes;
        match routes.layers.iter().position(|&known| known == layer) {
            Some(at) => routes.expert_ids[at].extend_from_slice(ids),
            None => {
                routes.layers.push(layer);
                routes.expert_ids.push(ids.to_vec());
            }
        }
    }

    fn is_done(&self, sampling: &Sampling) -> bool {
        let response = &self.generation.tokens;
        let stopped = response
            .last()
            .is_some_and(|last| sampling.stop.contains(last));
        stopped || response.len() >= sampling.max_new_tokens
    }
}

/// Settings of the sampler, on the device.
struct Draw<B: Backend> {
    temperature: Tensor<B>,
    top_k: Tensor<B>,
    top_p: Tensor<B>,
    seed: u64,
}

impl<B: Backend> Draw<B> {
    fn new(backend: &B, stream: &B::Stream, sampling: &Sampling) -> Result<Self> {
        let top_k = i32::try_from(sampling.top_k).unwrap_or(0);
        Ok(Draw {
            temperature: Tensor::from_slice(backend, stream, &[sampling.temperature], [1])?,
            top_k: Tensor::from_slice(backend, stream, &[top_k], [1])?,
            top_p: Tensor::from_slice(backend, stream, &[sampling.top_p], [1])?,
            seed: sampling.seed,
        })
    }
}

struct ScoreHooks<'a, B: Backend> {
    backend: &'a B,
    stream: &'a B::Stream,
    log_probs: Vec<f32>,
}

impl<B: Backend> Hooks<B> for ScoreHooks<'_, B> {
    fn scores(&mut self, _: usize, scores: &Scores<B>) -> m3_model::Result<Option<Tensor<B>>> {
        self.log_probs = scores.log_prob.to_vec(self.backend, self.stream)?;
        Ok(None)
    }
}

/// Takes routes out of the running pass and draws from its last rows.
struct DrawHooks<'a, B: Backend> {
    backend: &'a B,
    stream: &'a B::Stream,
    draw: &'a Draw<B>,
    /// New rows of every sequence of the batch.
    lengths: Vec<usize>,
    counters: Vec<i32>,
    head: Tensor<B>,
    /// Layer, experts per token, ids of every row.
    routes: Vec<(usize, usize, Vec<i32>)>,
    tokens: Vec<i32>,
    log_probs: Vec<f32>,
}

impl<B: Backend> Hooks<B> for DrawHooks<'_, B> {
    fn layer(&mut self, _: usize, layer: usize, saved: &Saved<B>) -> m3_model::Result<()> {
        if let Some((expert_ids, _)) = saved.experts() {
            let ids = expert_ids.to_vec(self.backend, self.stream)?;
            self.routes.push((layer, expert_ids.shape()[1], ids));
        }
        Ok(())
    }

    fn scores(&mut self, _: usize, scores: &Scores<B>) -> m3_model::Result<Option<Tensor<B>>> {
        let (backend, stream) = (self.backend, self.stream);
        let (count, hidden) = (self.lengths.len(), scores.hidden.shape()[1]);
        let last = Tensor::zeros(backend, scores.hidden.dtype(), [count, hidden])?;
        let mut end = 0;
        for (number, length) in self.lengths.iter().enumerate() {
            end += length;
            let source = &scores.hidden.slice(0, end - 1..end);
            backend.copy(
                stream,
                &ops::Copy {
                    source,
                    target: &last.slice(0, number..number + 1),
                },
            )?;
        }
        let head = &self.head;
        let logits = Tensor::zeros(backend, DType::F32, [count, head.shape()[0]])?;
        let b = &head.transpose(0, 1);
        backend.gemm(
            stream,
            &ops::Gemm {
                a: &last,
                b,
                c: &logits,
                accumulate: false,
            },
        )?;
        let counters = Tensor::from_slice(backend, stream, &self.counters, [count, 3])?;
        let tokens = Tensor::zeros(backend, DType::I32, [count])?;
        let log_prob = Tensor::zeros(backend, DType::F32, [count])?;
        let args = ops::Sample {
            logits: &logits,
            temperature: &self.draw.temperature,
            top_k: &self.draw.top_k,
            top_p: &self.draw.top_p,
            counters: &counters,
            tokens: &tokens,
            log_prob: &log_prob,
            seed: self.draw.seed,
        };
        backend.sample(stream, &args)?;
        self.tokens = tokens.to_vec(backend, stream)?;
        self.log_probs = log_prob.to_vec(backend, stream)?;
        Ok(None)
    }
}
