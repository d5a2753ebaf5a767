//! `m3 generate`: sampled continuations.

use std::path::PathBuf;

use m3_harness::generate::{self, Request};
use m3_rollout::Sampling;

use crate::commands::{seed, threads};
use crate::device::{Device, Precision, with_backend};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Continue token ids: sampled ids, log-probs and routes
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Directory of a checkpoint of the released format
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// JSON file of prompts: {"input_ids": [..]} or {"sequences": [[..], ..]}
    #[arg(long, value_name = "FILE")]
    tokens: PathBuf,
    /// Tokens after which a continuation ends
    #[arg(long, default_value_t = 16)]
    max_new_tokens: usize,
    /// Divisor of the logits
    #[arg(long, default_value_t = 1.0)]
    temperature: f32,
    /// Probability mass that is kept
    #[arg(long, default_value_t = 1.0)]
    top_p: f32,
    /// Ids that are kept; 0 keeps all
    #[arg(long, default_value_t = 0)]
    top_k: usize,
    /// Seed, decimal or 0x…
    #[arg(long, env = "M3_SEED", default_value = "0", value_parser = seed)]
    seed: u64,
    /// Storage dtype of weights and activations
    #[arg(long, value_enum, default_value_t)]
    dtype: Precision,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, env = "M3_DEVICE", default_value_t)]
    device: Device,
    /// Worker threads of the CPU; one per core by default
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// Write the continuations as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Samples, and prints a line per continuation.
pub fn run(args: &Args, out: &mut Output) -> Result<Code, Failure> {
    let sampling = Sampling {
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        max_new_tokens: args.max_new_tokens,
        stop: Vec::new(),
        seed: args.seed,
    };
    let request = Request {
        model: args.model.clone(),
        tokens: args.tokens.clone(),
        dtype: args.dtype.dtype(),
        sampling,
        json: args.json.clone(),
    };
    let generations =
        with_backend!(args.device, args.threads, backend => generate::run(&backend, &request)?);
    for (number, generation) in generations.iter().enumerate() {
        out.line(format_args!("sequence {number}: {:?}", generation.tokens))?;
    }
    Ok(Code::Pass)
}
