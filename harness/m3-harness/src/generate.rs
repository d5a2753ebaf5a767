//! Sampled continuations of a checkpoint: tokens → engine → ids, log-probabilities, routes.

use std::path::PathBuf;

use m3_checkpoint::Checkpoint;
use m3_kernels::Backend;
use m3_rollout::{Engine, Generation, Prompt, Sampling};
use m3_spec::dtype::DType;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::files;
use crate::logprobs::Tokens;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Directory of a released-format checkpoint.
    pub model: PathBuf,
    /// JSON file of prompts.
    pub tokens: PathBuf,
    /// Storage dtype of weights and activations.
    pub dtype: DType,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Where the continuations go, as JSON.
    pub json: Option<PathBuf>,
}

/// A continuation, as it is written.
#[derive(Serialize)]
struct Written<'a> {
    tokens: &'a [i64],
    logprobs: &'a [f32],
    /// By layer that routes: the experts of every token that was an input.
    routes: Vec<LayerRoutes<'a>>,
}

#[derive(Serialize)]
struct LayerRoutes<'a> {
    layer: usize,
    expert_ids: Vec<&'a [i32]>,
}

/// Continues every prompt of the request. Prompt i is number i of the run, sample 0.
///
/// # Errors
/// [`Error::Input`] for what does not fit, [`Error::Write`], [`Error::NonFinite`], what the device reports.
pub fn run<B: Backend>(backend: &B, request: &Request) -> Result<Vec<Generation>> {
    if let Some(path) = &request.json {
        files::check_distinct(
            &[path.as_path()],
            &[request.model.as_path(), request.tokens.as_path()],
        )?;
        files::check_writable(path)?;
    }
    let stream = backend.stream();
    let tokens = Tokens::read(&request.tokens)?;
    let checkpoint = Checkpoint::open(&request.model)?;
    let config = checkpoint.config().text.clone();
    let longest = tokens.lengths().into_iter().max().unwrap_or(0);
    let positions = longest
        .saturating_add(request.sampling.max_new_tokens)
        .clamp(1, config.max_position_embeddings);
    let mut engine = Engine::new(backend, &stream, &config, request.dtype, positions)?;
    engine.model.load(backend, &stream, &checkpoint)?;
    let prompts: Vec<Prompt> = (0..)
        .zip(&tokens.sequences)
        .map(|(number, tokens)| Prompt {
            tokens: tokens.clone(),
            number,
            sample: 0,
        })
        .collect();
    let generations = engine.generate(backend, &stream, &prompts, &request.sampling)?;
    if let Some(number) = generations
        .iter()
        .position(|g| g.log_probs.iter().any(|x| !x.is_finite()))
    {
        return Err(Error::NonFinite(format!("a log-prob of sequence {number}")));
    }
    if let Some(path) = &request.json {
        files::write_whole(path, json(&generations, tokens.listed, &config)?.as_bytes())?;
    }
    Ok(generations)
}

fn json(
    generations: &[Generation],
    listed: bool,
    config: &m3_spec::config::TextConfig,
) -> Result<String> {
    let topk = config.moe.as_ref().map_or(1, |moe| moe.experts_per_token);
    let written: Vec<Written<'_>> = generations
        .iter()
        .map(|generation| {
            let routes = &generation.routes;
            let layers = routes.layers.iter().zip(&routes.expert_ids);
            let routes = layers
                .map(|(&layer, ids)| LayerRoutes {
                    layer,
                    expert_ids: ids.chunks_exact(topk).collect(),
                })
                .collect();
            Written {
                tokens: &generation.tokens,
                logprobs: &generation.log_probs,
                routes,
            }
        })
        .collect();
    let text = match (written.as_slice(), listed) {
        ([one], false) => serde_json::to_string(one),
        (all, _) => serde_json::to_string(&serde_json::json!({ "sequences": all })),
    };
    text.map_err(|error| {
        Error::Input(format!(
            "the continuations cannot be written as JSON: {error}"
        ))
    })
}
