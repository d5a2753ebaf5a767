//! `m3 train`: the main job.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::{ValueEnum, value_parser};
use m3_harness::train::metrics::Line;
use m3_harness::train::recipe::Recipe;
use m3_harness::train_pipeline::{self, Options, Outcome};

use crate::commands::{seed, threads};
use crate::device::{Device, with_backend};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Train a model: rollout, reward, step, weight sync, gates
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Recipe (TOML); without one the built-in `echo`
    recipe: Option<PathBuf>,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, env = "M3_DEVICE", default_value_t)]
    device: Device,
    /// Worker threads of the CPU; one per core by default
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// Number of steps; the recipe's by default
    #[arg(long, value_parser = value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Directory for what the run writes; `runs/<recipe>-<utc>` by default
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Seed of everything random, decimal or 0x…
    #[arg(long, env = "M3_SEED", value_parser = seed)]
    seed: Option<u64>,
    /// Go on from the last finished step in --out (not built yet)
    #[arg(long)]
    resume: bool,
    /// What is trained for
    #[arg(long, value_enum, default_value_t)]
    objective: Objective,
}

/// Training objective.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Objective {
    /// Policy gradient over groups of samples.
    #[default]
    Grpo,
    /// Next token of given answers (not built yet).
    Sft,
    /// Next token of plain text (not built yet).
    Pretrain,
}

/// Seed of a run that names none.
const SEED: u64 = 0;

/// Runs the recipe; exit code 100 when a gate is red.
pub fn run(args: &Args, out: &mut Output) -> Result<Code, Failure> {
    if args.resume {
        return Err(Failure::usage(
            "--resume is not built yet; start anew with another --out",
        ));
    }
    if !matches!(args.objective, Objective::Grpo) {
        return Err(Failure::usage(
            "--objective grpo is the only one that is built",
        ));
    }
    let mut recipe = match &args.recipe {
        Some(path) => Recipe::read(path)?,
        None => Recipe::echo()?,
    };
    if let Some(steps) = args.steps {
        recipe.train.steps = usize::try_from(steps).unwrap_or(usize::MAX);
    }
    let directory = || PathBuf::from(format!("runs/{}-{}", recipe.name, m3_harness::stamp_utc()));
    let options = Options {
        out: args.out.clone().unwrap_or_else(directory),
        seed: args.seed.unwrap_or(SEED),
    };
    let mut progress = Progress::new(&recipe);
    let outcome = with_backend!(args.device, args.threads, backend => {
        train_pipeline::run(&backend, &recipe, &options, &mut |step, line| progress.step(step, line))?
    });
    summary(&recipe, &options, &outcome, out)?;
    Ok(if outcome.gates.is_green() {
        Code::Pass
    } else {
        Code::GateFailed
    })
}

fn summary(
    recipe: &Recipe,
    options: &Options,
    outcome: &Outcome,
    out: &mut Output,
) -> Result<(), Failure> {
    let rewards: Vec<f64> = outcome
        .metrics
        .iter()
        .filter_map(|line| line.get("rollout/raw_reward"))
        .collect();
    let ends = rewards.first().zip(rewards.last());
    if let Some((first, last)) = ends {
        let (steps, blind) = (rewards.len(), outcome.best_blind_reward);
        out.line(format_args!(
            "{}: {steps} steps, reward {first:.3} -> {last:.3} (best policy that ignores its prompt: {blind:.3}), seed {}",
            recipe.name, options.seed
        ))?;
    }
    out.line(outcome.gates.table().trim_end())?;
    let green = if outcome.gates.is_green() {
        "green"
    } else {
        "RED"
    };
    out.line(format_args!(
        "{green}; report in {}",
        options.out.join("report.html").display()
    ))
}

/// A line that is rewritten on a terminal; nothing in a pipe.
struct Progress {
    steps: usize,
    live: bool,
}

impl Progress {
    fn new(recipe: &Recipe) -> Self {
        Progress {
            steps: recipe.train.steps,
            live: std::io::stderr().is_terminal(),
        }
    }

    fn step(&mut self, step: usize, line: &Line) {
        if !self.live {
            return;
        }
        let value = |name| line.get(name).unwrap_or(f64::NAN);
        // Progress that nobody can read is no reason to stop.
        let _ = write!(
            std::io::stderr(),
            "\rstep {step}/{}  reward {:.3}  gap {:.1e}  grad norm {:.3}  {:.2} s/step ",
            self.steps,
            value("rollout/raw_reward"),
            value("train/train_rollout_logprob_abs_diff"),
            value("train/grad_norm"),
            value("perf/step_time"),
        );
        if step == self.steps {
            let _ = writeln!(std::io::stderr());
        }
    }
}
