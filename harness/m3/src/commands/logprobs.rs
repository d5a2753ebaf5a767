//! `m3 logprobs`: log-probabilities of a checkpoint.

use std::path::PathBuf;

use clap::ValueEnum;
use m3_harness::logprobs::{self, Report, Request, Side};

use crate::commands::threads;
use crate::device::{Device, Precision, with_backend};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Score token ids with a checkpoint of the released format
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Directory of the checkpoint
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// JSON file: {"input_ids": [..]} or {"sequences": [[..], ..]}, scored as one pack
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,
    /// Which side computes
    #[arg(long, value_enum, default_value_t)]
    engine: Engine,
    /// Storage dtype of weights and activations
    #[arg(long, value_enum, default_value_t)]
    dtype: Precision,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, env = "M3_DEVICE", default_value_t)]
    device: Device,
    /// Worker threads of the CPU; one per core by default
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// Divisor of the logits
    #[arg(long, default_value_t = 1.0)]
    temperature: f32,
    /// Also compute gradients of the mean nll
    #[arg(long)]
    backward: bool,
    /// Recompute activations for the gradients instead of keeping them
    #[arg(long, requires = "backward")]
    recompute: bool,
    /// With --engine rollout: tokens of the first pass, the rest goes one by one; half by default
    #[arg(long, value_name = "N")]
    prefill: Option<usize>,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write selections, last logits and small gradients as safetensors
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,
    /// Force the block and expert ids of a dump
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
}

/// Which side computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Engine {
    /// Whole sequences, packed.
    #[default]
    Trainer,
    /// Prefill, then token by token through the cache.
    Rollout,
}

/// Scores, and prints a line per sequence.
pub fn run(args: &Args, out: &mut Output) -> Result<Code, Failure> {
    let side = match (args.engine, args.prefill) {
        (Engine::Trainer, None) => Side::Trainer,
        (Engine::Trainer, Some(_)) => {
            return Err(Failure::usage("--prefill needs --engine rollout"));
        }
        (Engine::Rollout, prefill) => Side::Rollout { prefill },
    };
    let request = Request {
        side,
        model: args.model.clone(),
        tokens: args.tokens.clone(),
        dtype: args.dtype.dtype(),
        temperature: args.temperature,
        backward: args.backward,
        recompute: args.recompute,
        dump: args.dump.clone(),
        replay: args.replay.clone(),
        json: args.json.clone(),
    };
    let report =
        with_backend!(args.device, args.threads, backend => logprobs::run(&backend, &request)?);
    print(&report, out)?;
    Ok(Code::Pass)
}

fn print(report: &Report, out: &mut Output) -> Result<(), Failure> {
    let said =
        |nll: Option<f64>| nll.map_or("nothing scored".into(), |nll| format!("mean nll {nll:.6}"));
    for (number, sequence) in report.sequences.iter().enumerate() {
        let (scored, nll) = (sequence.logprobs.len(), said(sequence.mean_nll));
        out.line(format_args!(
            "sequence {number}: {scored} tokens scored, {nll}"
        ))?;
    }
    out.line(format_args!("all: {}", said(report.mean_nll)))?;
    if let Some(gradients) = &report.gradients {
        let (norm, tensors) = (gradients.total_grad_norm, gradients.grad_norms.len());
        out.line(format_args!(
            "gradient norm {norm:.6} over {tensors} tensors"
        ))?;
    }
    Ok(())
}
