//! The swigluoai MLP of a dense layer, and of the shared expert: down(swigluoai(gate(x), up(x))).

use crate::math::row;
use crate::ops::{linear, swigluoai};
use crate::{Precision, Rounding};

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Rows of x.
    pub rows: usize,
    /// H
    pub hidden: usize,
    /// F
    pub width: usize,
    /// Constants of the activation.
    pub swigluoai: swigluoai::Params,
    /// Precision of dx: fp32 where x has further consumers.
    pub dx: Precision,
}

/// What the layer reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes and constants.
    pub params: Params,
    /// `[rows, H]`
    pub x: &'a [f64],
    /// `[2F, H]`, the gate's rows first
    pub w_gate_up: &'a [f64],
    /// `[H, F]`
    pub w_down: &'a [f64],
}

/// What the layer writes, and keeps for its backward.
#[derive(Clone, Debug)]
pub struct Output {
    /// The fused projection `[rows, 2F]`.
    pub gate_up: linear::Output,
    /// `[rows, F]`
    pub gate: Vec<f64>,
    /// `[rows, F]`
    pub up: Vec<f64>,
    /// Activation `[rows, F]`.
    pub act: swigluoai::Output,
    /// The layer's result `[rows, H]`.
    pub down: linear::Output,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[rows, H]`
    pub dy: &'a [f64],
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[rows, H]`
    pub dx: Vec<f64>,
    /// `[2F, H]`, fp32
    pub dw_gate_up: Vec<f64>,
    /// `[H, F]`, fp32
    pub dw_down: Vec<f64>,
}

/// Gate and up, activation and result one rounding each.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let gate_up = linear::forward(&gate_up_inputs(inputs), rounding);
    let (gate, up) = split_gate_up(&gate_up.y, inputs.params.width);
    let act = swigluoai::forward(&act_inputs(inputs, &gate, &up), rounding);
    let down = linear::forward(&down_inputs(inputs, &act), rounding);
    Output {
        gate_up,
        gate,
        up,
        act,
        down,
    }
}

/// One rounding of each activation's gradient.
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Output {
        gate_up,
        gate,
        up,
        act,
        down,
    } = output;
    let dy = linear::Grads { dy: grads.dy };
    let down = linear::backward(&down_inputs(inputs, act), down, &dy, rounding);
    let dact = swigluoai::Grads { dy: &down.dx };
    let halves = swigluoai::backward(&act_inputs(inputs, gate, up), act, &dact, rounding);
    let dgate_up = join_gate_up(&halves.dgate, &halves.dup, inputs.params.width);
    let dgate_up = linear::Grads { dy: &dgate_up };
    let gate_up = linear::backward(&gate_up_inputs(inputs), gate_up, &dgate_up, rounding);
    Gradients {
        dx: gate_up.dx,
        dw_gate_up: gate_up.dw,
        dw_down: down.dw,
    }
}

/// Rows `[gate | up]` of width 2F as two tensors of width F.
pub fn split_gate_up(gate_up: &[f64], width: usize) -> (Vec<f64>, Vec<f64>) {
    let rows = gate_up.len() / (2 * width);
    let half = |which: usize| {
        (0..rows)
            .flat_map(|i| row(gate_up, 2 * i + which, width))
            .copied()
            .collect()
    };
    (half(0), half(1))
}

/// Undoes [`split_gate_up`].
pub fn join_gate_up(gate: &[f64], up: &[f64], width: usize) -> Vec<f64> {
    let rows = gate.chunks_exact(width).zip(up.chunks_exact(width));
    rows.flat_map(|(gate, up)| [gate, up].concat()).collect()
}

fn gate_up_inputs<'a>(inputs: &Inputs<'a>) -> linear::Inputs<'a> {
    let Params {
        rows,
        hidden,
        width,
        dx,
        ..
    } = inputs.params;
    let params = linear::Params {
        rows,
        n: 2 * width,
        k: hidden,
        y: Precision::Storage,
        dx,
    };
    linear::Inputs {
        params,
        x: inputs.x,
        w: inputs.w_gate_up,
    }
}

fn act_inputs<'a>(inputs: &Inputs, gate: &'a [f64], up: &'a [f64]) -> swigluoai::Inputs<'a> {
    swigluoai::Inputs {
        params: inputs.params.swigluoai,
        gate,
        up,
    }
}

fn down_inputs<'a>(inputs: &Inputs<'a>, act: &'a swigluoai::Output) -> linear::Inputs<'a> {
    let Params {
        rows,
        hidden,
        width,
        ..
    } = inputs.params;
    let (y, dx) = (Precision::Storage, Precision::Storage);
    let params = linear::Params {
        rows,
        n: hidden,
        k: width,
        y,
        dx,
    };
    linear::Inputs {
        params,
        x: &act.y,
        w: inputs.w_down,
    }
}
