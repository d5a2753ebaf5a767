//! Residual add and gemma RMSNorm.

use super::CpuBackend;
use super::access::Access;
use super::math::rsqrt;
use super::rows::{Rows, RowsMut, add, for_rows, sum_over_rows, vector};
use super::simd::{dispatch, dot, fold};
use crate::error::Result;
use crate::ops;
use crate::tensor::Tensor;

pub(super) fn rms_norm(_: &CpuBackend, args: &ops::RmsNorm<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let always = [args.residual, args.weight, args.out, args.rstd];
    let operands = always.into_iter().chain(args.y).chain(args.residual_out);
    let held = Access::lock(&operands.collect::<Vec<_>>());
    let residual = Rows::new(&held, args.residual);
    let added = args.y.zip(args.residual_out);
    let added = added.map(|(y, sum)| (Rows::new(&held, y), RowsMut::new(&held, sum)));
    let gain = gain(&held, args.weight);
    let (out, rstd) = (RowsMut::new(&held, args.out), held.write::<f32>(args.rstd));
    for_rows(dims.tokens, dims.hidden, |tokens| {
        let [mut widened, mut sum, mut normed] = [(); 3].map(|()| vec![0.0; dims.hidden]);
        for t in tokens {
            sum.copy_from_slice(residual.row([t], &mut widened));
            // SAFETY: the rows of a token belong to one task.
            unsafe {
                if let Some((y, residual_out)) = &added {
                    add(y.row([t], &mut widened), &mut sum);
                    residual_out.store_and_round([t], &mut sum);
                }
                rstd.set([t], normalise(&sum, &gain, args.eps, &mut normed));
                out.store([t], &normed);
            }
        }
    });
    Ok(())
}

pub(super) fn rms_norm_backward(
    _: &CpuBackend,
    args: &ops::RmsNormBackward<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let always = [
        args.residual,
        args.weight,
        args.rstd,
        args.d_out,
        args.d_residual,
        args.d_weight,
    ];
    let operands = always.into_iter().chain(args.d_residual_in);
    let held = Access::lock(&operands.collect::<Vec<_>>());
    let residual = Rows::new(&held, args.residual);
    let d_out = Rows::new(&held, args.d_out);
    let passed = args.d_residual_in.map(|passed| Rows::new(&held, passed));
    let d_residual = RowsMut::new(&held, args.d_residual);
    let rstd = held.read::<f32>(args.rstd).as_slice();
    let gain = gain(&held, args.weight);
    let d_weight = sum_over_rows(dims.tokens, dims.hidden, |tokens, d_weight| {
        let [mut x, mut d, mut dx] = [(); 3].map(|()| vec![0.0; dims.hidden]);
        for t in tokens {
            let (x_row, d_row) = (residual.row([t], &mut x), d_out.row([t], &mut d));
            normalise_backward(x_row, &gain, rstd[t], d_row, &mut dx, d_weight);
            if let Some(passed) = &passed {
                add(passed.row([t], &mut x), &mut dx);
            }
            // SAFETY: a row of the gradient belongs to one task.
            unsafe { d_residual.store([t], &dx) };
        }
    });
    // SAFETY: no task runs any more.
    add(&d_weight, unsafe {
        held.write::<f32>(args.d_weight).row_mut([])
    });
    Ok(())
}

/// 1 + w, in f32: a bf16 gain would lose the low bits of w.
pub(super) fn gain(held: &Access<'_>, weight: &Tensor<CpuBackend>) -> Vec<f32> {
    let mut gain = vector(held, weight);
    gain.iter_mut().for_each(|w| *w += 1.0);
    gain
}

dispatch! {
    /// out = x · rstd · gain; returns rstd = 1 / sqrt(mean(x²) + eps).
    pub(super) fn normalise(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) -> f32 {
        let rstd = rsqrt(dot(x, x) / x.len() as f32 + eps);
        for ((out, &x), &gain) in out.iter_mut().zip(x).zip(gain) {
            *out = x * rstd * gain;
        }
        rstd
    }

    /// With x̂ = x·rstd and g = d·gain: dx = rstd·(g − x̂·mean(g·x̂)), d_gain += d·x̂.
    pub(super) fn normalise_backward(
        x: &[f32],
        gain: &[f32],
        rstd: f32,
        d: &[f32],
        dx: &mut [f32],
        d_gain: &mut [f32],
    ) {
        let step = |sum, [x, gain, d]: [f32; 3]| (d * gain).mul_add(x * rstd, sum);
        let mean = fold([x, gain, d], 0.0, step, |a, b| a + b) / x.len() as f32;
        for ((dx, &x), (&gain, &d)) in dx.iter_mut().zip(x).zip(gain.iter().zip(d)) {
            *dx = rstd * (d * gain - x * rstd * mean);
        }
        for ((d_gain, &x), &d) in d_gain.iter_mut().zip(x).zip(d) {
            *d_gain = d.mul_add(x * rstd, *d_gain);
        }
    }
}
