//! Runs a schedule: the one place where layers are called.

use std::ops::Range;

use m3_comm::Communicator;
use m3_kernels::tensor::Mark;
use m3_kernels::{Arena, Backend, Tensor, ops};
use m3_spec::dtype::DType;

use crate::context::{Constants, Context, Pack, Placed};
use crate::error::{Error, Result};
use crate::layer::{Output, Saved};
use crate::model::Model;
use crate::norm::{self, Stream};
use crate::schedule::{Action, Work};

/// What a forward pass says about the next tokens.
pub struct Scores<B: Backend> {
    /// F32 `[T]`, log-probability of the next token; 0 where there is none.
    pub log_prob: Tensor<B>,
    /// F32 `[T]`, log of the sum of exponentials of the tempered logits.
    pub lse: Tensor<B>,
    /// F32 `[T]`, entropy in nats.
    pub entropy: Tensor<B>,
    /// `[T, H]`, rows behind the final norm.
    pub hidden: Tensor<B>,
}

/// What a caller sees of a step while it runs.
pub trait Hooks<B: Backend> {
    /// A layer has run forward; `saved` is valid during the call.
    ///
    /// # Errors
    /// Whatever the caller meets; the step ends with it.
    fn layer(&mut self, micro_batch: usize, layer: usize, saved: &Saved<B>) -> Result<()> {
        let _ = (micro_batch, layer, saved);
        Ok(())
    }

    /// The scores of a micro-batch stand. Returns d(loss)/d(log_prob) F32 `[T]` when its gradients are to run.
    ///
    /// # Errors
    /// Whatever the caller meets; the step ends with it.
    fn scores(&mut self, micro_batch: usize, scores: &Scores<B>) -> Result<Option<Tensor<B>>>;
}

/// Everything a step runs with.
pub struct Step<'a, B: Backend, C> {
    /// The model.
    pub model: &'a Model<B, C>,
    /// Where it runs.
    pub backend: &'a B,
    /// Queue.
    pub stream: &'a B::Stream,
    /// Tables and tiles.
    pub constants: &'a Constants<B>,
    /// Layers of every stage.
    pub stages: &'a [Range<usize>],
    /// F32 `[1]`.
    pub temperature: &'a Tensor<B>,
    /// Where the rows stand in a cache, when they continue cached sequences; forward alone.
    pub placed: Option<Placed<'a, B>>,
}

/// A micro-batch between its first and its last action.
struct Flight<B: Backend> {
    start: Mark,
    /// Stream before every stage.
    inputs: Vec<Stream<B>>,
    /// What every stage's gradients read.
    saved: Vec<Option<Vec<Saved<B>>>>,
    head: Option<(norm::Saved<B>, Scores<B>)>,
    d_log_prob: Option<Tensor<B>>,
    /// Gradient of the stream behind the stage that runs backward next, and memory for the one before it.
    gradients: Option<[Tensor<B>; 2]>,
    /// Where the arena stood before the stage was recomputed.
    recomputed_from: Option<Mark>,
}

/// What the schedule still asks of a stage after its forward pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Retain {
    Everything,
    Input,
    Nothing,
}

impl<B: Backend, C: Communicator<B>> Step<'_, B, C> {
    /// Runs `schedule` over `packs`, one pack a micro-batch. Gradients are added to the model's buffers.
    ///
    /// # Errors
    /// [`Error::Input`] when the schedule does not fit packs, stages or the model; what a hook or the device reports.
    pub fn run(
        &self,
        arena: &mut Arena<B>,
        packs: &[Pack<B>],
        schedule: &[Action],
        hooks: &mut dyn Hooks<B>,
    ) -> Result<()> {
        self.check(packs, schedule)?;
        let mut flights: Vec<Option<Flight<B>>> = packs.iter().map(|_| None).collect();
        for (number, &action) in schedule.iter().enumerate() {
            let rest = &schedule[number + 1..];
            let start = arena.mark();
            let flight = flights[action.micro_batch]
                .get_or_insert_with(|| Flight::new(start, self.stages.len()));
            let mut ctx = Context {
                backend: self.backend,
                stream: self.stream,
                arena: &mut *arena,
                pack: &packs[action.micro_batch],
                constants: self.constants,
                placed: self.placed,
                dtype: self.model.dtype,
            };
            match action.work {
                Work::Forward => self.forward(&mut ctx, flight, action, rest, hooks)?,
                Work::Recompute => self.recompute(&mut ctx, flight, action.stage)?,
                Work::Backward => self.backward(&mut ctx, flight, action.stage)?,
            }
            if rest
                .iter()
                .all(|later| later.micro_batch != action.micro_batch)
            {
                let landed = flights[action.micro_batch].take();
                if let (Some(landed), true) = (landed, flights.iter().all(Option::is_none)) {
                    arena.reset(landed.start);
                }
            }
        }
        Ok(())
    }

    fn check(&self, packs: &[Pack<B>], schedule: &[Action]) -> Result<()> {
        let (batches, stages) = (packs.len(), self.stages.len());
        let refused = |what: String| Err(Error::Input(what));
        if let Some(action) = schedule
            .iter()
            .find(|action| action.micro_batch >= batches || action.stage >= stages)
        {
            return refused(format!(
                "{action:?} leaves {batches} micro-batches and {stages} stages"
            ));
        }
        let covered: Vec<usize> = self.stages.iter().cloned().flatten().collect();
        if covered != (0..self.model.layers.len()).collect::<Vec<_>>() {
            let layers = self.model.layers.len();
            return refused(format!(
                "stages {:?} do not cover {layers} layers",
                self.stages
            ));
        }
        let trains = schedule.iter().any(|action| action.work == Work::Backward);
        if trains && self.model.embedding.grad.is_none() {
            return refused("the model was built without gradients".into());
        }
        if trains && self.placed.is_some() {
            return refused("gradients do not run through a cache".into());
        }
        Ok(())
    }

    fn forward(
        &self,
        ctx: &mut Context<'_, B>,
        flight: &mut Flight<B>,
        action: Action,
        rest: &[Action],
        hooks: &mut dyn Hooks<B>,
    ) -> Result<()> {
        let Action {
            micro_batch, stage, ..
        } = action;
        let retain = retain(action, rest);
        if stage == 0 {
            flight.inputs.push(self.embed(ctx)?);
        }
        let input = &flight.inputs[stage];
        let out = match flight.inputs.get(stage.wrapping_sub(1)) {
            // Nobody reads the stream before the previous stage again: its memory carries the next one.
            Some(Stream {
                residual,
                branch: Some(branch),
            }) if retain == Retain::Nothing => Output {
                residual: residual.clone(),
                branch: branch.clone(),
            },
            _ => Output::new(ctx, self.model.config.hidden_size)?,
        };
        let mark = ctx.arena.mark();
        let mut seen = |layer, saved: &Saved<B>| hooks.layer(micro_batch, layer, saved);
        let saved = self.layers(ctx, stage, input, &out, &mut seen)?;
        if retain == Retain::Everything {
            flight.saved[stage] = Some(saved);
        } else {
            ctx.arena.reset(mark);
        }
        let stream = out.stream();
        if stage + 1 == self.stages.len() {
            let (normed, scores) = self.score(ctx, &stream)?;
            flight.d_log_prob = hooks.scores(micro_batch, &scores)?;
            flight.head = Some((normed, scores));
        }
        flight.inputs.push(stream);
        Ok(())
    }

    fn recompute(
        &self,
        ctx: &mut Context<'_, B>,
        flight: &mut Flight<B>,
        stage: usize,
    ) -> Result<()> {
        self.begin_backward(ctx, flight)?;
        flight.recomputed_from = Some(ctx.arena.mark());
        let out = Output::new(ctx, self.model.config.hidden_size)?;
        let saved = self.layers(ctx, stage, &flight.inputs[stage], &out, &mut |_, _| Ok(()))?;
        flight.saved[stage] = Some(saved);
        Ok(())
    }

    fn backward(
        &self,
        ctx: &mut Context<'_, B>,
        flight: &mut Flight<B>,
        stage: usize,
    ) -> Result<()> {
        self.begin_backward(ctx, flight)?;
        let before = flight.recomputed_from.take();
        let mark = before.unwrap_or_else(|| ctx.arena.mark());
        let saved = flight.saved[stage].take();
        let (Some(saved), Some([d_out, dx])) = (saved, &mut flight.gradients) else {
            return Err(Error::Input(format!(
                "stage {stage} runs backward before forward"
            )));
        };
        for (layer, saved) in self.model.layers[self.stages[stage].clone()]
            .iter()
            .zip(&saved)
            .rev()
        {
            let mark = ctx.arena.mark();
            layer.backward(ctx, saved, d_out, dx)?;
            std::mem::swap(d_out, dx);
            ctx.arena.reset(mark);
        }
        if let (0, Some(d_table)) = (stage, &self.model.embedding.grad) {
            let args = ops::EmbeddingBackward {
                ids: &ctx.pack.ids,
                d_out,
                d_table,
            };
            self.backend.embedding_backward(self.stream, &args)?;
        }
        ctx.arena.reset(mark);
        Ok(())
    }

    /// Runs the head's gradients if they have not run. Their memory outlives every stage's, so this comes before any mark.
    fn begin_backward(&self, ctx: &mut Context<'_, B>, flight: &mut Flight<B>) -> Result<()> {
        if flight.gradients.is_none() {
            flight.gradients = Some(self.head_backward(ctx, flight)?);
        }
        Ok(())
    }

    fn embed(&self, ctx: &mut Context<'_, B>) -> Result<Stream<B>> {
        let residual = ctx.activation([ctx.tokens(), self.model.config.hidden_size])?;
        let table = &self.model.embedding.value;
        let args = ops::Embedding {
            ids: &ctx.pack.ids,
            table,
            out: &residual,
        };
        self.backend.embedding(self.stream, &args)?;
        Ok(Stream {
            residual,
            branch: None,
        })
    }

    fn layers(
        &self,
        ctx: &mut Context<'_, B>,
        stage: usize,
        input: &Stream<B>,
        out: &Output<B>,
        seen: &mut dyn FnMut(usize, &Saved<B>) -> Result<()>,
    ) -> Result<Vec<Saved<B>>> {
        let range = self.stages[stage].clone();
        let mut saved = Vec::with_capacity(range.len());
        let mut inner: Option<Stream<B>> = None;
        for number in range.clone() {
            let last = number + 1 == range.end;
            let own = if last {
                None
            } else {
                Some(Output::new(ctx, self.model.config.hidden_size)?)
            };
            let x = inner.as_ref().unwrap_or(input);
            let layer = self.model.layers[number].forward(ctx, x, own.as_ref().unwrap_or(out))?;
            seen(number, &layer)?;
            saved.push(layer);
            inner = own.map(|own| own.stream());
        }
        Ok(saved)
    }

    fn score(
        &self,
        ctx: &mut Context<'_, B>,
        stream: &Stream<B>,
    ) -> Result<(norm::Saved<B>, Scores<B>)> {
        let eps = self.model.config.rms_norm_eps as f32;
        let normed = norm::forward(ctx, stream, None, &self.model.norm, eps)?;
        let tokens = ctx.tokens();
        let scores = Scores {
            log_prob: ctx.alloc(DType::F32, [tokens])?,
            lse: ctx.alloc(DType::F32, [tokens])?,
            entropy: ctx.alloc(DType::F32, [tokens])?,
            hidden: normed.out.clone(),
        };
        let args = ops::LogProb {
            x: &normed.out,
            weight: &self.model.head.value,
            targets: &ctx.pack.targets,
            temperature: self.temperature,
            log_prob: &scores.log_prob,
            lse: &scores.lse,
            entropy: &scores.entropy,
        };
        self.backend.log_prob(self.stream, &args)?;
        Ok((normed, scores))
    }

    /// Gradient of the stream behind the last layer, and memory for the one before it.
    fn head_backward(
        &self,
        ctx: &mut Context<'_, B>,
        flight: &Flight<B>,
    ) -> Result<[Tensor<B>; 2]> {
        let shape = [ctx.tokens(), self.model.config.hidden_size];
        let gradients = [ctx.activation(shape)?, ctx.activation(shape)?];
        let (Some((normed, scores)), Some(d_log_prob), Some(d_weight)) =
            (&flight.head, &flight.d_log_prob, &self.model.head.grad)
        else {
            return Err(Error::Input(
                "gradients run without a loss; the scores hook gave none".into(),
            ));
        };
        let mark = ctx.arena.mark();
        let d_hidden = ctx.activation(shape)?;
        let args = ops::LogProbBackward {
            x: &normed.out,
            weight: &self.model.head.value,
            targets: &ctx.pack.targets,
            temperature: self.temperature,
            lse: &scores.lse,
            d_log_prob,
            dx: &d_hidden,
            d_weight,
        };
        self.backend.log_prob_backward(self.stream, &args)?;
        norm::backward(
            ctx,
            normed,
            &self.model.norm,
            &d_hidden,
            None,
            &gradients[0],
        )?;
        ctx.arena.reset(mark);
        Ok(gradients)
    }
}

impl<B: Backend> Flight<B> {
    fn new(start: Mark, stages: usize) -> Self {
        Flight {
            start,
            inputs: Vec::new(),
            saved: (0..stages).map(|_| None).collect(),
            head: None,
            d_log_prob: None,
            gradients: None,
            recomputed_from: None,
        }
    }
}

fn retain(action: Action, rest: &[Action]) -> Retain {
    let asks = |work, stage: Option<usize>| {
        rest.iter().any(|later| {
            later.micro_batch == action.micro_batch
                && later.work == work
                && stage.is_none_or(|stage| later.stage == stage)
        })
    };
    if !asks(Work::Backward, None) {
        Retain::Nothing
    } else if asks(Work::Recompute, Some(action.stage)) {
        Retain::Input
    } else {
        Retain::Everything
    }
}
