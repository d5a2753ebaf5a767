//! The mixture of experts: router, chosen experts, shared expert, combination.
//!
//! The input has three kinds of consumers. Its gradient is their sum, rounded once: the experts' rows come in storage
//! precision, the shared expert's and the router's in fp32.

use super::mlp::{self, join_gate_up, split_gate_up};
use crate::ops::{grouped_gemm, linear, moe_combine, moe_permute, router, swigluoai};
use crate::{Precision, Rounding};

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// H
    pub hidden: usize,
    /// E
    pub experts: usize,
    /// k
    pub topk: usize,
    /// F of a routed expert.
    pub width: usize,
    /// F of the shared expert.
    pub shared_width: usize,
    /// Routed scaling factor.
    pub scaling: f64,
    /// Constants of the activation.
    pub swigluoai: swigluoai::Params,
}

/// What the layer reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes and constants.
    pub params: Params,
    /// `[T, H]`
    pub x: &'a [f64],
    /// `[E, H]`, fp32
    pub w_router: &'a [f64],
    /// Score correction bias `[E]`, fp32
    pub bias: &'a [f64],
    /// Expert ids to use instead of the router's own `[T, k]`.
    pub replay: Option<&'a [i32]>,
    /// `[E, 2F, H]`, the gate's rows first
    pub w_gate_up: &'a [f64],
    /// `[E, H, F]`
    pub w_down: &'a [f64],
    /// `[2F, H]` of the shared expert
    pub w_shared_gate_up: &'a [f64],
    /// `[H, F]` of the shared expert
    pub w_shared_down: &'a [f64],
}

/// What the layer writes, and keeps for its backward.
#[derive(Clone, Debug)]
pub struct Output {
    /// Router logits `[T, E]`, fp32.
    pub logits: linear::Output,
    /// Choice and weights.
    pub route: router::Output,
    /// Rows grouped by expert.
    pub permute: moe_permute::Output,
    /// The experts' fused projection `[T·k, 2F]`.
    pub gate_up: grouped_gemm::Output,
    /// `[T·k, F]`
    pub gate: Vec<f64>,
    /// `[T·k, F]`
    pub up: Vec<f64>,
    /// Activation `[T·k, F]`.
    pub act: swigluoai::Output,
    /// The experts' results `[T·k, H]`.
    pub down: grouped_gemm::Output,
    /// The shared expert.
    pub shared: mlp::Output,
    /// The layer's result `[T, H]`.
    pub combine: moe_combine::Output,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T, H]`
    pub dy: &'a [f64],
}

/// Gradients that leave. Weights' are fp32.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T, H]`
    pub dx: Vec<f64>,
    /// `[E, H]`
    pub dw_router: Vec<f64>,
    /// `[E, 2F, H]`
    pub dw_gate_up: Vec<f64>,
    /// `[E, H, F]`
    pub dw_down: Vec<f64>,
    /// `[2F, H]`
    pub dw_shared_gate_up: Vec<f64>,
    /// `[H, F]`
    pub dw_shared_down: Vec<f64>,
}

/// Rounds where its ops do.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let logits = linear::forward(&logits_inputs(inputs), rounding);
    let route = router::forward(&router_inputs(inputs, &logits), rounding);
    let permute = moe_permute::forward(&permute_inputs(inputs, &route), rounding);
    let gate_up = grouped_gemm::forward(&gate_up_inputs(inputs, &permute), rounding);
    let (gate, up) = split_gate_up(&gate_up.y, inputs.params.width);
    let act = swigluoai::forward(&act_inputs(inputs, &gate, &up), rounding);
    let down = grouped_gemm::forward(&down_inputs(inputs, &permute, &act), rounding);
    let shared = mlp::forward(&shared_inputs(inputs), rounding);
    let combine = combine_inputs(inputs, &route, &permute, &down, &shared);
    let combine = moe_combine::forward(&combine, rounding);
    Output {
        logits,
        route,
        permute,
        gate_up,
        gate,
        up,
        act,
        down,
        shared,
        combine,
    }
}

/// Rounds where its ops do.
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Output {
        logits,
        route,
        permute,
        gate_up,
        gate,
        up,
        act,
        down,
        shared,
        combine,
    } = output;

    let at = combine_inputs(inputs, route, permute, down, shared);
    let dy = moe_combine::Grads { dy: grads.dy };
    let combine = moe_combine::backward(&at, combine, &dy, rounding);

    let ddown = grouped_gemm::Grads { dy: &combine.ddown };
    let down = grouped_gemm::backward(&down_inputs(inputs, permute, act), down, &ddown, rounding);
    let dact = swigluoai::Grads { dy: &down.dx };
    let halves = swigluoai::backward(&act_inputs(inputs, gate, up), act, &dact, rounding);
    let dgate_up = join_gate_up(&halves.dgate, &halves.dup, inputs.params.width);
    let dgate_up = grouped_gemm::Grads { dy: &dgate_up };
    let gate_up = grouped_gemm::backward(
        &gate_up_inputs(inputs, permute),
        gate_up,
        &dgate_up,
        rounding,
    );

    let dy = mlp::Grads { dy: grads.dy };
    let shared = mlp::backward(&shared_inputs(inputs), shared, &dy, rounding);

    let dweights = router::Grads {
        dexpert_weights: &combine.dexpert_weights,
    };
    let router = router::backward(&router_inputs(inputs, logits), route, &dweights, rounding);
    let dlogits = linear::Grads {
        dy: &router.dlogits,
    };
    let router = linear::backward(&logits_inputs(inputs), logits, &dlogits, rounding);

    let consumers = moe_permute::Grads {
        dpermuted: &gate_up.dx,
        dshared: Some(&shared.dx),
        drouter: Some(&router.dx),
    };
    let at = permute_inputs(inputs, route);
    Gradients {
        dx: moe_permute::backward(&at, permute, &consumers, rounding).dx,
        dw_router: router.dw,
        dw_gate_up: gate_up.dw,
        dw_down: down.dw,
        dw_shared_gate_up: shared.dw_gate_up,
        dw_shared_down: shared.dw_down,
    }
}

fn logits_inputs<'a>(inputs: &Inputs<'a>) -> linear::Inputs<'a> {
    let Params {
        tokens,
        hidden,
        experts,
        ..
    } = inputs.params;
    let (y, dx) = (Precision::Fp32, Precision::Fp32);
    let params = linear::Params {
        rows: tokens,
        n: experts,
        k: hidden,
        y,
        dx,
    };
    linear::Inputs {
        params,
        x: inputs.x,
        w: inputs.w_router,
    }
}

fn router_inputs<'a>(inputs: &Inputs<'a>, logits: &'a linear::Output) -> router::Inputs<'a> {
    let Params {
        tokens,
        experts,
        topk,
        ..
    } = inputs.params;
    let params = router::Params {
        tokens,
        experts,
        topk,
    };
    router::Inputs {
        params,
        logits: &logits.y,
        bias: inputs.bias,
        replay: inputs.replay,
    }
}

fn permute_inputs<'a>(inputs: &Inputs<'a>, route: &'a router::Output) -> moe_permute::Inputs<'a> {
    let Params {
        tokens,
        hidden,
        experts,
        topk,
        ..
    } = inputs.params;
    let dx = Precision::Storage;
    let params = moe_permute::Params {
        tokens,
        hidden,
        experts,
        topk,
        dx,
    };
    moe_permute::Inputs {
        params,
        x: inputs.x,
        expert_ids: &route.expert_ids,
    }
}

fn gate_up_inputs<'a>(
    inputs: &Inputs<'a>,
    permute: &'a moe_permute::Output,
) -> grouped_gemm::Inputs<'a> {
    let Params {
        tokens,
        hidden,
        experts,
        topk,
        width,
        ..
    } = inputs.params;
    let params = grouped_gemm::Params {
        rows: tokens * topk,
        experts,
        n: 2 * width,
        k: hidden,
    };
    let (x, w, expert_offsets) = (&permute.permuted, inputs.w_gate_up, &permute.expert_offsets);
    grouped_gemm::Inputs {
        params,
        x,
        w,
        expert_offsets,
    }
}

fn act_inputs<'a>(inputs: &Inputs, gate: &'a [f64], up: &'a [f64]) -> swigluoai::Inputs<'a> {
    swigluoai::Inputs {
        params: inputs.params.swigluoai,
        gate,
        up,
    }
}

fn down_inputs<'a>(
    inputs: &Inputs<'a>,
    permute: &'a moe_permute::Output,
    act: &'a swigluoai::Output,
) -> grouped_gemm::Inputs<'a> {
    let Params {
        tokens,
        hidden,
        experts,
        topk,
        width,
        ..
    } = inputs.params;
    let params = grouped_gemm::Params {
        rows: tokens * topk,
        experts,
        n: hidden,
        k: width,
    };
    let (w, expert_offsets) = (inputs.w_down, &permute.expert_offsets);
    grouped_gemm::Inputs {
        params,
        x: &act.y,
        w,
        expert_offsets,
    }
}

fn shared_inputs<'a>(inputs: &Inputs<'a>) -> mlp::Inputs<'a> {
    let Params {
        tokens,
        hidden,
        shared_width,
        swigluoai,
        ..
    } = inputs.params;
    let dx = Precision::Fp32;
    mlp::Inputs {
        params: mlp::Params {
            rows: tokens,
            hidden,
            width: shared_width,
            swigluoai,
            dx,
        },
        x: inputs.x,
        w_gate_up: inputs.w_shared_gate_up,
        w_down: inputs.w_shared_down,
    }
}

fn combine_inputs<'a>(
    inputs: &Inputs,
    route: &'a router::Output,
    permute: &'a moe_permute::Output,
    down: &'a grouped_gemm::Output,
    shared: &'a mlp::Output,
) -> moe_combine::Inputs<'a> {
    let Params {
        tokens,
        hidden,
        topk,
        scaling,
        ..
    } = inputs.params;
    moe_combine::Inputs {
        params: moe_combine::Params {
            tokens,
            hidden,
            topk,
            scaling,
        },
        down: &down.y,
        expert_weights: &route.expert_weights,
        row_of_slot: &permute.row_of_slot,
        shared: Some(&shared.down.y),
    }
}
