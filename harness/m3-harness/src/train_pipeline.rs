//! From a recipe to a trained model: checkpoint → parameters → rollout → reward → advantage → packs → trainer step →
//! weight sync → gates, then the next step.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use m3_checkpoint::{Checkpoint, Synthetic, Writer, plan, synthetic};
use m3_comm::Solo;
use m3_gate::record::Device;
use m3_kernels::Backend;
use m3_model::layer::Saved;
use m3_model::schedule::Keep;
use m3_model::{Model, Slice};
use m3_report::TrainRun;
use m3_rollout::{Engine, Generation, Sampling, SyncReport, WeightSync};
use m3_spec::config::Config;
use m3_spec::dtype::DType;
use m3_trainer::{
    AdamWConfig, Batch, Observer, Optimizer, Resident, Sample, StepReport, Trainer, TrainerConfig,
};

use crate::error::{Error, Result};
use crate::files;
use crate::train::echo::Echo;
use crate::train::metrics::{Gap, Line, mean};
use crate::train::recipe::Recipe;
use crate::train::run_gates::RunGates;

/// Steps at either end that the reward gate looks at.
const REWARD_STEPS: usize = 5;

/// What a run is told besides its recipe.
#[derive(Clone, Debug)]
pub struct Options {
    /// Empty or absent directory that the run writes to.
    pub out: PathBuf,
    /// Seed of everything random.
    pub seed: u64,
}

/// What a run ends with.
pub struct Outcome {
    /// Verdicts of every gate.
    pub gates: RunGates,
    /// One line a step.
    pub metrics: Vec<Line>,
    /// Mean reward of the best policy that ignores its prompt.
    pub best_blind_reward: f64,
}

type ResidentTrainer<B> = Trainer<B, Solo, Resident<B>>;

/// Runs a recipe. `progress` is called after every step with its line.
///
/// # Errors
/// [`Error::Input`] for recipe and output, [`Error::Write`], what the device reports.
pub fn run<B: Backend>(
    backend: &B,
    recipe: &Recipe,
    options: &Options,
    progress: &mut dyn FnMut(usize, &Line),
) -> Result<Outcome> {
    recipe.check()?;
    recipe.check_model(&configured(recipe)?.text)?;
    let mut gates = RunGates::new(recipe, arch(backend), crate::today())?;
    let stream = backend.stream();
    let out = Output::create(&options.out)?;
    let checkpoint = prepare(recipe, options, &out)?;
    let mut run = Run::new(backend, &stream, recipe, options, &checkpoint)?;
    let mut metrics = Vec::new();
    let first = run.sync.update(backend, &stream, &mut run.engine)?;
    judge_sync(&mut gates, 0, &first);
    for step in 1..=recipe.train.steps {
        let line = run.step(backend, &stream, step, &mut gates)?;
        progress(step, &line);
        metrics.push(line);
        out.metrics(&metrics)?;
    }
    let rewards: Vec<f64> = metrics
        .iter()
        .filter_map(|line| line.get("rollout/raw_reward"))
        .collect();
    let ends = REWARD_STEPS.min(rewards.len());
    gates.judge("reward.first5", None, mean(rewards[..ends].iter().copied()));
    gates.judge(
        "reward.last5",
        None,
        mean(rewards[rewards.len() - ends..].iter().copied()),
    );
    save(
        backend,
        &stream,
        &run.trainer.model,
        &checkpoint,
        &out.dir.join("checkpoint"),
    )?;
    let prompts = (recipe.train.steps * recipe.data.prompts) as u32;
    let best_blind_reward = run.echo.best_blind_reward(prompts);
    let outcome = Outcome {
        gates,
        metrics,
        best_blind_reward,
    };
    out.finish(
        &outcome,
        &described(backend, recipe, options, &run.trainer.model),
    )?;
    Ok(outcome)
}

/// What the report says of a run besides its numbers.
struct Described {
    recipe: String,
    seed: u64,
    model: String,
    device: Device,
}

fn described<B: Backend>(
    backend: &B,
    recipe: &Recipe,
    options: &Options,
    model: &Model<B, Solo>,
) -> Described {
    let from = match &recipe.model.path {
        Some(path) => path.display().to_string(),
        None => format!("{} from random weights", recipe.model.config),
    };
    let weights: usize = model
        .slices()
        .iter()
        .map(|slice| slice.value.elements())
        .sum();
    Described {
        recipe: recipe.name.clone(),
        seed: options.seed,
        model: format!("{from}, {}, {weights} weights", recipe.model.dtype),
        device: Device {
            name: backend.name(),
            arch: arch(backend).into(),
            ..Device::default()
        },
    }
}

/// Both sides of a run and what lies between them.
struct Run<'a, B: Backend> {
    recipe: &'a Recipe,
    seed: u64,
    echo: Echo,
    trainer: ResidentTrainer<B>,
    engine: Engine<B>,
    sync: WeightSync<B>,
}

impl<'a, B: Backend> Run<'a, B> {
    fn new(
        backend: &B,
        stream: &B::Stream,
        recipe: &'a Recipe,
        options: &Options,
        checkpoint: &Checkpoint,
    ) -> Result<Self> {
        let config = &checkpoint.config().text;
        let dtype = recipe.dtype()?;
        let model = Model::zeros(backend, Solo, config, dtype, true)?;
        model.load(backend, stream, checkpoint)?;
        let train = &recipe.train;
        let adamw = AdamWConfig {
            beta1: train.beta1,
            beta2: train.beta2,
            weight_decay: train.weight_decay,
            max_norm: train.max_norm,
            ..AdamWConfig::default()
        };
        let optimizer =
            Optimizer::new(backend, stream, &model.slices(), adamw, Resident::default())?;
        let positions = config.max_position_embeddings.min(recipe.train.max_tokens);
        let settings = TrainerConfig {
            temperature: recipe.rollout.temperature,
            eps_low: train.eps_clip,
            eps_high: train.eps_clip_high,
            keep: if train.recompute {
                Keep::Inputs
            } else {
                Keep::All
            },
            positions,
        };
        let trainer = Trainer::new(backend, stream, model, optimizer, settings)?;
        let engine = Engine::new(backend, stream, config, dtype, positions)?;
        let slices = (trainer.model.slices(), engine.model.slices());
        let sync = WeightSync::new(slices.0, slices.1, recipe.sync.bucket_bytes)?;
        sync.fill_pattern(backend, stream, options.seed)?;
        let echo = Echo::new(options.seed, config.vocab_size);
        Ok(Run {
            recipe,
            seed: options.seed,
            echo,
            trainer,
            engine,
            sync,
        })
    }

    fn step(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        step: usize,
        gates: &mut RunGates,
    ) -> Result<Line> {
        let started = Instant::now();
        let (samples, generations) = self.rollout(backend, stream, step)?;
        let rollout_seconds = started.elapsed().as_secs_f64();
        let config = self.trainer.model.config.clone();
        let batch = Batch::new(samples, self.recipe.train.max_tokens, &config)?;
        let before = words(backend, stream, &self.trainer.model.slices())?;
        let mut watch = Watch {
            backend,
            stream,
            routes: BTreeMap::new(),
            norm: 0.0,
        };
        let rate = self.recipe.train.learning_rate;
        let report = self
            .trainer
            .step(backend, stream, &batch, rate, &mut watch)?;
        let train_seconds = started.elapsed().as_secs_f64() - rollout_seconds;
        let after = words(backend, stream, &self.trainer.model.slices())?;
        let version = self.engine.weight_version();
        let synced = self.sync.update(backend, stream, &mut self.engine)?;

        let gap = Gap::new(&batch.samples, &report);
        judge_sync(gates, step, &synced);
        let exact = self.recipe.train.true_on_policy;
        let gap_gate = if exact {
            "logprob_gap.exact"
        } else {
            "logprob_gap.bounded"
        };
        gates.judge(gap_gate, Some(step), gap.mean);
        gates.judge("kl_k3", Some(step), gap.k3);
        gates.judge("ppo_kl_first", Some(step), report.ppo_kl.abs());
        let norm = f64::from(report.grad_norm);
        gates.judge("grad_norm", Some(step), relative(norm, watch.norm));
        gates.judge("grad_norm.history", Some(step), norm);
        let (trained, frozen) = changed(&before, &after);
        gates.judge("changed_words.trained", Some(step), trained as f64);
        gates.judge("changed_words.frozen", Some(step), frozen as f64);
        let strays = batch
            .samples
            .iter()
            .filter(|sample| sample.weight_version != version)
            .count();
        gates.judge("weight_version", Some(step), strays as f64);
        if let Some(overlap) = watch.overlap(&batch, &generations) {
            gates.judge("route_overlap", Some(step), overlap);
        }
        let mut line = line(step, self.recipe, &batch, &report, &gap);
        line.put("perf/rollout_time", rollout_seconds);
        line.put("perf/actor_train_time", train_seconds);
        line.put("perf/step_time", started.elapsed().as_secs_f64());
        Ok(line)
    }

    fn rollout(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        step: usize,
    ) -> Result<(Vec<Sample>, Vec<Generation>)> {
        let Recipe { data, rollout, .. } = self.recipe;
        let first = ((step - 1) * data.prompts) as u32;
        let numbers = first..first + data.prompts as u32;
        let prompts: Vec<_> = numbers
            .flat_map(|number| (0..data.samples as u32).map(move |sample| (number, sample)))
            .map(|(number, sample)| self.echo.prompt(number, sample))
            .collect();
        let sampling = Sampling {
            temperature: rollout.temperature,
            top_p: rollout.top_p,
            top_k: rollout.top_k,
            max_new_tokens: rollout.max_new_tokens,
            stop: Vec::new(),
            seed: self.seed,
        };
        let generations = self.engine.generate(backend, stream, &prompts, &sampling)?;
        let sample = |(prompt, generation): (&m3_rollout::Prompt, &Generation)| Sample {
            group: prompt.number as usize,
            tokens: [prompt.tokens.as_slice(), &generation.tokens].concat(),
            prompt_len: prompt.tokens.len(),
            loss_mask: vec![true; generation.tokens.len()],
            rollout_log_probs: generation.log_probs.clone(),
            reward: Some(self.echo.reward(prompt.number, &generation.tokens)),
            weight_version: generation.weight_version,
        };
        let samples = prompts.iter().zip(&generations).map(sample).collect();
        Ok((samples, generations))
    }
}

/// The model that the recipe names.
fn configured(recipe: &Recipe) -> Result<Config> {
    if let Some(path) = &recipe.model.path {
        return Ok(Checkpoint::open(path)?.config().clone());
    }
    let name = &recipe.model.config;
    let config = Config::named(name).ok_or_else(|| {
        Error::Input(format!(
            "recipe {}: model.config {name:?} is not built in",
            recipe.name
        ))
    })?;
    Ok(Config::text_only(config.text))
}

/// Writes the initial weights of a built-in configuration, or opens the checkpoint that is named.
fn prepare(recipe: &Recipe, options: &Options, out: &Output) -> Result<Checkpoint> {
    if let Some(path) = &recipe.model.path {
        return Ok(Checkpoint::open(path)?);
    }
    let dir = out.dir.join("initial");
    let weights = Synthetic::new(options.seed, recipe.model.init_std);
    synthetic(&dir, &configured(recipe)?, &weights)?;
    Ok(Checkpoint::open(&dir)?)
}

/// Writes the model as a released-format checkpoint.
fn save<B: Backend>(
    backend: &B,
    stream: &B::Stream,
    model: &Model<B, Solo>,
    source: &Checkpoint,
    dir: &Path,
) -> Result<()> {
    let config = Config::text_only(source.config().text.clone()).to_released_json();
    let plan = plan(&model.config, model.dtype);
    let mut writer = Writer::create(dir, &config.to_string(), &plan, u64::MAX)?;
    for slice in model.slices() {
        if slice.value.dtype() == DType::BF16 {
            let values: Vec<half::bf16> = slice.value.to_vec(backend, stream)?;
            writer.write(&slice.name, m3_kernels::tensor::as_bytes(&values))?;
        } else {
            let values: Vec<f32> = slice.value.to_vec(backend, stream)?;
            writer.write(&slice.name, m3_kernels::tensor::as_bytes(&values))?;
        }
    }
    Ok(writer.finish()?)
}

fn judge_sync(gates: &mut RunGates, step: usize, report: &SyncReport) {
    gates.judge("weights_equal", Some(step), report.different().len() as f64);
}

fn relative(value: f64, reference: f64) -> f64 {
    if value == reference {
        0.0
    } else {
        (value - reference).abs() / reference.abs()
    }
}

/// Takes the gradients' norm in f64 and the trainer's own routes out of a step.
struct Watch<'a, B: Backend> {
    backend: &'a B,
    stream: &'a B::Stream,
    /// Expert ids `[T, k]` and k, by micro-batch and layer.
    routes: BTreeMap<(usize, usize), (Vec<i32>, usize)>,
    norm: f64,
}

impl<B: Backend> Observer<B> for Watch<'_, B> {
    fn scored_layer(
        &mut self,
        micro_batch: usize,
        layer: usize,
        saved: &Saved<B>,
    ) -> m3_trainer::Result<()> {
        if let Some((expert_ids, _)) = saved.experts() {
            let ids = expert_ids.to_vec(self.backend, self.stream)?;
            self.routes
                .insert((micro_batch, layer), (ids, expert_ids.shape()[1]));
        }
        Ok(())
    }

    fn gradients(&mut self, slices: &[Slice<B>]) -> m3_trainer::Result<()> {
        let mut squares = 0.0;
        for grad in slices.iter().filter_map(|slice| slice.grad.as_ref()) {
            let values: Vec<f32> = grad.to_vec(self.backend, self.stream)?;
            squares += values
                .iter()
                .map(|&x| f64::from(x) * f64::from(x))
                .sum::<f64>();
        }
        self.norm = squares.sqrt();
        Ok(())
    }
}

impl<B: Backend> Watch<'_, B> {
    /// Share of tokens and layers whose expert sets agree with the engine's; none without experts.
    fn overlap(&self, batch: &Batch, generations: &[Generation]) -> Option<f64> {
        let (mut equal, mut total) = (0u64, 0u64);
        for (&(micro_batch, layer), (ids, topk)) in &self.routes {
            let mut start = 0;
            for &number in &batch.micro_batches[micro_batch] {
                let tokens = batch.samples[number].tokens.len();
                let routes = &generations[number].routes;
                let at = routes.layers.iter().position(|&known| known == layer)?;
                // The last token was never an input of the engine.
                let trainer = ids[start * topk..(start + tokens - 1) * topk].chunks_exact(*topk);
                let engine = routes.expert_ids[at].chunks_exact(*topk);
                total += (tokens - 1) as u64;
                equal += trainer
                    .zip(engine)
                    .filter(|(mine, theirs)| mine == theirs)
                    .count() as u64;
                start += tokens;
            }
        }
        (total > 0).then(|| equal as f64 / total as f64)
    }
}

/// Stored words of every tensor, with its class and whether it is trained.
type Words = Vec<(String, bool, Vec<u32>)>;

fn words<B: Backend>(backend: &B, stream: &B::Stream, slices: &[Slice<B>]) -> Result<Words> {
    let word = |slice: &Slice<B>| -> Result<(String, bool, Vec<u32>)> {
        let values = if slice.value.dtype() == DType::BF16 {
            let values: Vec<half::bf16> = slice.value.to_vec(backend, stream)?;
            values.iter().map(|x| u32::from(x.to_bits())).collect()
        } else {
            let values: Vec<f32> = slice.value.to_vec(backend, stream)?;
            values.iter().map(|x| x.to_bits()).collect()
        };
        Ok((class(&slice.name), slice.trained, values))
    };
    slices.iter().map(word).collect()
}

/// A released name without its layer and expert numbers.
fn class(name: &str) -> String {
    name.split('.')
        .filter(|part| part.parse::<usize>().is_err())
        .collect::<Vec<_>>()
        .join(".")
}

/// Changed words of the trained class that changed least, and of all frozen tensors together.
fn changed(before: &Words, after: &Words) -> (usize, usize) {
    let mut trained: BTreeMap<&str, usize> = BTreeMap::new();
    let mut frozen = 0;
    for ((class, is_trained, old), (_, _, new)) in before.iter().zip(after) {
        let count = old.iter().zip(new).filter(|(old, new)| old != new).count();
        if *is_trained {
            *trained.entry(class).or_default() += count;
        } else {
            frozen += count;
        }
    }
    (trained.into_values().min().unwrap_or(0), frozen)
}

fn line(step: usize, recipe: &Recipe, batch: &Batch, report: &StepReport, gap: &Gap) -> Line {
    let samples = &batch.samples;
    let flat = |values: &[Vec<f32>]| mean(values.iter().flatten().map(|&x| f64::from(x)));
    let mut line = Line::default();
    line.put("train/step", step as f64);
    line.put("train/loss", report.loss);
    line.put("train/pg_loss", report.loss);
    line.put("train/ppo_kl", report.ppo_kl);
    line.put("train/pg_clipfrac", report.clipfrac);
    line.put("train/grad_norm", f64::from(report.grad_norm));
    line.put("train/lr-pg_0", f64::from(recipe.train.learning_rate));
    line.put("train/train_rollout_logprob_abs_diff", gap.mean);
    line.put("train/train_rollout_logprob_abs_diff_p999", gap.p999);
    line.put("train/train_rollout_logprob_abs_diff_max", gap.max);
    line.put("train/train_rollout_kl", gap.k3);
    line.put(
        "rollout/raw_reward",
        mean(samples.iter().filter_map(|s| s.reward).map(f64::from)),
    );
    line.put(
        "rollout/advantages",
        mean(batch.advantages.iter().map(|&x| f64::from(x))),
    );
    line.put("rollout/log_probs", flat(&report.log_probs));
    let engine = samples.iter().flat_map(|sample| &sample.rollout_log_probs);
    line.put(
        "rollout/rollout_log_probs",
        mean(engine.map(|&x| f64::from(x))),
    );
    line.put("rollout/entropy", flat(&report.entropies));
    line.put(
        "rollout/response_lengths",
        mean(samples.iter().map(|s| s.response_len() as f64)),
    );
    line.put(
        "rollout/total_lengths",
        mean(samples.iter().map(|s| s.tokens.len() as f64)),
    );
    line.put(
        "rollout/weight_version",
        mean(samples.iter().map(|s| s.weight_version as f64)),
    );
    line
}

fn arch<B: Backend>(backend: &B) -> &'static str {
    match backend.arch() {
        m3_kernels::launch::Arch::Cpu => "cpu",
        m3_kernels::launch::Arch::Sm(_) => "cuda",
    }
}

/// The run's directory.
struct Output {
    dir: PathBuf,
}

impl Output {
    fn create(dir: &Path) -> Result<Self> {
        let failed = |source| Error::Write {
            path: dir.to_path_buf(),
            source,
        };
        fs::create_dir_all(dir).map_err(failed)?;
        if fs::read_dir(dir).map_err(failed)?.next().is_some() {
            return Err(Error::file(
                dir,
                "is not empty; name another directory with --out",
            ));
        }
        // A directory that cannot be written to is found now, not after the first step.
        files::check_writable(&dir.join("metrics.jsonl"))?;
        Ok(Output {
            dir: dir.to_path_buf(),
        })
    }

    /// Appends the newest line.
    fn metrics(&self, lines: &[Line]) -> Result<()> {
        let path = self.dir.join("metrics.jsonl");
        let write = || -> std::io::Result<()> {
            let mut file = fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(&path)?;
            match lines.last() {
                Some(line) => writeln!(file, "{}", line.text()),
                None => Ok(()),
            }
        };
        write().map_err(|source| Error::Write {
            path: path.clone(),
            source,
        })
    }

    /// Writes the verdicts and the report.
    fn finish(&self, outcome: &Outcome, described: &Described) -> Result<()> {
        let verdicts = &outcome.gates.verdicts;
        let text = m3_gate::verdicts_json(verdicts);
        files::write_whole(&self.dir.join("verdicts.json"), text.as_bytes())?;
        let page = m3_report::train_html(&TrainRun {
            recipe: described.recipe.clone(),
            seed: described.seed,
            model: described.model.clone(),
            device: described.device.clone(),
            commit: None,
            steps: outcome.metrics.iter().map(Line::values).collect(),
            verdicts,
            best_blind_reward: Some(outcome.best_blind_reward),
        });
        files::write_whole(&self.dir.join("report.html"), page.as_bytes())
    }
}
