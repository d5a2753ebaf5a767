//! Operands of the model's ops: released tensors found by name, fused where an op takes them fused, and their gradients
//! taken apart again.

use super::{Inputs, LayerOutput, Mlp, Weights};
use crate::layers::attention::Indexer;
use crate::layers::{attention, mlp, moe};
use crate::ops::{embedding, log_prob, rms_norm, swigluoai};
use crate::{Precision, Rounding};
use m3_spec::config::{AttentionKind, MlpKind};

pub(super) const EMBEDDING: &str = "language_model.model.embed_tokens.weight";
pub(super) const FINAL_NORM: &str = "language_model.model.norm.weight";
pub(super) const LM_HEAD: &str = "language_model.lm_head.weight";

fn in_layer(i: usize, name: &str) -> String {
    format!("language_model.model.layers.{i}.{name}")
}

pub(super) fn input_norm(i: usize) -> String {
    in_layer(i, "input_layernorm.weight")
}

pub(super) fn post_norm(i: usize) -> String {
    in_layer(i, "post_attention_layernorm.weight")
}

/// Operands of the ops, from the weights.
pub(super) struct Model<'a>(pub(super) Inputs<'a>);

impl<'a> Model<'a> {
    fn weight(&self, name: &str) -> &'a [f64] {
        self.0
            .weights
            .get(name)
            .unwrap_or_else(|| panic!("no weight {name}"))
    }

    pub(super) fn embedding(&self) -> embedding::Inputs<'a> {
        let config = self.0.config;
        let params = embedding::Params {
            vocab: config.vocab_size,
            hidden: config.hidden_size,
        };
        embedding::Inputs {
            params,
            weight: self.weight(EMBEDDING),
            ids: self.0.ids,
        }
    }

    pub(super) fn norm(
        &self,
        name: &str,
        resid: &'a [f64],
        y: Option<&'a [f64]>,
    ) -> rms_norm::Inputs<'a> {
        let (hidden, eps) = (self.0.config.hidden_size, self.0.config.rms_norm_eps);
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

    pub(super) fn log_prob(&self, x: &'a [f64]) -> log_prob::Inputs<'a> {
        let Inputs {
            ids,
            targets,
            temperature,
            config,
            ..
        } = self.0;
        let (tokens, hidden, vocab) = (ids.len(), config.hidden_size, config.vocab_size);
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

    pub(super) fn attention(&self, i: usize, x: &'a [f64]) -> attention::Inputs<'a> {
        let part = |name: &str| self.weight(&in_layer(i, &format!("self_attn.{name}.weight")));
        let config = self.0.config;
        let sparse = config.attention[i] == AttentionKind::Sparse;
        attention::Inputs {
            params: attention::Params {
                hidden: config.hidden_size,
                q_heads: config.num_q_heads,
                kv_heads: config.num_kv_heads,
                head_dim: config.head_dim,
                rotary_dim: config.rotary_dim,
                eps: config.rms_norm_eps,
            },
            pack: self.0.pack,
            x,
            w_q: part("q_proj"),
            w_k: part("k_proj"),
            w_v: part("v_proj"),
            w_o: part("o_proj"),
            q_norm: part("q_norm"),
            k_norm: part("k_norm"),
            indexer: sparse.then(|| Indexer {
                config: config
                    .index
                    .as_ref()
                    .expect("sparse layers have an index config"),
                w_q: part("index_q_proj"),
                w_k: part("index_k_proj"),
                q_norm: part("index_q_norm"),
                k_norm: part("index_k_norm"),
            }),
            replay: self.0.replay.blocks.get(&i).map(Vec::as_slice),
        }
    }

    pub(super) fn attention_backward(
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

    pub(super) fn mlp(&self, i: usize) -> LayerMlp<'a> {
        let config = self.0.config;
        let (rows, hidden) = (self.0.ids.len(), config.hidden_size);
        let (alpha, limit) = (config.swiglu_alpha, config.swiglu_limit);
        let swigluoai = swigluoai::Params { alpha, limit };
        let part = |name: &str| self.weight(&in_layer(i, name));
        let join = |a: &str, b: &str| [part(a), part(b)].concat();
        if config.mlp[i] == MlpKind::Dense {
            let (width, dx) = (config.dense_intermediate_size, Precision::Storage);
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
        let moe = config.moe.as_ref().expect("MoE layers have a moe config");
        let experts = 0..moe.num_experts;
        let expert = |e: usize, w: &str| format!("block_sparse_moe.experts.{e}.{w}.weight");
        let shared = |w: &str| format!("block_sparse_moe.shared_experts.{w}.weight");
        LayerMlp::Moe(Box::new(MoeWeights {
            layer: i,
            params: moe::Params {
                tokens: rows,
                hidden,
                experts: moe.num_experts,
                topk: moe.experts_per_token,
                width: moe.intermediate_size,
                shared_width: moe.shared_intermediate_size,
                scaling: moe.routed_scaling,
                swigluoai,
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
pub(super) enum LayerMlp<'a> {
    Dense {
        layer: usize,
        params: mlp::Params,
        w_gate_up: Vec<f64>,
        w_down: &'a [f64],
    },
    Moe(Box<MoeWeights<'a>>),
}

pub(super) struct MoeWeights<'a> {
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
    pub(super) fn forward(&self, x: &[f64], rounding: &Rounding) -> Mlp {
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

    pub(super) fn backward(
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
