//! Values against naive f64, gradients against its central differences.

use half::bf16;
use m3_kernels::{Backend, Tensor, ops};
use m3_spec::digest;
use m3_spec::dtype::DType;

use crate::lab::{Lab, Layout, T, host_rows};

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}

fn near(name: &str, got: &[f32], expected: &[f64], bound: f64) {
    assert_eq!(got.len(), expected.len(), "{name}");
    for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - expected).abs();
        let within = error <= bound * expected.abs().max(1.0);
        assert!(within, "{name}[{index}] is {got}, expected {expected}");
    }
}

/// d loss / d x by central differences.
fn slopes(x: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let slope = |index: usize| {
        let [above, below] = [step, -step].map(|step| {
            let mut moved = x.to_vec();
            moved[index] += step;
            loss(&moved)
        });
        (above - below) / (2.0 * step)
    };
    (0..x.len()).map(slope).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn copies_convert_with_one_rounding_from_any_strides() {
    let lab = Lab::new(2, DType::F32, Layout::Fused);
    let values = host_rows(1, &(0..70), 90);
    let source = lab.matrix(&values, [70, 90]).transpose(0, 1);
    let rounded = Tensor::zeros(&lab.backend, DType::BF16, [70, 90]).unwrap();
    let target = rounded.transpose(0, 1);
    let args = ops::Copy {
        source: &source,
        target: &target,
    };
    lab.backend.copy(&lab.stream, &args).unwrap();
    let expected: Vec<f32> = values.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    assert_eq!(lab.read(&rounded), expected);

    let transposed = lab.f32s([90, 70]);
    let args = ops::Copy {
        source: &target,
        target: &transposed,
    };
    lab.backend.copy(&lab.stream, &args).unwrap();
    let summed = lab.f32s([70, 90]);
    let args = ops::Accumulate {
        source: &transposed.transpose(0, 1),
        target: &summed,
    };
    for _ in 0..2 {
        lab.backend.accumulate(&lab.stream, &args).unwrap();
    }
    let twice: Vec<f32> = expected.iter().map(|x| 2.0 * x).collect();
    assert_eq!(lab.read(&summed), twice);
}

#[test]
fn integers_of_every_width_are_copied_as_they_are() {
    let lab = Lab::plain();
    fn copied<E: m3_kernels::tensor::Element + PartialEq + std::fmt::Debug>(
        lab: &Lab,
        values: [E; 6],
    ) {
        let source = lab.put(&values, [2, 3]).transpose(0, 1);
        let target = Tensor::zeros(&lab.backend, E::DTYPE, [3, 2]).unwrap();
        let args = ops::Copy {
            source: &source,
            target: &target,
        };
        lab.backend.copy(&lab.stream, &args).unwrap();
        let got = target
            .transpose(0, 1)
            .to_vec::<E>(&lab.backend, &lab.stream);
        assert_eq!(got.unwrap(), values);
    }
    copied(&lab, [1i32, -2, 3, 4, 5, i32::MIN]);
    copied(&lab, [1u32, 2, 3, 4, 5, u32::MAX]);
    copied(&lab, [1u64, 2, 3, 4, 5, u64::MAX]);
    copied(&lab, [1u8, 2, 3, 4, 5, 255]);
}

#[test]
fn fill_stays_within_its_view() {
    let lab = Lab::plain();
    let whole = lab.f32s([3, 4]);
    let args = ops::Fill {
        target: &whole.slice(1, 1..3).slice(0, 1..3),
        value: 2.5,
    };
    lab.backend.fill(&lab.stream, &args).unwrap();
    assert_eq!(
        lab.read(&whole),
        [0., 0., 0., 0., 0., 2.5, 2.5, 0., 0., 2.5, 2.5, 0.]
    );
}

#[test]
fn digests_of_slices_add_up_to_the_digest_of_the_whole() {
    let lab = Lab::new(2, DType::BF16, Layout::Fused);
    let values = host_rows(1, &(0..200), 150);
    let source = lab.matrix(&values, [200, 150]);
    let bits: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
    let sums = Tensor::zeros(&lab.backend, DType::U64, [2]).unwrap();
    for (rows, start) in [(120..200, 7 + 120 * 150), (0..120, 7)] {
        let args = ops::Digest {
            source: &source.slice(0, rows),
            start,
            sums: &sums,
        };
        lab.backend.digest(&lab.stream, &args).unwrap();
    }
    let got = sums.to_vec::<u64>(&lab.backend, &lab.stream).unwrap();
    assert_eq!(got, digest::Digest::of_bf16(&bits, 7).0);
}

#[test]
fn products_accumulate_in_fp32_over_any_strides() {
    let lab = Lab::plain();
    let (m, n, k) = (9, 11, 600);
    let (a_host, b_host) = (host_rows(1, &(0..m), k), host_rows(2, &(0..n), k));
    let a = lab.put(&a_host, [m, k]);
    let b = lab.put(&b_host, [n, k]);
    let c = lab.put(&vec![1.0f32; m * n], [n, m]);
    let args = ops::Gemm {
        a: &a,
        b: &b.transpose(0, 1),
        c: &c.transpose(0, 1),
        accumulate: true,
    };
    lab.backend.gemm(&lab.stream, &args).unwrap();
    let (a, b) = (wide(&a_host), wide(&b_host));
    let element = |(j, i): (usize, usize)| 1.0 + dot(&a[i * k..][..k], &b[j * k..][..k]);
    let places = (0..n).flat_map(|j| (0..m).map(move |i| (j, i)));
    near(
        "c",
        &lab.read(&c),
        &places.map(element).collect::<Vec<_>>(),
        1e-5,
    );
}

fn normed(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let rstd = 1.0 / (dot(x, x) / x.len() as f64 + 1e-6).sqrt();
    x.iter()
        .zip(weight)
        .map(|(x, w)| x * rstd * (1.0 + w))
        .collect()
}

#[test]
fn the_norm_reads_the_rounded_sum() {
    let lab = Lab::new(2, DType::BF16, Layout::Dense);
    let (r, y) = (1.0f32, 2.0f32.powi(-9));
    let [residual, added] = [r, y].map(|x| lab.matrix(&[x, 0.5], [1, 2]));
    let [sum, out] = [(); 2].map(|()| lab.out([1, 2]));
    let weight = lab.f32s([2]);
    let rstd = lab.f32s([1]);
    let args = ops::RmsNorm {
        residual: &residual,
        y: Some(&added),
        weight: &weight,
        residual_out: Some(&sum),
        out: &out,
        rstd: &rstd,
        eps: 0.0,
    };
    lab.backend.rms_norm(&lab.stream, &args).unwrap();
    assert_eq!(lab.read(&sum), [1.0, 1.0]);
    assert_eq!(lab.read(&rstd), [1.0]);
}

#[test]
fn gradients_of_the_norm_are_slopes() {
    let lab = Lab::plain();
    let hidden = 21;
    let [x, d, passed] = [1, 2, 3].map(|seed| host_rows(seed, &(0..1), hidden));
    let weight = host_rows(4, &(0..1), hidden);
    let [x_t, d_t, passed_t] = [&x, &d, &passed].map(|row| lab.put(row, [1, hidden]));
    let weight_t = lab.put(&weight, [hidden]);
    let [out, dx] = [(); 2].map(|()| lab.f32s([1, hidden]));
    let (rstd, d_weight) = (lab.f32s([1]), lab.put(&vec![1.0f32; hidden], [hidden]));
    let args = ops::RmsNorm {
        residual: &x_t,
        y: None,
        weight: &weight_t,
        residual_out: None,
        out: &out,
        rstd: &rstd,
        eps: 1e-6,
    };
    lab.backend.rms_norm(&lab.stream, &args).unwrap();
    let args = ops::RmsNormBackward {
        residual: &x_t,
        weight: &weight_t,
        rstd: &rstd,
        d_out: &d_t,
        d_residual_in: Some(&passed_t),
        d_residual: &dx,
        d_weight: &d_weight,
    };
    lab.backend.rms_norm_backward(&lab.stream, &args).unwrap();
    let [x, d, passed, weight] = [x, d, passed, weight].map(|row| wide(&row));
    near("out", &lab.read(&out), &normed(&x, &weight), 1e-6);
    let slopes_x = slopes(&x, |x| dot(&normed(x, &weight), &d) + dot(x, &passed));
    near("dx", &lab.read(&dx), &slopes_x, 1e-5);
    let slopes_w = slopes(&weight, |weight| {
        dot(&normed(&x, weight), &d) + weight.iter().sum::<f64>()
    });
    near("d_weight", &lab.read(&d_weight), &slopes_w, 1e-5);
}

#[test]
fn rotation_pairs_channels_of_the_rotary_slice_and_its_gradient_turns_back() {
    let lab = Lab::plain();
    let (head_dim, rotary_dim, position) = (10, 6, 3);
    let [x, d, weight] = [1, 2, 3].map(|seed| host_rows(seed, &(0..1), head_dim));
    let table = m3_spec::rope::RotaryTable::new(5e6, rotary_dim, 4);
    let cos_sin = lab.put(&table.cos_sin, [4, rotary_dim / 2, 2]);
    let positions = lab.put(&[position as i32], [1]);
    let [x_t, d_t, out, dx] = [&x, &d, &x, &x].map(|row| lab.put(row, [1, 1, head_dim]));
    let (weight_t, rstd, d_weight) = (
        lab.put(&weight, [head_dim]),
        lab.f32s([1, 1]),
        lab.f32s([head_dim]),
    );
    let args = ops::QkNormRope {
        x: &x_t,
        weight: &weight_t,
        cos_sin: &cos_sin,
        positions: &positions,
        out: &out,
        rstd: &rstd,
        eps: 1e-6,
    };
    lab.backend.qk_norm_rope(&lab.stream, &args).unwrap();
    let args = ops::QkNormRopeBackward {
        x: &x_t,
        weight: &weight_t,
        cos_sin: &cos_sin,
        positions: &positions,
        rstd: &rstd,
        d_out: &d_t,
        dx: &dx,
        d_weight: &d_weight,
    };
    lab.backend
        .qk_norm_rope_backward(&lab.stream, &args)
        .unwrap();
    let half = rotary_dim / 2;
    let angles = wide(&table.cos_sin[position * rotary_dim..][..rotary_dim]);
    let forward = |x: &[f64], weight: &[f64]| {
        let n = normed(x, weight);
        let mut turned = n.clone();
        for i in 0..half {
            let (cos, sin) = (angles[2 * i], angles[2 * i + 1]);
            turned[i] = n[i] * cos - n[i + half] * sin;
            turned[i + half] = n[i + half] * cos + n[i] * sin;
        }
        turned
    };
    let [x, d, weight] = [x, d, weight].map(|row| wide(&row));
    near("out", &lab.read(&out), &forward(&x, &weight), 1e-6);
    near(
        "dx",
        &lab.read(&dx),
        &slopes(&x, |x| dot(&forward(x, &weight), &d)),
        1e-5,
    );
    let slopes_w = slopes(&weight, |weight| dot(&forward(&x, weight), &d));
    near("d_weight", &lab.read(&d_weight), &slopes_w, 1e-5);
}

#[test]
fn gradients_of_the_activation_are_slopes_and_pass_a_clamp_at_equality() {
    let lab = Lab::plain();
    let (gate, up) = (
        [-3.0f32, 0.5, 2.0, 9.0, 7.0, 1.0, 1.0],
        [1.0f32, -2.0, 8.0, 0.5, 7.0, -9.0, -7.0],
    );
    let row = |values: &[f32]| lab.put(values, [1, 7]);
    let [d_gate, d_up] = [(); 2].map(|()| lab.f32s([1, 7]));
    let args = ops::SwigluoaiBackward {
        gate: &row(&gate),
        up: &row(&up),
        d_out: &row(&[1.0; 7]),
        d_gate: &d_gate,
        d_up: &d_up,
        alpha: 1.702,
        limit: 7.0,
    };
    lab.backend.swigluoai_backward(&lab.stream, &args).unwrap();
    let alpha = f64::from(1.702f32);
    let value = |g: f64, u: f64| {
        let (g, u) = (if g > 7.0 { 7.0 } else { g }, u.clamp(-7.0, 7.0));
        (u + 1.0) * g / (1.0 + (-alpha * g).exp())
    };
    let (mut expected_gate, mut expected_up) = (Vec::new(), Vec::new());
    for (&g, &u) in gate.iter().zip(&up) {
        // At equality the slope of the inner side.
        let (g, u) = (f64::from(g), f64::from(u));
        let inner = |x: f64| if x.abs() == 7.0 { x * (1.0 - 1e-5) } else { x };
        expected_gate.push(slopes(&[inner(g)], |g| value(g[0], u))[0]);
        expected_up.push(slopes(&[inner(u)], |u| value(g, u[0]))[0]);
    }
    near("d_gate", &lab.read(&d_gate), &expected_gate, 1e-4);
    near("d_up", &lab.read(&d_up), &expected_up, 1e-4);
}

#[test]
fn gradients_of_the_router_are_slopes() {
    let lab = Lab::plain();
    let (logits, d) = ([0.3f32, -1.0, 2.0, 0.1], [0.7f32, -0.4]);
    let ids = lab.put(&[0, 2], [1, 2]);
    let d_logits = lab.put(&[9.0f32; 4], [1, 4]);
    let args = ops::RouterBackward {
        logits: &lab.put(&logits, [1, 4]),
        expert_ids: &ids,
        d_weights: &lab.put(&d, [1, 2]),
        d_logits: &d_logits,
    };
    lab.backend.router_backward(&lab.stream, &args).unwrap();
    let d = wide(&d);
    let expected = slopes(&wide(&logits), |logits| {
        let scores = [logits[0], logits[2]].map(|x| 1.0 / (1.0 + (-x).exp()));
        dot(&scores, &d) / (scores[0] + scores[1])
    });
    near("d_logits", &lab.read(&d_logits), &expected, 1e-6);
}

#[test]
fn log_probs_entropy_and_gradients_agree_with_a_full_softmax() {
    let lab = Lab::plain();
    let (tokens, vocab, hidden, temperature) = (3, 1030, 7, 0.7f32);
    let (x, weight) = (
        host_rows(1, &(0..tokens), hidden),
        host_rows(2, &(0..vocab), hidden),
    );
    let (targets, d) = ([1029, 0, 511], [0.5f32, -1.0, 2.0]);
    let x_t = lab.put(&x, [tokens, hidden]);
    let weight_t = lab.put(&weight, [vocab, hidden]);
    let targets_t = lab.put(&targets, [tokens]);
    let temperature_t = lab.put(&[temperature], [1]);
    let [log_prob, lse, entropy] = [(); 3].map(|()| lab.f32s([tokens]));
    let args = ops::LogProb {
        x: &x_t,
        weight: &weight_t,
        targets: &targets_t,
        temperature: &temperature_t,
        log_prob: &log_prob,
        lse: &lse,
        entropy: &entropy,
    };
    lab.backend.log_prob(&lab.stream, &args).unwrap();
    let (dx, d_weight) = (lab.f32s([tokens, hidden]), lab.f32s([vocab, hidden]));
    let args = ops::LogProbBackward {
        x: &x_t,
        weight: &weight_t,
        targets: &targets_t,
        temperature: &temperature_t,
        lse: &lse,
        d_log_prob: &lab.put(&d, [tokens]),
        dx: &dx,
        d_weight: &d_weight,
    };
    lab.backend.log_prob_backward(&lab.stream, &args).unwrap();

    let (x, weight, d) = (wide(&x), wide(&weight), wide(&d));
    let softmax = |x: &[f64], weight: &[f64], t: usize| {
        let row = &x[t * hidden..][..hidden];
        let logit = |w: &[f64]| dot(row, w) / f64::from(temperature);
        let z: Vec<f64> = weight.chunks_exact(hidden).map(logit).collect();
        let lse = z.iter().map(|z| z.exp()).sum::<f64>().ln();
        (z, lse)
    };
    let (mut log_probs, mut lses, mut entropies) = (Vec::new(), Vec::new(), Vec::new());
    for t in 0..tokens {
        let (z, sum) = softmax(&x, &weight, t);
        log_probs.push(z[targets[t] as usize] - sum);
        entropies.push(z.iter().map(|z| (z - sum).exp() * (sum - z)).sum());
        lses.push(sum);
    }
    near("log_prob", &lab.read(&log_prob), &log_probs, 1e-6);
    near("lse", &lab.read(&lse), &lses, 1e-6);
    near("entropy", &lab.read(&entropy), &entropies, 1e-6);
    let loss = |x: &[f64], weight: &[f64]| -> f64 {
        let of_token = |t: usize| {
            let (z, lse) = softmax(x, weight, t);
            d[t] * (z[targets[t] as usize] - lse)
        };
        (0..tokens).map(of_token).sum()
    };
    near(
        "dx",
        &lab.read(&dx),
        &slopes(&x, |x| loss(x, &weight)),
        1e-5,
    );
    let got = lab.read(&d_weight);
    let head = 1022 * hidden..vocab * hidden;
    let expected = slopes(&weight[head.clone()], |part| {
        let mut weight = weight.clone();
        weight[head.clone()].copy_from_slice(part);
        loss(&x, &weight)
    });
    near("d_weight", &got[head], &expected, 1e-5);
}

/// Loss, stats and gradient of tokens given as (new, old, advantage, weight).
fn policy(tokens: &[[f32; 4]]) -> [Vec<f32>; 3] {
    let lab = Lab::plain();
    let count = tokens.len();
    let column = |index: usize| {
        let values: Vec<f32> = tokens.iter().map(|token| token[index]).collect();
        lab.put(&values, [count])
    };
    let [new, old, advantage, weight] = [0, 1, 2, 3].map(column);
    let (loss, stats, gradient) = (lab.f32s([1]), lab.f32s([2]), lab.f32s([count]));
    let args = ops::GrpoLoss {
        log_prob: &new,
        old_log_prob: &old,
        advantage: &advantage,
        weight: &weight,
        loss: &loss,
        d_log_prob: &gradient,
        stats: &stats,
        eps_low: 0.2,
        eps_high: 0.28,
    };
    lab.backend.grpo_loss(&lab.stream, &args).unwrap();
    [&loss, &stats, &gradient].map(|tensor: &T| lab.read(tensor))
}

#[test]
fn the_policy_loss_clips_on_the_side_that_would_gain() {
    let ratio = 1.5f32.ln();
    let [loss, stats, gradient] = policy(&[
        [ratio, 0.0, 2.0, 0.5],
        [ratio, 0.0, -2.0, 0.5],
        [0.0, 0.0, 3.0, 1.0],
    ]);
    near(
        "loss",
        &loss,
        &[0.5 * (-1.28 * 2.0) + 0.5 * (1.5 * 2.0) - 3.0],
        1e-6,
    );
    near("stats", &stats, &[-f64::from(ratio), 0.5], 1e-6);
    near("gradient", &gradient, &[0.0, 0.5 * 1.5 * 2.0, -3.0], 1e-6);
}

#[test]
fn a_masked_token_is_not_read_an_infinite_ratio_is_bounded_and_a_nan_is_seen() {
    let nan = f32::NAN;
    let [loss, stats, gradient] = policy(&[[nan, nan, nan, 0.0], [0.0, 0.0, 1.0, 1.0]]);
    assert_eq!(
        (loss, stats, gradient),
        (vec![-1.0], vec![0.0, 0.0], vec![0.0, -1.0])
    );
    let [loss, _, gradient] = policy(&[[0.0, f32::NEG_INFINITY, -1.0, 1.0]]);
    near("loss", &loss, &[20f64.exp()], 1e-6);
    assert_eq!(gradient, [0.0]);
    let [loss, _, gradient] = policy(&[[nan, 0.0, 1.0, 1.0]]);
    assert!(loss[0].is_nan() && gradient[0].is_nan());
}
