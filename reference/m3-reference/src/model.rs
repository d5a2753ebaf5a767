//! The text model, from token ids to log-probabilities and back, on weights under their released names.
//!
//! The stream is kept unadded between layers: each norm adds the previous branch, rounds, and reads the rounded sum.

use crate::Rounding;
use crate::layers::attention::Pack;
use crate::layers::{attention, mlp, moe};
use crate::ops::{embedding, log_prob, rms_norm};
use m3_spec::config::TextConfig;
use operands::{EMBEDDING, FINAL_NORM, LM_HEAD, Model, input_norm, post_norm};
use std::collections::BTreeMap;

mod operands;

/// Tensors by released name, row-major.
pub type Weights = BTreeMap<String, Vec<f64>>;

/// What the model reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes, constants and the two dispatch lists.
    pub config: &'a TextConfig,
    /// All of the text model, by released name.
    pub weights: &'a Weights,
    /// The pack.
    pub pack: Pack<'a>,
    /// Token ids `[T]`.
    pub ids: &'a [i32],
    /// Token that each row is scored on `[T]`; negative: not scored.
    pub targets: &'a [i32],
    /// Sampling temperature.
    pub temperature: f64,
    /// Choices to force; empty leaves the model its own.
    pub replay: &'a Replay,
}

/// Choices of layers by index, each forced where present.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// Block ids `[Hi, T, topk]` of sparse layers.
    pub blocks: BTreeMap<usize, Vec<i32>>,
    /// Expert ids `[T, k]` of MoE layers.
    pub experts: BTreeMap<usize, Vec<i32>>,
}

/// What the model writes, and keeps for its backward.
#[derive(Clone, Debug)]
pub struct Output {
    /// The stream before the first layer.
    pub embedding: embedding::Output,
    /// The layers.
    pub layers: Vec<LayerOutput>,
    /// Final norm.
    pub norm: rms_norm::Output,
    /// Log-probabilities of the targets.
    pub log_prob: log_prob::Output,
}

/// What a layer writes.
#[derive(Clone, Debug)]
pub struct LayerOutput {
    /// Norm before the attention.
    pub input_norm: rms_norm::Output,
    /// Attention.
    pub attention: attention::Output,
    /// Norm before the MLP.
    pub post_norm: rms_norm::Output,
    /// MLP, dense or of experts.
    pub mlp: Mlp,
}

/// The second half of a layer.
#[derive(Clone, Debug)]
pub enum Mlp {
    /// One MLP.
    Dense(mlp::Output),
    /// A mixture of experts, boxed because it keeps much more.
    Moe(Box<moe::Output>),
}

impl Mlp {
    /// The branch that joins the stream `[T, H]`.
    pub fn y(&self) -> &[f64] {
        match self {
            Self::Dense(output) => &output.down.y,
            Self::Moe(output) => &output.combine.y,
        }
    }
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T]`
    pub dlog_probs: &'a [f64],
}

/// Rounds where its ops do.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let model = Model(*inputs);
    let embedding = embedding::forward(&model.embedding(), rounding);
    let mut layers: Vec<LayerOutput> = Vec::new();
    for i in 0..inputs.config.num_layers() {
        let (resid, y) = stream(&embedding, &layers);
        let input_norm = rms_norm::forward(&model.norm(&input_norm(i), resid, y), rounding);
        let attention = attention::forward(&model.attention(i, &input_norm.out), rounding);
        let at = model.norm(&post_norm(i), &input_norm.r, Some(&attention.o.y));
        let post_norm = rms_norm::forward(&at, rounding);
        let mlp = model.mlp(i).forward(&post_norm.out, rounding);
        layers.push(LayerOutput {
            input_norm,
            attention,
            post_norm,
            mlp,
        });
    }
    let (resid, y) = stream(&embedding, &layers);
    let norm = rms_norm::forward(&model.norm(FINAL_NORM, resid, y), rounding);
    let log_prob = log_prob::forward(&model.log_prob(&norm.out), rounding);
    Output {
        embedding,
        layers,
        norm,
        log_prob,
    }
}

/// Gradients of all trained weights by released name: no indexer, no routing bias.
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Weights {
    let model = Model(*inputs);
    let Output {
        embedding,
        layers,
        norm,
        log_prob,
    } = output;
    let mut gradients = Weights::new();
    let dlog_probs = log_prob::Grads {
        dlog_probs: grads.dlog_probs,
    };
    let head = log_prob::backward(&model.log_prob(&norm.out), log_prob, &dlog_probs, rounding);
    gradients.insert(LM_HEAD.into(), head.dw);

    let (resid, y) = stream(embedding, layers);
    let at = model.norm(FINAL_NORM, resid, y);
    let dout = rms_norm::Grads {
        dout: &head.dx,
        dr: None,
    };
    let norm = rms_norm::backward(&at, norm, &dout, rounding);
    gradients.insert(FINAL_NORM.into(), norm.dweight);
    let mut dr = norm.dresid;

    for (i, layer) in layers.iter().enumerate().rev() {
        let dout = model.mlp(i).backward(
            &layer.post_norm.out,
            &layer.mlp,
            &dr,
            rounding,
            &mut gradients,
        );
        let at = model.norm(
            &post_norm(i),
            &layer.input_norm.r,
            Some(&layer.attention.o.y),
        );
        let arriving = rms_norm::Grads {
            dout: &dout,
            dr: Some(&dr),
        };
        let norm = rms_norm::backward(&at, &layer.post_norm, &arriving, rounding);
        gradients.insert(post_norm(i), norm.dweight);

        let dout = model.attention_backward(i, layer, &norm.dresid, rounding, &mut gradients);
        let (resid, y) = stream(embedding, &layers[..i]);
        let at = model.norm(&input_norm(i), resid, y);
        let arriving = rms_norm::Grads {
            dout: &dout,
            dr: Some(&norm.dresid),
        };
        let norm = rms_norm::backward(&at, &layer.input_norm, &arriving, rounding);
        gradients.insert(input_norm(i), norm.dweight);
        dr = norm.dresid;
    }
    let dx = embedding::Grads { dx: &dr };
    let embedding = embedding::backward(&model.embedding(), embedding, &dx, rounding);
    gradients.insert(EMBEDDING.into(), embedding.dweight);
    gradients
}

/// The stream after some layers: the last rounded sum, and the branch not yet added to it.
fn stream<'a>(
    embedding: &'a embedding::Output,
    layers: &'a [LayerOutput],
) -> (&'a [f64], Option<&'a [f64]>) {
    match layers.last() {
        Some(layer) => (&layer.post_norm.r, Some(layer.mlp.y())),
        None => (&embedding.x, None),
    }
}
