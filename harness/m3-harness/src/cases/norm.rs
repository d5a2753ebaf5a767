use m3_kernels::{Backend, Result, ops};
use m3_reference::ops::{qk_norm_rope as rope, rms_norm, swigluoai};
use m3_spec::dtype::DType;
use m3_spec::inputs::Distribution;
use m3_spec::rope::RotaryTable;

use super::List;
use crate::lab::{Given, Lab, positions};

/// Epsilon of every norm.
const EPS: f32 = 1e-6;

/// Weights of a norm.
#[derive(Clone, Copy)]
enum Weights {
    /// Around 0, as a trained norm has them.
    Drawn,
    /// Odd multiples of 2^-8, so that 1 + w lies halfway between two bf16 values: whoever rounds the sum errs by as much
    /// as can be, where an average error would hide in the rounding of the result.
    Halfway,
}

impl Weights {
    fn given<B: Backend>(self, lab: &mut Lab<'_, B>, len: usize) -> Result<Given<B>> {
        match self {
            Weights::Drawn => lab.normal("weight", 0.3, [len]),
            Weights::Halfway => {
                let picks = lab.integers("weight", 32, len);
                let halfway = picks.iter().map(|&pick| f64::from(2 * pick + 1) / 256.0);
                lab.given(halfway.collect(), lab.storage, [len])
            }
        }
    }
}

pub(super) fn add<B: Backend>(list: &mut List<B>) {
    list.both("rms_norm", "t67_h200", |lab| {
        norm(lab, [67, 200], 1.0, Weights::Drawn, true)
    });
    list.both("rms_norm", "first_t33_h136", |lab| {
        norm(lab, [33, 136], 1.0, Weights::Drawn, false)
    });
    // Mean squares of the size of epsilon, without which its value never shows.
    list.both("rms_norm", "small_t67_h200", |lab| {
        norm(lab, [67, 200], 1e-3, Weights::Drawn, true)
    });
    list.both("rms_norm", "halfway_t67_h200", |lab| {
        norm(lab, [67, 200], 1.0, Weights::Halfway, true)
    });
    for (variant, heads, head_dim, rotary_dim, theta, weights) in [
        ("h3_d64_r32", 3, 64, 32, 5e6, Weights::Drawn),
        ("h1_d128_r64", 1, 128, 64, 1e7, Weights::Drawn),
        ("h2_d24_r12", 2, 24, 12, 5e6, Weights::Drawn),
        ("halfway_h3_d64_r32", 3, 64, 32, 5e6, Weights::Halfway),
    ] {
        list.both("qk_norm_rope", variant, move |lab| {
            norm_rope(lab, [heads, head_dim, rotary_dim], theta, weights)
        });
    }
    list.both("swigluoai", "t41_f168", |lab| {
        activation(lab, [41, 168], 7.0)
    });
    // A gate of -7 leaves 5e-5 of the activation; only a low limit shows that nothing is clamped from below.
    list.both("swigluoai", "limit1_t41_f168", |lab| {
        activation(lab, [41, 168], 1.0)
    });
}

fn norm<B: Backend>(
    lab: &mut Lab<'_, B>,
    shape: [usize; 2],
    std: f64,
    weights: Weights,
    add: bool,
) -> Result<()> {
    let [tokens, hidden] = shape;
    let residual = lab.normal("residual", std, shape)?;
    let y = lab.normal("y", 0.5 * std, shape)?;
    let weight = weights.given(lab, hidden)?;
    let d_out = lab.normal("d_out", 1.0, shape)?;
    let passed = lab.normal("d_residual_in", 1.0, shape)?;
    let [sum, out, d_residual] = [(); 3].map(|()| lab.output(lab.storage, shape));
    let (sum, out, d_residual) = (sum?, out?, d_residual?);
    let rstd = lab.output(DType::F32, [tokens])?;
    let d_weight = lab.gradient([hidden])?;
    let forward = ops::RmsNorm {
        residual: &residual.device,
        y: add.then_some(&y.device),
        weight: &weight.device,
        residual_out: add.then_some(&sum),
        out: &out,
        rstd: &rstd,
        eps: EPS,
    };
    lab.backend.rms_norm(&lab.stream, &forward)?;
    let backward = ops::RmsNormBackward {
        residual: if add { &sum } else { &residual.device },
        weight: &weight.device,
        rstd: &rstd,
        d_out: &d_out.device,
        d_residual_in: add.then_some(&passed.device),
        d_residual: &d_residual,
        d_weight: &d_weight,
    };
    lab.backend.rms_norm_backward(&lab.stream, &backward)?;

    let inputs = rms_norm::Inputs {
        params: rms_norm::Params {
            rows: tokens,
            hidden,
            eps: f64::from(EPS),
        },
        resid: &residual.host,
        y: add.then_some(&y.host),
        weight: &weight.host,
    };
    let grads = rms_norm::Grads {
        dout: &d_out.host,
        dr: add.then_some(&passed.host),
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = rms_norm::forward(&inputs, &rounding);
        (
            rms_norm::backward(&inputs, &output, &grads, &rounding),
            output,
        )
    });
    if add {
        lab.judge("r", &sum, exact.1.r, twin.1.r)?;
    }
    lab.judge("out", &out, exact.1.out, twin.1.out)?;
    lab.judge("dresid", &d_residual, exact.0.dresid, twin.0.dresid)?;
    lab.judge("dweight", &d_weight, exact.0.dweight, twin.0.dweight)
}

fn norm_rope<B: Backend>(
    lab: &mut Lab<'_, B>,
    [heads, head_dim, rotary_dim]: [usize; 3],
    theta: f64,
    weights: Weights,
) -> Result<()> {
    let lengths = [61, 1, 50];
    let tokens = lengths.iter().sum();
    let shape = [tokens, heads, head_dim];
    let x = lab.normal("x", 2.0, shape)?;
    let beside = lab.normal("beside", 1.0, shape)?;
    let fused = lab.fuse(&[&beside, &x])?;
    let weight = weights.given(lab, head_dim)?;
    let d_out = lab.normal("d_out", 1.0, shape)?;
    let table = RotaryTable::new(theta, rotary_dim, 64);
    let cos_sin_host: Vec<f64> = table.cos_sin.iter().map(|&x| f64::from(x)).collect();
    let cos_sin = lab.given(cos_sin_host, DType::F32, [64, rotary_dim / 2, 2])?;
    let host_positions = positions(&lengths);
    let device_positions = lab.ints(&host_positions, [tokens])?;
    let out = lab.output(lab.storage, shape)?;
    let dx = lab.output(lab.storage, shape)?;
    let rstd = lab.output(DType::F32, [tokens, heads])?;
    let d_weight = lab.gradient([head_dim])?;
    let forward = ops::QkNormRope {
        x: &fused[1],
        weight: &weight.device,
        cos_sin: &cos_sin.device,
        positions: &device_positions,
        out: &out,
        rstd: &rstd,
        eps: EPS,
    };
    lab.backend.qk_norm_rope(&lab.stream, &forward)?;
    let backward = ops::QkNormRopeBackward {
        x: &fused[1],
        weight: &weight.device,
        cos_sin: &cos_sin.device,
        positions: &device_positions,
        rstd: &rstd,
        d_out: &d_out.device,
        dx: &dx,
        d_weight: &d_weight,
    };
    lab.backend.qk_norm_rope_backward(&lab.stream, &backward)?;

    let params = rope::Params {
        tokens,
        heads,
        head_dim,
        rotary_dim,
        eps: f64::from(EPS),
    };
    let inputs = rope::Inputs {
        params,
        x: &x.host,
        weight: &weight.host,
        cos_sin: &table.cos_sin,
        positions: &host_positions,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = rope::forward(&inputs, &rounding);
        let grads = rope::Grads { dy: &d_out.host };
        (
            rope::backward(&inputs, &output, &grads, &rounding),
            output.y,
        )
    });
    lab.judge("y", &out, exact.1, twin.1)?;
    lab.judge("dx", &dx, exact.0.dx, twin.0.dx)?;
    lab.judge("dweight", &d_weight, exact.0.dweight, twin.0.dweight)
}

fn activation<B: Backend>(lab: &mut Lab<'_, B>, shape: [usize; 2], limit: f32) -> Result<()> {
    let [tokens, width] = shape;
    // Wide enough that both clamps are met often.
    let gate = lab.draw(
        "gate",
        Distribution::Normal { std: 5.0 },
        lab.storage,
        shape,
    )?;
    let up = lab.draw("up", Distribution::Normal { std: 5.0 }, lab.storage, shape)?;
    let d_out = lab.normal("d_out", 1.0, shape)?;
    let alpha = 1.702f32;
    let out = lab.output(lab.storage, shape)?;
    let fused = lab.output(lab.storage, [tokens, 2 * width])?;
    let (d_gate, d_up) = (fused.slice(1, 0..width), fused.slice(1, width..2 * width));
    let (gate_device, up_device) = (&gate.device, &up.device);
    let forward = ops::Swigluoai {
        gate: gate_device,
        up: up_device,
        out: &out,
        alpha,
        limit,
    };
    lab.backend.swigluoai(&lab.stream, &forward)?;
    let backward = ops::SwigluoaiBackward {
        gate: gate_device,
        up: up_device,
        d_out: &d_out.device,
        d_gate: &d_gate,
        d_up: &d_up,
        alpha,
        limit,
    };
    lab.backend.swigluoai_backward(&lab.stream, &backward)?;

    let params = swigluoai::Params {
        alpha: f64::from(alpha),
        limit: f64::from(limit),
    };
    let inputs = swigluoai::Inputs {
        params,
        gate: &gate.host,
        up: &up.host,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = swigluoai::forward(&inputs, &rounding);
        let grads = swigluoai::Grads { dy: &d_out.host };
        (
            swigluoai::backward(&inputs, &output, &grads, &rounding),
            output.y,
        )
    });
    lab.judge("y", &out, exact.1, twin.1)?;
    lab.judge("dgate", &d_gate, exact.0.dgate, twin.0.dgate)?;
    lab.judge("dup", &d_up, exact.0.dup, twin.0.dup)
}
