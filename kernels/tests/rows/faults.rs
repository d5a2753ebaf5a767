//! Inputs of public bug reports, named after what holds here.

use m3_kernels::{Backend, ops};

use crate::lab::{Lab, T};

fn route(lab: &Lab, logits: &[f32], bias: &[f32], topk: usize) -> (Vec<i32>, Vec<f32>) {
    let experts = logits.len();
    let logits = lab.put(logits, [1, experts]);
    let bias = lab.put(bias, [experts]);
    let (expert_ids, weights) = (lab.i32s([1, topk]), lab.f32s([1, topk]));
    let select = ops::RouterSelect {
        logits: &logits,
        bias: &bias,
        expert_ids: &expert_ids,
    };
    lab.backend.router_select(&lab.stream, &select).unwrap();
    let weigh = ops::RouterWeights {
        logits: &logits,
        expert_ids: &expert_ids,
        weights: &weights,
    };
    lab.backend.router_weights(&lab.stream, &weigh).unwrap();
    (lab.read_i32(&expert_ids), lab.read(&weights))
}

#[test]
fn the_selection_bias_stays_out_of_the_expert_weights() {
    let (ids, weights) = route(
        &Lab::plain(),
        &[2.0, 1.0, 0.0, -1.0],
        &[0.0, 0.0, 0.0, 1.0],
        2,
    );
    assert_eq!(ids, [0, 3]);
    for (weight, expected) in weights.iter().zip([1.53217, 0.46783]) {
        assert!((2.0 * weight - expected).abs() <= 1e-5, "{weights:?}");
    }
}

#[test]
fn only_the_upper_side_of_the_gate_is_clamped() {
    let lab = Lab::plain();
    let gate = lab.put(&[-10.0f32, 1.0, 9.0, 7.0], [4, 1]);
    let up = lab.put(&[0.0f32, -9.0, 0.0, 0.0], [4, 1]);
    let out = lab.f32s([4, 1]);
    let args = ops::Swigluoai {
        gate: &gate,
        up: &up,
        out: &out,
        alpha: 1.702,
        limit: 7.0,
    };
    lab.backend.swigluoai(&lab.stream, &args).unwrap();
    let out = lab.read(&out);
    assert!((out[0] + 4.058e-7).abs() <= 1e-10, "{out:?}");
    assert!((out[1] + 5.07477).abs() <= 1e-5, "{out:?}");
    assert_eq!(out[2], out[3]);
}

#[test]
fn router_logits_are_compared_in_fp32() {
    let (ids, _) = route(&Lab::plain(), &[8.01, 8.02], &[0.0, 0.0], 1);
    assert_eq!(ids, [1]);
}

#[test]
fn ties_take_the_lower_expert_and_a_nan_comes_last() {
    let lab = Lab::plain();
    let none = [0.0; 5];
    assert_eq!(route(&lab, &[0.5; 5], &none, 3).0, [0, 1, 2]);
    assert_eq!(
        route(&lab, &[1.0, 40.0, 50.0, 60.0, 1.0], &none, 2).0,
        [1, 2]
    );
    let inf = f32::INFINITY;
    assert_eq!(
        route(&lab, &[f32::NAN, -inf, f32::NAN, 0.0, inf], &none, 3).0,
        [1, 3, 4]
    );
    // Scores that a sum 1 + e^-x would merge into a tie at 1.
    assert_eq!(route(&lab, &[17.0, 17.2, 0.0, 0.0, 17.4], &none, 1).0, [4]);
}

#[test]
fn log_probs_use_the_temperature_of_the_buffer() {
    let at = |temperature: f32| {
        let lab = Lab::plain();
        let (x, weight) = (lab.put(&[1.0f32], [1, 1]), lab.put(&[0.0f32, 0.8], [2, 1]));
        let (targets, temperature) = (lab.put(&[1i32], [1]), lab.put(&[temperature], [1]));
        let [log_prob, lse, entropy] = [(); 3].map(|()| lab.f32s([1]));
        let args = ops::LogProb {
            x: &x,
            weight: &weight,
            targets: &targets,
            temperature: &temperature,
            log_prob: &log_prob,
            lse: &lse,
            entropy: &entropy,
        };
        lab.backend
            .log_prob(&lab.stream, &args)
            .map(|()| lab.read(&log_prob)[0])
    };
    assert!((at(0.8).unwrap() + 0.31326).abs() <= 1e-5);
    assert!((at(1.0).unwrap() + 0.37110).abs() <= 1e-5);
    for refused in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let message = at(refused).unwrap_err().to_string();
        assert!(message.contains("temperature"), "{message}");
    }
}

#[test]
fn a_strided_weight_is_read_where_it_lies() {
    let lab = Lab::plain();
    let buffer: Vec<f32> = (0..12).map(|x| x as f32).collect();
    let weight = lab.put(&buffer, [2, 6]).slice(1, 2..4);
    let (x, y) = (lab.put(&[1.0f32, 10.0], [1, 2]), lab.f32s([1, 2]));
    let args = ops::Gemm {
        a: &x,
        b: &weight.transpose(0, 1),
        c: &y,
        accumulate: false,
    };
    lab.backend.gemm(&lab.stream, &args).unwrap();
    assert_eq!(lab.read(&y), [32.0, 98.0]);
}

fn grouped(lab: &Lab, a: &T, offsets: &[i32]) -> m3_kernels::Result<Vec<f32>> {
    let b = lab.put(&[1.0f32, 2.0, 3.0], [3, 1, 1]);
    let c = lab.put(&vec![f32::NAN; a.shape()[0]], [a.shape()[0], 1]);
    let args = ops::GroupedGemm {
        a,
        b: &b,
        expert_offsets: &lab.put(offsets, [offsets.len()]),
        c: &c,
    };
    lab.backend
        .grouped_gemm(&lab.stream, &args)
        .map(|()| lab.read(&c))
}

#[test]
fn an_expert_without_tokens_makes_no_call_and_no_error() {
    let lab = Lab::plain();
    let a = lab.put(&[1.0f32, 10.0, 100.0, f32::NAN], [4, 1]);
    // Rows past the last expert's are set to zero, whatever was there.
    assert_eq!(
        grouped(&lab, &a, &[0, 1, 1, 3]),
        Ok(vec![1.0, 30.0, 300.0, 0.0])
    );
    assert_eq!(grouped(&lab, &a, &[0, 0, 0, 0]), Ok(vec![0.0; 4]));
    let none = lab.f32s([0, 1]);
    assert_eq!(grouped(&lab, &none, &[0, 0, 0, 0]), Ok(vec![]));
    for wrong in [[1, 1, 1, 1], [0, 2, 1, 3], [0, 1, 2, 5]] {
        let message = grouped(&lab, &a, &wrong).unwrap_err().to_string();
        assert!(message.contains("expert_offsets["), "{message}");
    }
    // A healthy read afterwards.
    assert_eq!(lab.read(&a.slice(0, 0..1)), [1.0]);
}
