//! The mixture of experts: fp32 router, rows in expert order, one product per expert, weighted sum with the shared
//! expert.

use m3_kernels::{Backend, Result, Tensor, ops};
use m3_spec::config::{MoeConfig, TextConfig};
use m3_spec::dtype::DType;

use crate::context::Context;
use crate::linear;
use crate::mlp::{self, Activation, Mlp};
use crate::parameters::{Parameter, Sharding, Slice};

/// Weights of the block.
pub struct Moe<B: Backend> {
    /// F32 `[E, H]` in every storage mode.
    pub router: Parameter<B>,
    /// F32 `[E]`; moves the selection alone and is not trained.
    pub bias: Parameter<B>,
    /// `[E, 2F, H]`, gate rows first.
    pub gate_up: Parameter<B>,
    /// `[E, H, F]`.
    pub down: Parameter<B>,
    /// The expert that every token passes.
    pub shared: Mlp<B>,
    layer: usize,
    topk: usize,
    scaling: f32,
    activation: Activation,
}

/// What the gradient reads.
pub(crate) struct Saved<B: Backend> {
    logits: Tensor<B>,
    /// I32 `[T, k]`, ascending.
    pub(crate) expert_ids: Tensor<B>,
    /// F32 `[T, k]`, before the scaling.
    pub(crate) weights: Tensor<B>,
    plan: Plan<B>,
    rows: Tensor<B>,
    gate_up: Tensor<B>,
    activated: Tensor<B>,
    down: Tensor<B>,
    shared: mlp::Saved<B>,
}

/// Rows of every expert.
struct Plan<B: Backend> {
    expert_offsets: Tensor<B>,
    row_of_slot: Tensor<B>,
    token_of_row: Tensor<B>,
}

impl<B: Backend> Moe<B> {
    /// Zero weights.
    pub(crate) fn zeros(
        backend: &B,
        config: &TextConfig,
        moe: &MoeConfig,
        layer: usize,
        dtype: DType,
        gradients: bool,
    ) -> Result<Self> {
        let (experts, hidden, width) = (moe.num_experts, config.hidden_size, moe.intermediate_size);
        let weight = |dtype, shape: &[usize], trained| {
            Parameter::zeros(backend, dtype, shape, trained, gradients)
        };
        let shared_width = moe.shared_intermediate_size;
        Ok(Moe {
            router: weight(DType::F32, &[experts, hidden], experts)?,
            bias: weight(DType::F32, &[experts], 0)?,
            gate_up: weight(dtype, &[experts, 2 * width, hidden], experts)?,
            down: weight(dtype, &[experts, hidden, width], experts)?,
            shared: Mlp::zeros(backend, config, shared_width, dtype, gradients)?,
            layer,
            topk: moe.experts_per_token,
            scaling: moe.routed_scaling as f32,
            activation: Activation::new(config),
        })
    }

    /// Every released tensor of the block.
    pub(crate) fn slices(&self, prefix: &str, slices: &mut Vec<Slice<B>>) {
        let prefix = format!("{prefix}block_sparse_moe.");
        slices.push(
            self.router
                .whole(format!("{prefix}gate.weight"), Sharding::Replicated, true),
        );
        let bias = format!("{prefix}e_score_correction_bias");
        slices.push(self.bias.whole(bias, Sharding::Replicated, false));
        let (experts, width) = (self.experts(), self.width());
        for expert in 0..experts {
            let name = |tensor: &str| format!("{prefix}experts.{expert}.{tensor}.weight");
            let (gate_up, down) = (one(&self.gate_up, expert), one(&self.down, expert));
            slices.push(gate_up.rows(name("w1"), 0..width, Sharding::Expert, true));
            slices.push(down.whole(name("w2"), Sharding::Expert, true));
            slices.push(gate_up.rows(name("w3"), width..2 * width, Sharding::Expert, true));
        }
        self.shared
            .slices(&format!("{prefix}shared_experts."), slices);
    }

    /// y `[T, H]` from x `[T, H]`.
    pub(crate) fn forward(
        &self,
        ctx: &mut Context<'_, B>,
        x: &Tensor<B>,
        y: &Tensor<B>,
    ) -> Result<Saved<B>> {
        let (logits, expert_ids, weights) = self.route(ctx, x)?;
        let plan = Plan::new(ctx, &expert_ids, self.experts())?;
        let (slots, hidden) = (expert_ids.elements(), x.shape()[1]);
        let rows = ctx.activation([slots, hidden])?;
        let gate_up = ctx.activation([slots, 2 * self.width()])?;
        let activated = ctx.activation([slots, self.width()])?;
        let down = ctx.activation([slots, hidden])?;
        let permute = ops::MoePermute {
            x,
            token_of_row: &plan.token_of_row,
            out: &rows,
        };
        ctx.backend.moe_permute(ctx.stream, &permute)?;
        plan.product(ctx, &rows, &self.gate_up.value.transpose(1, 2), &gate_up)?;
        self.activation.forward(ctx, &gate_up, &activated)?;
        plan.product(ctx, &activated, &self.down.value.transpose(1, 2), &down)?;
        let shared_out = ctx.activation([x.shape()[0], hidden])?;
        let shared = self.shared.forward(ctx, x, &shared_out)?;
        let combine = ops::MoeCombine {
            down: &down,
            row_of_slot: &plan.row_of_slot,
            weights: &weights,
            shared: Some(&shared_out),
            out: y,
            scaling: self.scaling,
        };
        ctx.backend.moe_combine(ctx.stream, &combine)?;
        Ok(Saved {
            logits,
            expert_ids,
            weights,
            plan,
            rows,
            gate_up,
            activated,
            down,
            shared,
        })
    }

    /// dx `[T, H]` from dy: experts in ascending id, shared expert and router summed in fp32, rounded once.
    pub(crate) fn backward(
        &self,
        ctx: &mut Context<'_, B>,
        x: &Tensor<B>,
        saved: &Saved<B>,
        dy: &Tensor<B>,
        dx: &Tensor<B>,
    ) -> Result<()> {
        let [tokens, hidden] = [x.shape()[0], x.shape()[1]];
        let sum = ctx.alloc(DType::F32, [tokens, hidden])?;
        ctx.backend.fill(
            ctx.stream,
            &ops::Fill {
                target: &sum,
                value: 0.0,
            },
        )?;
        let d_weights = self.experts_backward(ctx, saved, dy, &sum)?;
        self.shared
            .backward(ctx, x, &saved.shared, dy, &sum, true)?;
        self.route_backward(ctx, x, saved, &d_weights, &sum)?;
        ctx.backend.copy(
            ctx.stream,
            &ops::Copy {
                source: &sum,
                target: dx,
            },
        )
    }

    /// Logits F32 `[T, E]`, ids I32 `[T, k]` and weights F32 `[T, k]`.
    fn route(
        &self,
        ctx: &mut Context<'_, B>,
        x: &Tensor<B>,
    ) -> Result<(Tensor<B>, Tensor<B>, Tensor<B>)> {
        let tokens = x.shape()[0];
        let logits = ctx.alloc(DType::F32, [tokens, self.experts()])?;
        linear::forward(ctx, x, &self.router.value, &logits)?;
        let expert_ids = match ctx.pack.replay.experts.get(&self.layer) {
            Some(forced) => forced.clone(),
            None => {
                let chosen = ctx.alloc(DType::I32, [tokens, self.topk])?;
                let select = ops::RouterSelect {
                    logits: &logits,
                    bias: &self.bias.value,
                    expert_ids: &chosen,
                };
                ctx.backend.router_select(ctx.stream, &select)?;
                chosen
            }
        };
        let weights = ctx.alloc(DType::F32, [tokens, self.topk])?;
        let args = ops::RouterWeights {
            logits: &logits,
            expert_ids: &expert_ids,
            weights: &weights,
        };
        ctx.backend.router_weights(ctx.stream, &args)?;
        Ok((logits, expert_ids, weights))
    }

    /// Adds the experts' share of dx to `sum`; returns the gradient of the weights F32 `[T, k]`.
    fn experts_backward(
        &self,
        ctx: &mut Context<'_, B>,
        saved: &Saved<B>,
        dy: &Tensor<B>,
        sum: &Tensor<B>,
    ) -> Result<Tensor<B>> {
        let (plan, slots) = (&saved.plan, saved.expert_ids.elements());
        let shape = saved.expert_ids.shape();
        let d_weights = ctx.alloc(DType::F32, [shape[0], shape[1]])?;
        let d_down = ctx.activation([slots, dy.shape()[1]])?;
        let d_activated = ctx.activation([slots, self.width()])?;
        let d_gate_up = ctx.activation([slots, 2 * self.width()])?;
        let d_rows = ctx.activation([slots, dy.shape()[1]])?;
        let combine = ops::MoeCombineBackward {
            d_out: dy,
            down: &saved.down,
            row_of_slot: &plan.row_of_slot,
            weights: &saved.weights,
            d_down: &d_down,
            d_weights: &d_weights,
            scaling: self.scaling,
        };
        ctx.backend.moe_combine_backward(ctx.stream, &combine)?;
        plan.product(ctx, &d_down, &self.down.value, &d_activated)?;
        plan.weights(ctx, &d_down, &saved.activated, self.down.grad.as_ref())?;
        self.activation
            .backward(ctx, &saved.gate_up, &d_activated, &d_gate_up)?;
        plan.product(ctx, &d_gate_up, &self.gate_up.value, &d_rows)?;
        plan.weights(ctx, &d_gate_up, &saved.rows, self.gate_up.grad.as_ref())?;
        let gather = ops::MoePermuteBackward {
            d_rows: &d_rows,
            row_of_slot: &plan.row_of_slot,
            dx: sum,
        };
        ctx.backend.moe_permute_backward(ctx.stream, &gather)?;
        Ok(d_weights)
    }

    /// Adds the router's share of dx to `sum`.
    fn route_backward(
        &self,
        ctx: &mut Context<'_, B>,
        x: &Tensor<B>,
        saved: &Saved<B>,
        d_weights: &Tensor<B>,
        sum: &Tensor<B>,
    ) -> Result<()> {
        let d_logits = ctx.alloc(DType::F32, [x.shape()[0], self.experts()])?;
        let args = ops::RouterBackward {
            logits: &saved.logits,
            expert_ids: &saved.expert_ids,
            d_weights,
            d_logits: &d_logits,
        };
        ctx.backend.router_backward(ctx.stream, &args)?;
        linear::backward_weight(ctx, &d_logits, x, self.router.grad.as_ref())?;
        linear::backward_input(ctx, &d_logits, &self.router.value, sum, true)
    }

    fn experts(&self) -> usize {
        self.router.value.shape()[0]
    }

    fn width(&self) -> usize {
        self.down.value.shape()[2]
    }
}

/// One expert's matrix out of the stacked ones.
fn one<B: Backend>(stacked: &Parameter<B>, expert: usize) -> Parameter<B> {
    let matrix = |tensor: &Tensor<B>| {
        let shape = tensor.shape();
        tensor
            .slice(0, expert..expert + 1)
            .reshape([shape[1], shape[2]])
    };
    Parameter {
        value: matrix(&stacked.value),
        grad: stacked.grad.as_ref().map(matrix),
    }
}

impl<B: Backend> Plan<B> {
    fn new(ctx: &mut Context<'_, B>, expert_ids: &Tensor<B>, experts: usize) -> Result<Self> {
        let shape = expert_ids.shape();
        let (tokens, topk) = (shape[0], shape[1]);
        let plan = Plan {
            expert_offsets: ctx.alloc(DType::I32, [experts + 1])?,
            row_of_slot: ctx.alloc(DType::I32, [tokens, topk])?,
            token_of_row: ctx.alloc(DType::I32, [tokens * topk])?,
        };
        let args = ops::MoePlan {
            expert_ids,
            expert_offsets: &plan.expert_offsets,
            row_of_slot: &plan.row_of_slot,
            token_of_row: &plan.token_of_row,
        };
        ctx.backend.moe_plan(ctx.stream, &args)?;
        Ok(plan)
    }

    fn product(
        &self,
        ctx: &Context<'_, B>,
        a: &Tensor<B>,
        b: &Tensor<B>,
        c: &Tensor<B>,
    ) -> Result<()> {
        let expert_offsets = &self.expert_offsets;
        ctx.backend.grouped_gemm(
            ctx.stream,
            &ops::GroupedGemm {
                a,
                b,
                expert_offsets,
                c,
            },
        )
    }

    fn weights(
        &self,
        ctx: &Context<'_, B>,
        a: &Tensor<B>,
        b: &Tensor<B>,
        grad: Option<&Tensor<B>>,
    ) -> Result<()> {
        let Some(dw) = grad else { return Ok(()) };
        let expert_offsets = &self.expert_offsets;
        let args = ops::GroupedGemmWeights {
            a,
            b,
            expert_offsets,
            dw,
        };
        ctx.backend.grouped_gemm_weights(ctx.stream, &args)
    }
}
