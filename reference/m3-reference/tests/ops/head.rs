//! Embedding and log-probabilities.

use crate::check::{assert_close, assert_derivative, uniform};
use m3_reference::Rounding;
use m3_reference::math::dot;
use m3_reference::ops::{embedding, log_prob};

const EXACT: Rounding = Rounding::Exact;

/// Output for logits given directly: hidden size 1 and x = 1.
fn from_logits(logits: &[f64], target: i32, temperature: f64) -> log_prob::Output {
    let params = log_prob::Params {
        tokens: 1,
        hidden: 1,
        vocab: logits.len(),
        temperature,
    };
    let inputs = log_prob::Inputs {
        params,
        x: &[1.0],
        w: logits,
        targets: &[target],
    };
    log_prob::forward(&inputs, &EXACT)
}

#[test]
fn embedding_gradients_add_up_over_repeated_ids() {
    let params = embedding::Params {
        vocab: 5,
        hidden: 3,
    };
    let (weight, ids, dx) = ([uniform(1, 15)], [4, 0, 4, 2], uniform(2, 12));
    let run = |x: &[Vec<f64>]| {
        embedding::forward(
            &embedding::Inputs {
                params,
                weight: &x[0],
                ids: &ids,
            },
            &EXACT,
        )
    };
    let inputs = embedding::Inputs {
        params,
        weight: &weight[0],
        ids: &ids,
    };
    let g = embedding::backward(
        &inputs,
        &run(&weight),
        &embedding::Grads { dx: &dx },
        &EXACT,
    );
    assert_derivative(&weight, &[g.dweight], |x| dot(&run(x).x, &dx));
}

#[test]
fn log_prob_gradients_are_its_derivative() {
    let params = log_prob::Params {
        tokens: 4,
        hidden: 6,
        vocab: 9,
        temperature: 0.8,
    };
    let x = [uniform(1, 24), uniform(2, 54)];
    let (targets, dlog_probs) = ([3, -1, 8, 0], uniform(3, 4));
    let run = |x: &[Vec<f64>]| {
        let inputs = log_prob::Inputs {
            params,
            x: &x[0],
            w: &x[1],
            targets: &targets,
        };
        log_prob::forward(&inputs, &EXACT)
    };
    let output = run(&x);
    assert_eq!(output.log_probs[1], 0.0);
    let inputs = log_prob::Inputs {
        params,
        x: &x[0],
        w: &x[1],
        targets: &targets,
    };
    let grads = log_prob::Grads {
        dlog_probs: &dlog_probs,
    };
    let g = log_prob::backward(&inputs, &output, &grads, &EXACT);
    assert!(g.dx[6..12].iter().all(|&dx| dx == 0.0));
    assert_derivative(&x, &[g.dx, g.dw], |x| dot(&run(x).log_probs, &dlog_probs));
}

#[test]
fn log_probs_are_those_of_the_tempered_distribution() {
    assert_close(
        &from_logits(&[0.0, 0.8], 1, 0.8).log_probs,
        &[-0.31326],
        5e-6,
    );
    assert_close(
        &from_logits(&[0.0, 0.8], 1, 1.0).log_probs,
        &[-0.37110],
        5e-6,
    );
}

#[test]
#[should_panic(expected = "temperature")]
fn temperature_zero_is_refused() {
    from_logits(&[0.0, 0.8], 1, 0.0);
}

#[test]
fn a_log_prob_is_never_positive() {
    assert_close(
        &from_logits(&[1.0, 3.0], 1, 1.0).log_probs,
        &[-0.126928],
        5e-7,
    );
    for gap in [0.0, 1.0, 40.0, 1e3] {
        assert!(from_logits(&[0.0, gap], 1, 1.0).log_probs[0] <= 0.0);
    }
}

#[test]
fn entropy_of_equal_logits_is_the_log_of_the_vocabulary() {
    assert_close(&from_logits(&[2.5; 7], 3, 0.7).entropy, &[7f64.ln()], 1e-14);
    assert_close(
        &from_logits(&[0.0, 0.0, -900.0], 0, 1.0).entropy,
        &[2f64.ln()],
        1e-14,
    );
}

#[test]
fn dlogits_are_rounded_as_operands_and_weight_gradients_are_not() {
    let params = log_prob::Params {
        tokens: 1,
        hidden: 1,
        vocab: 3,
        temperature: 0.8,
    };
    let inputs = log_prob::Inputs {
        params,
        x: &[1.0],
        w: &[0.5, -0.25, 1.0],
        targets: &[2],
    };
    let grads = log_prob::Grads { dlog_probs: &[0.3] };
    let dw = |rounding| {
        let output = log_prob::forward(&inputs, &rounding);
        log_prob::backward(&inputs, &output, &grads, &rounding).dw
    };
    // With x = 1, dw is dlogits itself.
    assert_eq!(dw(Rounding::BF16), Rounding::BF16.store_all(dw(EXACT)));

    let params = embedding::Params {
        vocab: 1,
        hidden: 1,
    };
    let inputs = embedding::Inputs {
        params,
        weight: &[0.0],
        ids: &[0, 0],
    };
    let output = embedding::forward(&inputs, &Rounding::BF16);
    let grads = embedding::Grads {
        dx: &[1.0, 1.0 / 512.0],
    };
    let g = embedding::backward(&inputs, &output, &grads, &Rounding::BF16);
    assert_eq!(g.dweight, [1.0 + 1.0 / 512.0]);
}
