//! Group advantages, and the clipped policy loss of a step.
//!
//! Per token, with d = logp_old − logp: rho = exp(clamp(−d, ±20)), L1 = −rho·A, L2 = −clip(rho, 1−low, 1+high)·A, loss
//! max(L1, L2), and with dual clip c, for A < 0, at most −c·A. Sums over tokens use weights that already hold the mask
//! and the denominator, so the parts of a step add up whatever its micro-batches.

use crate::Rounding;
use crate::math::{index, sequences};

/// Constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// 0.2
    pub clip_low: f64,
    /// 0.28
    pub clip_high: f64,
    /// Bound of the loss of a negative advantage, above 1; off in the M3 recipe.
    pub dual_clip: Option<f64>,
}

/// |log ratio| beyond which the ratio no longer grows, so that it stays finite in fp32.
const LOG_RATIO_LIMIT: f64 = 20.0;
/// Added to the standard deviation of a group.
const STD_EPS: f64 = 1e-6;

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Constants.
    pub params: Params,
    /// Of the policy that is trained `[T]`, fp32
    pub log_probs: &'a [f64],
    /// Of the policy before the step `[T]`, fp32
    pub old_log_probs: &'a [f64],
    /// `[T]`, one value a sample
    pub advantages: &'a [f64],
    /// `[T]`, from [`token_weights`]; a token of weight 0 is not read
    pub weights: &'a [f64],
}

/// Weighted sums over the tokens, fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Output {
    /// Of the token losses.
    pub loss: f64,
    /// Of d = logp_old − logp.
    pub ppo_kl: f64,
    /// Of `1[L2 > L1]`.
    pub clipfrac: f64,
    /// Of e^−d − 1 + d, the estimate of KL(old ‖ new).
    pub k3: f64,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads {
    /// 1 unless the loss is scaled.
    pub dloss: f64,
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T]`, fp32
    pub dlog_probs: Vec<f64>,
}

/// fp32 sums.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let mut sums = Output::default();
    for t in active(inputs) {
        let (weight, token) = (inputs.weights[t], token(inputs, t));
        let d = inputs.old_log_probs[t] - inputs.log_probs[t];
        sums.loss += weight * token.loss;
        sums.ppo_kl += weight * d;
        sums.clipfrac += weight * f64::from(token.clipped);
        sums.k3 += weight * ((-d).exp_m1() + d);
    }
    Output {
        loss: rounding.fp32(sums.loss),
        ppo_kl: rounding.fp32(sums.ppo_kl),
        clipfrac: rounding.fp32(sums.clipfrac),
        k3: rounding.fp32(sums.k3),
    }
}

/// fp32.
pub fn backward(inputs: &Inputs, _: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let mut dlog_probs = vec![0.0; inputs.weights.len()];
    for t in active(inputs) {
        let dloss = grads.dloss * inputs.weights[t];
        dlog_probs[t] = rounding.fp32(dloss * token(inputs, t).dlog_prob);
    }
    Gradients { dlog_probs }
}

struct Token {
    loss: f64,
    clipped: bool,
    dlog_prob: f64,
}

fn token(inputs: &Inputs, t: usize) -> Token {
    let Params {
        clip_low,
        clip_high,
        dual_clip,
    } = inputs.params;
    let advantage = inputs.advantages[t];
    let log_ratio = inputs.log_probs[t] - inputs.old_log_probs[t];
    let ratio = clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp();
    let loss_1 = -ratio * advantage;
    let loss_2 = -clamp(ratio, 1.0 - clip_low, 1.0 + clip_high) * advantage;
    let clipped = loss_2 > loss_1;
    let saturated = log_ratio.abs() > LOG_RATIO_LIMIT;
    let dlog_prob = if clipped || saturated { 0.0 } else { loss_1 };
    let loss = if clipped { loss_2 } else { loss_1 };
    match dual_clip {
        Some(c) if advantage < 0.0 && loss > -c * advantage => Token {
            loss: -c * advantage,
            clipped,
            dlog_prob: 0.0,
        },
        _ => Token {
            loss,
            clipped,
            dlog_prob,
        },
    }
}

/// Unlike `f64::clamp` of a bounded range it keeps a NaN, which must reach the loss and be seen.
fn clamp(x: f64, low: f64, high: f64) -> f64 {
    if x < low {
        low
    } else if x > high {
        high
    } else {
        x
    }
}

fn active(inputs: &Inputs) -> impl Iterator<Item = usize> {
    let Inputs {
        log_probs,
        old_log_probs,
        advantages,
        weights,
        ..
    } = *inputs;
    assert!(
        [log_probs, old_log_probs, advantages]
            .iter()
            .all(|x| x.len() == weights.len())
    );
    (0..weights.len()).filter(|&t| weights[t] != 0.0)
}

/// (r − mean) / (std + 1e-6) in each group, std with n − 1.
///
/// `rewards` `[R]` and `groups` `[R]`, one a rollout, to be repeated for its samples; a reward of None is not scored
/// and gets 0, as does every rollout of a group with fewer than two scored ones or with equal rewards. Differences to
/// the first reward are averaged, not the rewards, so that equal ones give exactly 0 whatever their fraction.
pub fn group_advantages(rewards: &[Option<f64>], groups: &[i32]) -> Vec<f64> {
    assert_eq!(rewards.len(), groups.len(), "one group a reward");
    let of_sample = |(reward, group): (&Option<f64>, &i32)| {
        let Some(reward) = reward else { return 0.0 };
        let members = rewards.iter().zip(groups).filter(|(_, g)| *g == group);
        let scored: Vec<f64> = members.filter_map(|(r, _)| *r).collect();
        let n = scored.len() as f64;
        let shifted: Vec<f64> = scored.iter().map(|r| r - scored[0]).collect();
        let mean = shifted.iter().sum::<f64>() / n;
        let squares: f64 = shifted.iter().map(|r| (r - mean).powi(2)).sum();
        if scored.len() < 2 || squares == 0.0 {
            return 0.0;
        }
        (reward - scored[0] - mean) / ((squares / (n - 1.0)).sqrt() + STD_EPS)
    };
    rewards.iter().zip(groups).map(of_sample).collect()
}

/// How the token losses of a step become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Mean over rollouts of the mean over a rollout's tokens.
    RolloutMean,
    /// Mean over all tokens.
    TokenMean,
}

/// Weight of each token `[T]` from the mask `[T]` (1 counts, 0 does not), the samples' bounds and the rollout of each
/// sample `[B]`; samples of one rollout share a denominator. What is masked as a whole counts in no denominator. Taken
/// over the whole step, then cut into micro-batches. All zero if nothing counts.
pub fn token_weights(
    mask: &[f64],
    cu_seqlens: &[i32],
    rollouts: &[i32],
    reduction: Reduction,
) -> Vec<f64> {
    let samples: Vec<_> = sequences(cu_seqlens).collect();
    assert_eq!(samples.len(), rollouts.len(), "one rollout a sample");
    let mut tokens_of = vec![0.0; rollouts.iter().map(|&r| index(r) + 1).max().unwrap_or(0)];
    for (sample, &rollout) in samples.iter().zip(rollouts) {
        tokens_of[index(rollout)] += mask[sample.clone()].iter().sum::<f64>();
    }
    let scored = tokens_of.iter().filter(|&&tokens| tokens > 0.0).count() as f64;
    let all: f64 = tokens_of.iter().sum();
    let mut weights = vec![0.0; mask.len()];
    for (sample, &rollout) in samples.into_iter().zip(rollouts) {
        let denominator = match reduction {
            Reduction::RolloutMean => tokens_of[index(rollout)] * scored,
            Reduction::TokenMean => all,
        };
        for t in sample.filter(|&t| mask[t] != 0.0) {
            weights[t] = mask[t] / denominator;
        }
    }
    weights
}
