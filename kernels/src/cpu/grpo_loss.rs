//! Clipped policy-gradient loss.

use rayon::prelude::*;

use super::CpuBackend;
use super::access::Access;
use super::math::exp;
use super::simd::dispatch;
use crate::error::Result;
use crate::ops;

/// Tokens of a task, whose sums are added up in order. Part of the result's definition.
const TOKENS_PER_PARTIAL: usize = 4096;

/// |log ratio| beyond which the ratio no longer grows.
const LOG_RATIO_LIMIT: f32 = 20.0;

pub(super) fn grpo_loss(_: &CpuBackend, args: &ops::GrpoLoss<'_, CpuBackend>) -> Result<()> {
    args.dims()?;
    let inputs = [
        args.log_prob,
        args.old_log_prob,
        args.advantage,
        args.weight,
    ];
    let outputs = [args.loss, args.d_log_prob, args.stats];
    let held = Access::lock(&[&inputs[..], &outputs].concat());
    let inputs = inputs.map(|tensor| held.read::<f32>(tensor).as_slice());
    // SAFETY: the only slice of this view.
    let d_log_prob = unsafe { held.write::<f32>(args.d_log_prob).as_mut_slice() };
    let partials: Vec<[f64; 3]> = d_log_prob
        .par_chunks_mut(TOKENS_PER_PARTIAL)
        .enumerate()
        .map(|(index, d_log_prob)| {
            let first = index * TOKENS_PER_PARTIAL;
            let inputs = inputs.map(|input| &input[first..first + d_log_prob.len()]);
            tokens(inputs, args.eps_low, args.eps_high, d_log_prob)
        })
        .collect();
    let mut sums = [0.0; 3];
    for partial in partials {
        for (sum, partial) in sums.iter_mut().zip(partial) {
            *sum += partial;
        }
    }
    let [loss, ppo_kl, clip_fraction] = sums.map(|sum| sum as f32);
    let (out, stats) = (held.write::<f32>(args.loss), held.write::<f32>(args.stats));
    // SAFETY: no task runs any more.
    unsafe {
        out.set([0], loss);
        stats.set([0], ppo_kl);
        stats.set([1], clip_fraction);
    }
    Ok(())
}

/// Unlike `f32::clamp` of a bounded range it keeps a NaN, which must reach the loss and be seen.
#[inline(always)]
fn clamp(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

dispatch! {
    /// Weighted sums of loss, d and clip indicator, in f64: tokens of both signs cancel.
    fn tokens(inputs: [&[f32]; 4], eps_low: f32, eps_high: f32, d_log_prob: &mut [f32]) -> [f64; 3] {
        let [new, old, advantage, weight] = inputs;
        let mut sums = [0.0; 3];
        for (t, gradient) in d_log_prob.iter_mut().enumerate() {
            let (advantage, weight) = (advantage[t], weight[t]);
            *gradient = 0.0;
            // A masked token is not read: what it holds may be anything.
            if weight == 0.0 {
                continue;
            }
            let log_ratio = new[t] - old[t];
            let ratio = exp(clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT));
            let plain = -ratio * advantage;
            let bounded = -clamp(ratio, 1.0 - eps_low, 1.0 + eps_high) * advantage;
            let clipped = bounded > plain;
            let saturated = log_ratio.abs() > LOG_RATIO_LIMIT;
            if !clipped && !saturated {
                *gradient = weight * plain;
            }
            let loss = if clipped { bounded } else { plain };
            let clip = if clipped { 1.0 } else { 0.0 };
            for (sum, value) in sums.iter_mut().zip([loss, -log_ratio, clip]) {
                *sum += f64::from(weight) * f64::from(value);
            }
        }
        sums
    }
}
