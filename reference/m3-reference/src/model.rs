//! The text model, from token ids to log-probabilities and back, on weights under their released names.
//!
//! The stream is kept unadded between layers: each norm adds the previous branch, rounds, and reads the rounded sum.

use crate::layers::attention::{Indexer, Pack};
use crate::layers::{attention, mlp, moe};
use crate::ops::{embedding, log_prob, rms_norm, swigluoai};
use crate::{Precision, Rounding};
use std::collections::BTreeMap;

/// Tensors by released name, row-major.
pub type Weights = BTreeMap<String, Vec<f64>>;

/// Everything that a config fixes.
#[derive(Clone, Debug)]
pub struct Params {
    /// V
    pub vocab: usize,
    /// Attention of every layer; its `hidden` and `eps` are the model's.
    pub attention: attention::Params,
    /// F of a dense layer.
    pub dense_width: usize,
    /// F of a routed expert.
    pub expert_width: usize,
    /// F of the shared expert.
    pub shared_width: usize,
    /// E
    pub experts: usize,
    /// Experts a token.
    pub experts_per_token: usize,
    /// Routed scaling factor.
    pub scaling: f64,
    /// Constants of the activation.
    pub swigluoai: swigluoai::Params,
    /// The two dispatch lists, which are independent.
    pub layers: Vec<LayerKind>,
}

/// What a layer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// Block-sparse rather than dense attention.
    pub sparse: bool,
    /// Mixture of experts rather than a dense MLP.
    pub moe: bool,
}

/// What the model reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Everything that a config fixes.
    pub params: &'a Params,
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
    for i in 0..inputs.params.layers.len() {
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

const EMBEDDING: &str = "language_model.model.embed_tokens.weight";
const FINAL_NORM: &str = "language_model.model.norm.weight";
const LM_HEAD: &str = "language_model.lm_head.weight";

fn in_layer(i: usize, name: &str) -> String {
    format!("language_model.model.layers.{i}.{name}")
}

fn input_norm(i: usize) -> String {
    in_layer(i, "input_layernorm.weight")
}

fn post_norm(i: usize) -> String {
    in_layer(i, "post_attention_layernorm.weight")
}

/// Operands of the ops, from the weights.
struct Model<'a>(Inputs<'a>);

impl<'a> Model<'a> {
    fn weight(&self, name: &str) -> &'a [f64] {
        self.0
            .weights
            .get(name)
            .unwrap_or_else(|| panic!("no weight {name}"))
    }

    fn embedding(&self) -> embedding::Inputs<'a> {
        let Params {
            vocab, attention, ..
        } = self.0.params;
        let params = embedding::Params {
            vocab: *vocab,
            hidden: attention.hidden,
        };
        embedding::Inputs {
            params,
            weight: self.weight(EMBEDDING),
            ids: self.0.ids,
        }
    }

    fn norm(&self, name: &str, resid: &'a [f64], y: Option<&'a [f64]>) -> rms_norm::Inputs<'a> {
        let attention::Params { hidden, eps, .. } = self.0.params.attention;
        let params = rms_norm::Params {
            rows: self.0.ids.len(),
            hidden,
            eps,
        };
        rms_norm::Inputs {
            params,
            resid,
            y,
            weight: self.weight(name),
        }
    }

    fn log_prob(&self, x: &'a [f64]) -> log_prob::Inputs<'a> {
        let Inputs {
            ids,
            targets,
            temperature,
            params,
            ..
        } = self.0;
        let (tokens, hidden, vocab) = (ids.len(), params.attention.hidden, params.vocab);
        let params = log_prob::Params {
            tokens,
            hidden,
            vocab,
            temperature,
        };
        log_prob::Inputs {
            params,
            x,
            w: self.weight(LM_HEAD),
            targets,
        }
    }

    fn attention(&self, i: usize, x: &'a [f64]) -> attention::Inputs<'a> {
        let part = |name: &str| self.weight(&in_layer(i, &format!("self_attn.{name}.weight")));
        attention::Inputs {
            params: self.0.params.attention,
            pack: self.0.pack,
            x,
            w_q: part("q_proj"),
            w_k: part("k_proj"),
            w_v: part("v_proj"),
            w_o: part("o_proj"),
            q_norm: part("q_norm"),
            k_norm: part("k_norm"),
            indexer: self.0.params.layers[i].sparse.then(|| Indexer {
                w_q: part("index_q_proj"),
                w_k: part("index_k_proj"),
                q_norm: part("index_q_norm"),
                k_norm: part("index_k_norm"),
            }),
            replay: self.0.replay.blocks.get(&i).map(Vec::as_slice),
        }
    }

    fn attention_backward(
        &self,
        i: usize,
        layer: &LayerOutput,
        dy: &[f64],
        rounding: &Rounding,
        gradients: &mut Weights,
    ) -> Vec<f64> {
        let model = Model(self.0);
        let at = model.attention(i, &layer.input_norm.out);
        let g = attention::backward(&at, &layer.attention, &attention::Grads { dy }, rounding);
        for (name, gradient) in [
            ("q_proj", g.dw_q),
            ("k_proj", g.dw_k),
            ("v_proj", g.dw_v),
            ("o_proj", g.dw_o),
            ("q_norm", g.dq_norm),
            ("k_norm", g.dk_norm),
        ] {
            gradients.insert(in_layer(i, &format!("self_attn.{name}.weight")), gradient);
        }
        g.dx
    }

    fn mlp(&self, i: usize) -> LayerMlp<'a> {
        let Params {
            attention,
            swigluoai,
            ..
        } = self.0.params;
        let rows = self.0.ids.len();
        let part = |name: &str| self.weight(&in_layer(i, name));
        let join = |a: &str, b: &str| [part(a), part(b)].concat();
        if !self.0.params.layers[i].moe {
            let width = self.0.params.dense_width;
            let (hidden, swigluoai, dx) = (attention.hidden, *swigluoai, Precision::Storage);
            return LayerMlp::Dense {
                layer: i,
                params: mlp::Params {
                    rows,
                    hidden,
                    width,
                    swigluoai,
                    dx,
                },
                w_gate_up: join("mlp.gate_proj.weight", "mlp.up_proj.weight"),
                w_down: part("mlp.down_proj.weight"),
            };
        }
        let experts = 0..self.0.params.experts;
        let expert = |e: usize, w: &str| format!("block_sparse_moe.experts.{e}.{w}.weight");
        let shared = |w: &str| format!("block_sparse_moe.shared_experts.{w}.weight");
        LayerMlp::Moe(Box::new(MoeWeights {
            layer: i,
            params: moe::Params {
                tokens: rows,
                hidden: attention.hidden,
                experts: self.0.params.experts,
                topk: self.0.params.experts_per_token,
                width: self.0.params.expert_width,
                shared_width: self.0.params.shared_width,
                scaling: self.0.params.scaling,
                swigluoai: *swigluoai,
            },
            w_router: part("block_sparse_moe.gate.weight"),
            bias: part("block_sparse_moe.e_score_correction_bias"),
            replay: self.0.replay.experts.get(&i).map(Vec::as_slice),
            w_gate_up: experts
                .clone()
                .flat_map(|e| join(&expert(e, "w1"), &expert(e, "w3")))
                .collect(),
            w_down: experts
                .flat_map(|e| part(&expert(e, "w2")))
                .copied()
                .collect(),
            w_shared_gate_up: join(&shared("gate_proj"), &shared("up_proj")),
            w_shared_down: part(&shared("down_proj")),
        }))
    }
}

/// Weights of the second half of a layer, fused as the ops take them.
enum LayerMlp<'a> {
    Dense {
        layer: usize,
        params: mlp::Params,
        w_gate_up: Vec<f64>,
        w_down: &'a [f64],
    },
    Moe(Box<MoeWeights<'a>>),
}

struct MoeWeights<'a> {
    layer: usize,
    params: moe::Params,
    w_router: &'a [f64],
    bias: &'a [f64],
    replay: Option<&'a [i32]>,
    w_gate_up: Vec<f64>,
    w_down: Vec<f64>,
    w_shared_gate_up: Vec<f64>,
    w_shared_down: &'a [f64],
}

impl LayerMlp<'_> {
    fn forward(&self, x: &[f64], rounding: &Rounding) -> Mlp {
        match self {
            Self::Dense {
                params,
                w_gate_up,
                w_down,
                ..
            } => {
                let inputs = mlp::Inputs {
                    params: *params,
                    x,
                    w_gate_up,
                    w_down,
                };
                Mlp::Dense(mlp::forward(&inputs, rounding))
            }
            Self::Moe(weights) => Mlp::Moe(Box::new(moe::forward(&weights.inputs(x), rounding))),
        }
    }

    fn backward(
        &self,
        x: &[f64],
        output: &Mlp,
        dy: &[f64],
        rounding: &Rounding,
        gradients: &mut Weights,
    ) -> Vec<f64> {
        match (self, output) {
            (
                Self::Dense {
                    layer,
                    params,
                    w_gate_up,
                    w_down,
                },
                Mlp::Dense(output),
            ) => {
                let inputs = mlp::Inputs {
                    params: *params,
                    x,
                    w_gate_up,
                    w_down,
                };
                let g = mlp::backward(&inputs, output, &mlp::Grads { dy }, rounding);
                let (gate, up) = g.dw_gate_up.split_at(g.dw_gate_up.len() / 2);
                let name = |w: &str| in_layer(*layer, &format!("mlp.{w}_proj.weight"));
                gradients.insert(name("gate"), gate.to_vec());
                gradients.insert(name("up"), up.to_vec());
                gradients.insert(name("down"), g.dw_down);
                g.dx
            }
            (Self::Moe(weights), Mlp::Moe(output)) => {
                let g = moe::backward(&weights.inputs(x), output, &moe::Grads { dy }, rounding);
                weights.name_gradients(&g, gradients);
                g.dx
            }
            _ => panic!("an output of the other kind of layer"),
        }
    }
}

impl MoeWeights<'_> {
    fn inputs<'a>(&'a self, x: &'a [f64]) -> moe::Inputs<'a> {
        moe::Inputs {
            params: self.params,
            x,
            w_router: self.w_router,
            bias: self.bias,
            replay: self.replay,
            w_gate_up: &self.w_gate_up,
            w_down: &self.w_down,
            w_shared_gate_up: &self.w_shared_gate_up,
            w_shared_down: self.w_shared_down,
        }
    }

    fn name_gradients(&self, g: &moe::Gradients, gradients: &mut Weights) {
        let moe::Params {
            hidden,
            experts,
            width,
            shared_width,
            ..
        } = self.params;
        let mut insert = |name: &str, gradient: &[f64]| {
            let name = in_layer(self.layer, &format!("block_sparse_moe.{name}.weight"));
            gradients.insert(name, gradient.to_vec());
        };
        insert("gate", &g.dw_router);
        for e in 0..experts {
            let matrix = hidden * width;
            let (gate, up) = g.dw_gate_up[2 * e * matrix..2 * (e + 1) * matrix].split_at(matrix);
            insert(&format!("experts.{e}.w1"), gate);
            insert(&format!("experts.{e}.w3"), up);
            insert(
                &format!("experts.{e}.w2"),
                &g.dw_down[e * matrix..(e + 1) * matrix],
            );
        }
        let (gate, up) = g.dw_shared_gate_up.split_at(hidden * shared_width);
        insert("shared_experts.gate_proj", gate);
        insert("shared_experts.up_proj", up);
        insert("shared_experts.down_proj", &g.dw_shared_down);
    }
}
