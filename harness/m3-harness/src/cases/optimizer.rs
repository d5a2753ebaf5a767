use m3_kernels::{Backend, Result, ops};
use m3_reference::ops::adamw;
use m3_spec::dtype::DType;

use super::List;
use crate::lab::Lab;

pub(super) fn add<B: Backend>(list: &mut List<B>) {
    list.both("adamw", "first_step", |lab| step(lab, 1, 0.0, 1.0));
    list.both("adamw", "step7_decay", |lab| step(lab, 7, 0.1, 1.0));
    // The gradients' norm is 6.7.
    list.both("adamw", "unclipped", |lab| step(lab, 2, 0.0, 100.0));
}

fn step<B: Backend>(
    lab: &mut Lab<'_, B>,
    number: i32,
    weight_decay: f32,
    max_norm: f32,
) -> Result<()> {
    let extent = [4500];
    let grad = lab.normal_f32("grad", 0.1, extent)?;
    let master = lab.normal_f32("master", 0.5, extent)?;
    let exp_avg = lab.normal_f32("exp_avg", 0.05, extent)?;
    let roots = lab.normal_f32("exp_avg_sq", 0.1, extent)?;
    let squares = roots.host.iter().map(|x| x * x).collect();
    let exp_avg_sq = lab.given(squares, DType::F32, extent)?;
    let param = lab.output(lab.storage, extent)?;
    let learning_rate = lab.given(vec![2e-3], DType::F32, [1])?;
    let device_step = lab.ints(&[number], [1])?;
    let sums = lab.output(DType::F32, [1])?;
    let (norm, coefficient) = (lab.output(DType::F32, [1])?, lab.output(DType::F32, [1])?);
    let finite = lab.output(DType::I32, [1])?;
    let square = ops::SumSquares {
        source: &grad.device,
        sum: &sums,
    };
    lab.backend.sum_squares(&lab.stream, &square)?;
    let clip = ops::ClipCoefficient {
        sums: &sums,
        norm: &norm,
        coefficient: &coefficient,
        finite: &finite,
        max_norm,
    };
    lab.backend.clip_coefficient(&lab.stream, &clip)?;
    let (beta1, beta2, eps) = (0.9f32, 0.98f32, 1e-8f32);
    let args = ops::AdamW {
        grad: &grad.device,
        master: &master.device,
        exp_avg: &exp_avg.device,
        exp_avg_sq: &exp_avg_sq.device,
        param: &param,
        learning_rate: &learning_rate.device,
        step: &device_step,
        coefficient: &coefficient,
        finite: &finite,
        beta1,
        beta2,
        eps,
        weight_decay,
    };
    lab.backend.adamw(&lab.stream, &args)?;

    let exact_norm = adamw::grad_norm([grad.host.as_slice()]);
    let clipped = adamw::clip_coefficient(exact_norm, f64::from(max_norm));
    lab.judge("norm", &norm, vec![exact_norm], vec![exact_norm])?;
    lab.judge("grad_scale", &coefficient, vec![clipped], vec![clipped])?;
    lab.judge_ids("finite", &finite, &[1])?;
    let params = adamw::Params {
        learning_rate: learning_rate.host[0],
        beta1: f64::from(beta1),
        beta2: f64::from(beta2),
        eps: f64::from(eps),
        weight_decay: f64::from(weight_decay),
        step: number,
        grad_scale: clipped,
    };
    let inputs = adamw::Inputs {
        params,
        w: &master.host,
        dw: &grad.host,
        m: &exp_avg.host,
        v: &exp_avg_sq.host,
    };
    let [exact, twin] =
        [lab.exact(), lab.twin()].map(|rounding| adamw::forward(&inputs, &rounding));
    lab.judge("m", &exp_avg.device, exact.m, twin.m)?;
    lab.judge("v", &exp_avg_sq.device, exact.v, twin.v)?;
    lab.judge("w", &master.device, exact.w, twin.w)?;
    lab.judge("stored", &param, exact.stored, twin.stored)
}
