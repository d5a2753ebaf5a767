//! Gradient norm, clip coefficient and AdamW.

use rayon::prelude::*;

use super::CpuBackend;
use super::access::{Access, Storage, with_storage};
use super::simd::{LANES, dispatch};
use super::strided::Strided;
use crate::error::{Error, Result};
use crate::ops;

/// Elements of a task of a step.
const TASK_ELEMENTS: usize = 1 << 14;

/// Added to the norm, so that a zero one divides.
const NORM_EPS: f64 = 1e-6;

/// Sums of fixed ranges in f64, added in order.
pub(super) fn sum_squares(_: &CpuBackend, args: &ops::SumSquares<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    let held = Access::lock(&[args.source, args.sum]);
    let partials: Vec<f64> = with_storage!(args.source.dtype(), T => {
        let source = held.read::<T>(args.source);
        let walk = Strided::new(source.shape(), [source.strides()]);
        let of_range = |range: std::ops::Range<usize>| {
            let mut gathered = vec![0.0; range.len()];
            walk.for_each_run(range, |run| {
                let to = &mut gathered[run.first..run.first + run.length];
                for (index, to) in to.iter_mut().enumerate() {
                    let offset = run.offsets[0] + index * run.steps[0];
                    // SAFETY: an element of the view.
                    *to = unsafe { *source.as_ptr().add(offset) }.to_f32();
                }
            });
            squares(&gathered)
        };
        walk.tasks().map(of_range).collect()
    });
    let sum = partials.iter().fold(0.0, |sum, partial| sum + partial);
    // SAFETY: no task runs any more.
    unsafe { held.write::<f32>(args.sum).set([0], sum as f32) };
    Ok(())
}

pub(super) fn clip_coefficient(
    _: &CpuBackend,
    args: &ops::ClipCoefficient<'_, CpuBackend>,
) -> Result<()> {
    args.dims()?;
    let held = Access::lock(&[args.sums, args.norm, args.coefficient, args.finite]);
    let sums = held.read::<f32>(args.sums).as_slice();
    let norm = sums.iter().map(|&sum| f64::from(sum)).sum::<f64>().sqrt();
    let coefficient = f64::from(args.max_norm) / (norm + NORM_EPS);
    // Not `min`, which would turn a NaN into 1.
    let coefficient = if coefficient > 1.0 { 1.0 } else { coefficient };
    let norm = norm as f32;
    // SAFETY: no task runs.
    unsafe {
        held.write::<f32>(args.norm).set([0], norm);
        held.write::<f32>(args.coefficient)
            .set([0], coefficient as f32);
        held.write::<i32>(args.finite)
            .set([0], i32::from(norm.is_finite()));
    }
    Ok(())
}

pub(super) fn adamw(_: &CpuBackend, args: &ops::AdamW<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    let written = [args.master, args.exp_avg, args.exp_avg_sq];
    let scalars = [args.learning_rate, args.step, args.coefficient, args.finite];
    let held = Access::lock(&[&[args.grad, args.param], &written[..], &scalars].concat());
    if held.read::<i32>(args.finite).at([0]) == 0 {
        return Ok(());
    }
    let step = held.read::<i32>(args.step).at([0]);
    let Some(step) = u32::try_from(step).ok().filter(|&step| step > 0) else {
        let what = format!("step {step} must count from 1");
        return Err(Error::Argument { op: "adamw", what });
    };
    let constants = Constants {
        coefficient: held.read::<f32>(args.coefficient).at([0]),
        learning_rate: held.read::<f32>(args.learning_rate).at([0]),
        beta1: args.beta1,
        beta2: args.beta2,
        correction1: correction(args.beta1, step),
        correction2: correction(args.beta2, step),
        eps: args.eps,
        weight_decay: args.weight_decay,
    };
    let grad = held.read::<f32>(args.grad).as_slice();
    // SAFETY: the only slices of these views.
    let [master, exp_avg, exp_avg_sq] =
        written.map(|tensor| unsafe { held.write::<f32>(tensor).as_mut_slice() });
    with_storage!(args.param.dtype(), P => {
        // SAFETY: as above.
        let param = unsafe { held.write::<P>(args.param).as_mut_slice() };
        (
            grad.par_chunks(TASK_ELEMENTS),
            master.par_chunks_mut(TASK_ELEMENTS),
            exp_avg.par_chunks_mut(TASK_ELEMENTS),
            exp_avg_sq.par_chunks_mut(TASK_ELEMENTS),
            param.par_chunks_mut(TASK_ELEMENTS),
        )
            .into_par_iter()
            .for_each(|(grad, master, exp_avg, exp_avg_sq, param)| {
                update(grad, master, exp_avg, exp_avg_sq, param, &constants);
            });
    });
    Ok(())
}

struct Constants {
    coefficient: f32,
    learning_rate: f32,
    beta1: f32,
    beta2: f32,
    correction1: f32,
    correction2: f32,
    eps: f32,
    weight_decay: f32,
}

/// 1 − βˢ, by squaring in f64: `powi` promises no order and so no bits.
fn correction(beta: f32, step: u32) -> f32 {
    let (mut power, mut square, mut rest) = (1.0, f64::from(beta), step);
    while rest > 0 {
        if rest & 1 == 1 {
            power *= square;
        }
        square *= square;
        rest >>= 1;
    }
    (1.0 - power) as f32
}

dispatch! {
    /// Σ x² in f64, lane l taking elements l, l + 16, …; the squares are exact.
    fn squares(x: &[f32]) -> f64 {
        let mut lanes = [0.0; LANES];
        for part in x.chunks(LANES) {
            for (lane, &x) in lanes.iter_mut().zip(part) {
                *lane += f64::from(x) * f64::from(x);
            }
        }
        lanes.iter().sum()
    }

    fn update<P: Storage>(
        grad: &[f32],
        master: &mut [f32],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
        param: &mut [P],
        constants: &Constants,
    ) {
        let c = constants;
        let (rest1, rest2) = (1.0 - c.beta1, 1.0 - c.beta2);
        let moments = exp_avg.iter_mut().zip(exp_avg_sq);
        for (((&grad, w), (m, v)), param) in grad.iter().zip(master).zip(moments).zip(param) {
            let g = c.coefficient * grad;
            *m = c.beta1 * *m + rest1 * g;
            *v = c.beta2 * *v + rest2 * g * g;
            let step = *m / c.correction1 / ((*v / c.correction2).sqrt() + c.eps);
            *w -= c.learning_rate * (step + c.weight_decay * *w);
            *param = P::from_f32(*w);
        }
    }
}
