//! Advantages, policy loss, optimizer.

use crate::check::{assert_close, assert_derivative, uniform};
use m3_reference::Rounding;
use m3_reference::ops::adamw::{self, clip_coefficient, grad_norm};
use m3_reference::ops::grpo_loss::{
    Grads, Inputs, Output, Params, Reduction, backward, forward, group_advantages, token_weights,
};

const EXACT: Rounding = Rounding::Exact;
const M3: Params = Params {
    clip_low: 0.2,
    clip_high: 0.28,
    dual_clip: None,
};

#[test]
fn equal_fractional_rewards_give_advantages_of_exactly_zero() {
    for reward in [0.1, f64::from(0.1f32), 0.3, 1.0 / 3.0] {
        assert_eq!(group_advantages(&[Some(reward); 16], &[0; 16]), [0.0; 16]);
    }
}

#[test]
fn advantages_divide_by_the_unbiased_deviation_of_their_own_group() {
    let rewards = [Some(1.0), Some(5.0), Some(0.0), Some(7.0)];
    let got = group_advantages(&rewards, &[0, 1, 0, 1]);
    let (a, b) = (0.5 / (0.5f64.sqrt() + 1e-6), 1.0 / (2f64.sqrt() + 1e-6));
    assert_close(&got, &[a, -b, -a, b], 1e-15);
}

#[test]
fn a_group_with_fewer_than_two_scored_samples_has_advantage_zero() {
    let rewards = [Some(1.0), None, None, Some(2.0), Some(4.0), None];
    let got = group_advantages(&rewards, &[0, 0, 1, 2, 2, 2]);
    assert_eq!(got[..3], [0.0; 3]);
    assert!(got[3] < 0.0 && got[4] > 0.0 && got[5] == 0.0);
}

/// Sample A has four active tokens, B three masked ones.
#[test]
fn a_masked_sample_counts_in_no_denominator() {
    let mask = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0];
    for reduction in [Reduction::RolloutMean, Reduction::TokenMean] {
        let weights = token_weights(&mask, &[0, 4, 7], &[0, 1], reduction);
        let run = |weights: &[f64]| {
            let log_probs = [0.0, 0.0, 0.0, 0.0, f64::NAN, 0.0, f64::NAN];
            let inputs = Inputs {
                params: M3,
                log_probs: &log_probs,
                old_log_probs: &[0.0; 7],
                advantages: &[-1.0; 7],
                weights,
            };
            let output = forward(&inputs, &EXACT);
            (
                output,
                backward(&inputs, &output, &Grads { dloss: 1.0 }, &EXACT).dlog_probs,
            )
        };
        assert_eq!(
            run(&weights).0,
            Output {
                loss: 1.0,
                ..Output::default()
            }
        );
        let nothing = token_weights(&[0.0; 7], &[0, 4, 7], &[0, 1], reduction);
        assert_eq!(run(&nothing), (Output::default(), vec![0.0; 7]));
    }
}

#[test]
fn samples_of_one_rollout_share_a_denominator() {
    let mask = [1.0, 1.0, 0.0, 1.0, 1.0];
    let weights = token_weights(&mask, &[0, 2, 4, 5], &[0, 0, 1], Reduction::RolloutMean);
    assert_close(
        &weights,
        &[1.0 / 6.0, 1.0 / 6.0, 0.0, 1.0 / 6.0, 0.5],
        1e-16,
    );
    let weights = token_weights(&mask, &[0, 2, 4, 5], &[0, 0, 1], Reduction::TokenMean);
    assert_eq!(weights, [0.25, 0.25, 0.0, 0.25, 0.25]);
}

fn one_token(params: Params, ratio: f64, advantage: f64) -> (Output, f64) {
    let inputs = Inputs {
        params,
        log_probs: &[ratio.ln()],
        old_log_probs: &[0.0],
        advantages: &[advantage],
        weights: &[1.0],
    };
    let output = forward(&inputs, &EXACT);
    (
        output,
        backward(&inputs, &output, &Grads { dloss: 1.0 }, &EXACT).dlog_probs[0],
    )
}

#[test]
fn the_clip_is_asymmetric_and_stops_the_gradient_only_where_it_binds() {
    // (ratio, advantage, loss, gradient)
    for (ratio, advantage, loss, dlog_prob) in [
        (1.3, 1.0, -1.28, 0.0),
        (1.25, 1.0, -1.25, -1.25),
        (0.7, 1.0, -0.7, -0.7),
        (0.7, -1.0, 0.8, 0.0),
        (1.3, -1.0, 1.3, 1.3),
    ] {
        let (output, gradient) = one_token(M3, ratio, advantage);
        assert_close(&[output.loss, gradient], &[loss, dlog_prob], 1e-15);
        assert_eq!(output.clipfrac, if dlog_prob == 0.0 { 1.0 } else { 0.0 });
        assert_close(&[output.ppo_kl], &[-ratio.ln()], 1e-15);
        assert_close(&[output.k3], &[ratio - 1.0 - ratio.ln()], 1e-15);
    }
}

#[test]
fn dual_clip_bounds_the_loss_of_a_negative_advantage() {
    let dual = Params {
        dual_clip: Some(3.0),
        ..M3
    };
    let (output, gradient) = one_token(dual, 5.0, -1.0);
    assert_eq!((output.loss, gradient), (3.0, 0.0));
    assert_eq!(
        one_token(dual, 2.0, -1.0).0.loss,
        one_token(M3, 2.0, -1.0).0.loss
    );
    assert_eq!(
        one_token(dual, 0.1, 1.0).0.loss,
        one_token(M3, 0.1, 1.0).0.loss
    );
}

#[test]
fn the_log_ratio_saturates_at_twenty() {
    let (output, gradient) = one_token(M3, 25f64.exp(), -1.0);
    assert_eq!((output.loss, gradient), (20f64.exp(), 0.0));
}

#[test]
fn an_unchanged_policy_has_ratio_one_everywhere() {
    let log_probs = uniform(1, 6);
    let inputs = Inputs {
        params: M3,
        log_probs: &log_probs,
        old_log_probs: &log_probs,
        advantages: &[0.5; 6],
        weights: &[0.125; 6],
    };
    let output = forward(&inputs, &EXACT);
    assert_eq!(
        (output.ppo_kl, output.clipfrac, output.k3, output.loss),
        (0.0, 0.0, 0.0, -0.375)
    );
}

#[test]
fn a_nan_log_prob_of_an_active_token_reaches_the_loss() {
    let (output, gradient) = one_token(M3, f64::NAN, 1.0);
    assert!(output.loss.is_nan() && gradient.is_nan());
}

#[test]
fn grpo_loss_gradients_are_its_derivative() {
    let (log_probs, old, advantages) = ([uniform(1, 40)], uniform(2, 40), uniform(3, 40));
    let weights: Vec<f64> = uniform(4, 40).iter().map(|w| w.abs()).collect();
    for dual_clip in [None, Some(1.5)] {
        let params = Params { dual_clip, ..M3 };
        let run = |x: &[Vec<f64>]| {
            let inputs = Inputs {
                params,
                log_probs: &x[0],
                old_log_probs: &old,
                advantages: &advantages,
                weights: &weights,
            };
            let output = forward(&inputs, &EXACT);
            (
                output.loss,
                backward(&inputs, &output, &Grads { dloss: 1.0 }, &EXACT).dlog_probs,
            )
        };
        assert_derivative(&log_probs, &[run(&log_probs).1], |x| run(x).0);
    }
}

fn adamw_params(step: i32) -> adamw::Params {
    adamw::Params {
        learning_rate: 3e-6,
        beta1: 0.9,
        beta2: 0.98,
        eps: 1e-8,
        weight_decay: 0.1,
        step,
        grad_scale: 1.0,
    }
}

#[test]
fn the_first_step_moves_a_weight_by_the_learning_rate_whatever_the_gradient() {
    let inputs = adamw::Inputs {
        params: adamw::Params {
            weight_decay: 0.0,
            ..adamw_params(1)
        },
        w: &[0.0; 3],
        dw: &[1e-3, -40.0, 0.0],
        m: &[0.0; 3],
        v: &[0.0; 3],
    };
    let w = adamw::forward(&inputs, &EXACT).w;
    assert_close(&w, &[-3e-6, 3e-6, 0.0], 1e-10);
}

#[test]
fn weight_decay_is_decoupled_from_the_gradient() {
    let inputs = adamw::Inputs {
        params: adamw_params(1),
        w: &[2.0],
        dw: &[0.0],
        m: &[0.0],
        v: &[0.0],
    };
    let output = adamw::forward(&inputs, &EXACT);
    assert_eq!(output.w, [2.0 - 3e-6 * 0.1 * 2.0]);
    assert_eq!((output.m[0], output.v[0]), (0.0, 0.0));
}

/// Two steps written out by hand.
#[test]
fn moments_are_corrected_for_their_start_at_zero() {
    let (mut w, mut m, mut v) = (vec![0.5], vec![0.0], vec![0.0]);
    for (step, dw) in [(1, 0.2), (2, -0.1)] {
        let params = adamw::Params {
            learning_rate: 0.01,
            grad_scale: 0.5,
            ..adamw_params(step)
        };
        let inputs = adamw::Inputs {
            params,
            w: &w,
            dw: &[dw],
            m: &m,
            v: &v,
        };
        let output = adamw::forward(&inputs, &EXACT);
        (w, m, v) = (output.w, output.m, output.v);
    }
    let (m2, v2) = (0.9 * 0.01 + 0.1 * -0.05, 0.98 * 0.0002 + 0.02 * 0.0025);
    let first = 0.5 - 0.01 * (0.05 + 0.1 / (0.1 + 1e-8));
    let update = m2 / 0.19 / ((v2 / 0.0396f64).sqrt() + 1e-8);
    assert_close(&w, &[first - 0.01 * (0.1 * first + update)], 1e-15);
}

#[test]
fn gradients_are_clipped_by_their_norm_and_a_nan_norm_stays_nan() {
    let norm = grad_norm([&[3.0][..], &[], &[4.0]]);
    assert_eq!(norm, 5.0);
    assert_eq!(clip_coefficient(norm, 1.0), 1.0 / 5.000001);
    assert_eq!(clip_coefficient(0.5, 1.0), 1.0);
    assert!(clip_coefficient(f64::NAN, 1.0).is_nan());
}

#[test]
fn master_weights_are_fp32_and_the_stored_copy_is_rounded_from_them() {
    let inputs = adamw::Inputs {
        params: adamw_params(1),
        w: &[1.0],
        dw: &[0.5],
        m: &[0.0],
        v: &[0.0],
    };
    let output = adamw::forward(&inputs, &Rounding::BF16);
    assert!(output.w[0] < 1.0 && output.w[0] == f64::from(output.w[0] as f32));
    assert_eq!(output.stored, [1.0]);
}
