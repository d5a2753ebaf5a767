//! Choice and weights of the experts of a token.

use super::CpuBackend;
use super::access::Access;
use super::math::{sigmoid, sigmoid_slice};
use super::rows::{add, for_rows};
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn router_select(
    _: &CpuBackend,
    args: &ops::RouterSelect<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.logits, args.bias, args.expert_ids]);
    let (logits, bias) = (
        held.read::<f32>(args.logits),
        held.read::<f32>(args.bias).as_slice(),
    );
    let expert_ids = held.write::<i32>(args.expert_ids);
    for_rows(dims.tokens, dims.experts, |tokens| {
        let mut scores = vec![0.0; dims.experts];
        let mut best = Vec::with_capacity(dims.topk + 1);
        for t in tokens {
            scores.copy_from_slice(logits.row([t]));
            sigmoid_slice(&mut scores);
            add(bias, &mut scores);
            choose(&scores, dims.topk, &mut best);
            // SAFETY: the ids of a token belong to one task.
            let ids = unsafe { expert_ids.row_mut([t]) };
            for (id, &(_, expert)) in ids.iter_mut().zip(&best) {
                *id = expert;
            }
            ids.sort_unstable();
        }
    });
    Ok(())
}

pub(super) fn router_weights(
    _: &CpuBackend,
    args: &ops::RouterWeights<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.logits, args.expert_ids, args.weights]);
    let logits = held.read::<f32>(args.logits);
    let ids = held.read::<i32>(args.expert_ids);
    ascending_ids("router_weights", ids.as_slice(), &dims)?;
    let weights = held.write::<f32>(args.weights);
    for_rows(dims.tokens, dims.topk, |tokens| {
        for t in tokens {
            // SAFETY: the weights of a token belong to one task.
            weigh(logits.row([t]), ids.row([t]), unsafe {
                weights.row_mut([t])
            });
        }
    });
    Ok(())
}

pub(super) fn router_backward(
    _: &CpuBackend,
    args: &ops::RouterBackward<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.logits, args.expert_ids, args.d_weights, args.d_logits]);
    let logits = held.read::<f32>(args.logits);
    let ids = held.read::<i32>(args.expert_ids);
    ascending_ids("router_backward", ids.as_slice(), &dims)?;
    let d_weights = held.read::<f32>(args.d_weights);
    let d_logits = held.write::<f32>(args.d_logits);
    for_rows(dims.tokens, dims.experts, |tokens| {
        let mut weights = vec![0.0; dims.topk];
        for t in tokens {
            let (logits, ids, d_weights) = (logits.row([t]), ids.row([t]), d_weights.row([t]));
            // SAFETY: the logits of a token belong to one task.
            let d_logits = unsafe { d_logits.row_mut([t]) };
            d_logits.fill(0.0);
            let sum = weigh(logits, ids, &mut weights);
            let mean: f32 = weights.iter().zip(d_weights).map(|(w, d)| w * d).sum();
            for (&id, &d_weight) in ids.iter().zip(d_weights) {
                let logit = logits[id as usize];
                // s·(1 − s), without the cancellation of a saturated s.
                let slope = sigmoid(logit) * sigmoid(-logit);
                d_logits[id as usize] = (d_weight - mean) / sum * slope;
            }
        }
    });
    Ok(())
}

/// Refuses ids of a token that are out of range, duplicated or not ascending.
pub(super) fn ascending_ids(op: &'static str, ids: &[i32], dims: &ops::RouterDims) -> Result<()> {
    let upper = dims.experts as i64;
    let mut lower = 0;
    for (index, &value) in ids.iter().enumerate() {
        let value = i64::from(value);
        if index % dims.topk == 0 {
            lower = 0;
        }
        if value < lower || value >= upper {
            return Err(Error::Index {
                op,
                tensor: "expert_ids",
                index,
                value,
                lower,
                upper,
            });
        }
        lower = value + 1;
    }
    Ok(())
}

/// The `topk` best (score, expert), best first; of equal ones the lower id, NaN after every number.
fn choose(scores: &[f32], topk: usize, best: &mut Vec<(f32, i32)>) {
    best.clear();
    for (expert, &score) in scores.iter().enumerate() {
        let rank = best.iter().rposition(|&(held, _)| !above(score, held));
        let place = rank.map_or(0, |rank| rank + 1);
        if place < topk {
            best.truncate(topk - 1);
            best.insert(place, (score, expert as i32));
        }
    }
}

fn above(a: f32, b: f32) -> bool {
    a > b || (b.is_nan() && !a.is_nan())
}

/// Weights of a token's experts; returns the sum of their scores.
fn weigh(logits: &[f32], ids: &[i32], weights: &mut [f32]) -> f32 {
    for (weight, &id) in weights.iter_mut().zip(ids) {
        *weight = sigmoid(logits[id as usize]);
    }
    let sum: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|weight| *weight /= sum);
    sum
}
