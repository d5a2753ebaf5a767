//! Linear, norms, rotation, activation.

use crate::check::{assert_close, assert_derivative, uniform};
use m3_reference::math::dot;
use m3_reference::ops::{linear, qk_norm_rope, rms_norm, swigluoai};
use m3_reference::{Precision, Rounding};
use m3_spec::rope::RotaryTable;

const EXACT: Rounding = Rounding::Exact;

fn rotary_table(positions: usize, rotary_dim: usize) -> Vec<f32> {
    RotaryTable::new(1e4, rotary_dim, positions).cos_sin
}

#[test]
fn linear_gradients_are_its_derivative() {
    let params = linear::Params {
        rows: 3,
        n: 5,
        k: 11,
        y: Precision::Storage,
        dx: Precision::Storage,
    };
    let x = [uniform(1, 33), uniform(2, 55)];
    let dy = uniform(3, 15);
    let run = |x: &[Vec<f64>]| {
        linear::forward(
            &linear::Inputs {
                params,
                x: &x[0],
                w: &x[1],
            },
            &EXACT,
        )
    };
    let inputs = linear::Inputs {
        params,
        x: &x[0],
        w: &x[1],
    };
    let g = linear::backward(&inputs, &run(&x), &linear::Grads { dy: &dy }, &EXACT);
    assert_derivative(&x, &[g.dx, g.dw], |x| dot(&run(x).y, &dy));
}

#[test]
fn rms_norm_gradients_are_its_derivative() {
    let params = rms_norm::Params {
        rows: 4,
        hidden: 10,
        eps: 1e-6,
    };
    let x = [uniform(1, 40), uniform(2, 40), uniform(3, 10)];
    let (dout, dr) = (uniform(4, 40), uniform(5, 40));
    fn inputs(params: rms_norm::Params, x: &[Vec<f64>]) -> rms_norm::Inputs<'_> {
        rms_norm::Inputs {
            params,
            resid: &x[0],
            y: Some(&x[1]),
            weight: &x[2],
        }
    }
    let output = rms_norm::forward(&inputs(params, &x), &EXACT);
    let grads = rms_norm::Grads {
        dout: &dout,
        dr: Some(&dr),
    };
    let g = rms_norm::backward(&inputs(params, &x), &output, &grads, &EXACT);
    assert_derivative(&x, &[g.dresid.clone(), g.dresid, g.dweight], |x| {
        let output = rms_norm::forward(&inputs(params, x), &EXACT);
        dot(&output.out, &dout) + dot(&output.r, &dr)
    });
}

#[test]
fn norm_weight_minus_one_gives_exact_zero_and_weight_zero_unit_rms() {
    let params = rms_norm::Params {
        rows: 1,
        hidden: 64,
        eps: 0.0,
    };
    let resid = uniform(1, 64);
    for rounding in [Rounding::Exact, Rounding::BF16, Rounding::F32] {
        let weight = [-1.0; 64];
        let inputs = rms_norm::Inputs {
            params,
            resid: &resid,
            y: None,
            weight: &weight,
        };
        assert!(
            rms_norm::forward(&inputs, &rounding)
                .out
                .iter()
                .all(|&x| x == 0.0)
        );
    }
    let weight = [0.0; 64];
    let inputs = rms_norm::Inputs {
        params,
        resid: &resid,
        y: None,
        weight: &weight,
    };
    let out = rms_norm::forward(&inputs, &EXACT).out;
    assert!((dot(&out, &out) / 64.0 - 1.0).abs() <= 1e-14);
}

#[test]
fn the_norm_reads_the_rounded_residual() {
    let params = rms_norm::Params {
        rows: 1,
        hidden: 2,
        eps: 0.0,
    };
    // 1 + 2^-9 rounds to 1 in bf16, so both columns are equal once rounded.
    let (resid, y, weight) = ([1.0, 1.0], [0.0, 1.0 / 512.0], [0.0, 0.0]);
    let inputs = rms_norm::Inputs {
        params,
        resid: &resid,
        y: Some(&y),
        weight: &weight,
    };
    let output = rms_norm::forward(&inputs, &Rounding::BF16);
    assert_eq!(output.r, [1.0, 1.0]);
    assert_eq!(output.out, [1.0, 1.0]);
}

#[test]
fn qk_norm_rope_gradients_are_its_derivative() {
    let params = qk_norm_rope::Params {
        tokens: 5,
        heads: 2,
        head_dim: 8,
        rotary_dim: 4,
        eps: 1e-6,
    };
    let (table, positions) = (rotary_table(4, 4), [0, 1, 2, 3, 0]);
    let x = [uniform(1, 80), uniform(2, 8)];
    let dy = uniform(3, 80);
    let inputs = |x: &[Vec<f64>]| {
        qk_norm_rope::forward(
            &qk_norm_rope::Inputs {
                params,
                x: &x[0],
                weight: &x[1],
                cos_sin: &table,
                positions: &positions,
            },
            &EXACT,
        )
    };
    let output = inputs(&x);
    let at = qk_norm_rope::Inputs {
        params,
        x: &x[0],
        weight: &x[1],
        cos_sin: &table,
        positions: &positions,
    };
    let g = qk_norm_rope::backward(&at, &output, &qk_norm_rope::Grads { dy: &dy }, &EXACT);
    assert_derivative(&x, &[g.dx, g.dweight], |x| dot(&inputs(x).y, &dy));
}

#[test]
fn rotation_pairs_dims_inside_the_rotary_slice_and_passes_the_rest() {
    let params = qk_norm_rope::Params {
        tokens: 2,
        heads: 1,
        head_dim: 128,
        rotary_dim: 64,
        eps: 0.0,
    };
    let table = rotary_table(6, 64);
    // One token at position 0 and one at 5; e_0 plus a constant in the dims that pass through.
    let head: Vec<f64> = (0..128)
        .map(|d| if d == 0 || d >= 64 { 1.0 } else { 0.0 })
        .collect();
    let x = [head.clone(), head].concat();
    // A weight of its own for dim 0 shows that the norm comes before the rotation.
    let mut weight = vec![0.0; 128];
    weight[0] = 1.0;
    let inputs = qk_norm_rope::Inputs {
        params,
        x: &x,
        weight: &weight,
        cos_sin: &table,
        positions: &[0, 5],
    };
    let y = qk_norm_rope::forward(&inputs, &EXACT).y;
    let unit = (128.0f64 / 65.0).sqrt();
    let mut normed: Vec<f64> = x[..128].iter().map(|x| x * unit).collect();
    normed[0] *= 2.0;
    assert_close(&y[..128], &normed, 1e-15);
    let mut turned = normed;
    turned[0] = 5f64.cos() * 2.0 * unit;
    turned[32] = 5f64.sin() * 2.0 * unit;
    assert_close(&y[128..], &turned, 1e-7);
}

#[test]
fn swigluoai_gradients_are_its_derivative_and_pass_at_equality() {
    let params = swigluoai::Params {
        alpha: 1.702,
        limit: 7.0,
    };
    let x = [0, 1].map(|i| uniform(i, 50).iter().map(|x| 9.0 * x).collect::<Vec<_>>());
    let dy = uniform(3, 50);
    let run = |x: &[Vec<f64>]| {
        swigluoai::forward(
            &swigluoai::Inputs {
                params,
                gate: &x[0],
                up: &x[1],
            },
            &EXACT,
        )
    };
    let inputs = swigluoai::Inputs {
        params,
        gate: &x[0],
        up: &x[1],
    };
    let g = swigluoai::backward(&inputs, &run(&x), &swigluoai::Grads { dy: &dy }, &EXACT);
    assert_derivative(&x, &[g.dgate, g.dup], |x| dot(&run(x).y, &dy));

    let inputs = swigluoai::Inputs {
        params,
        gate: &[7.0, 1.0, 1.0],
        up: &[0.0, 7.0, -7.0],
    };
    let output = swigluoai::forward(&inputs, &EXACT);
    let grads = swigluoai::Grads { dy: &[1.0; 3] };
    let g = swigluoai::backward(&inputs, &output, &grads, &EXACT);
    assert!(g.dgate[0] != 0.0 && g.dup[1] != 0.0 && g.dup[2] != 0.0);
}

#[test]
fn the_gate_is_limited_from_above_only_and_up_on_both_sides() {
    let params = swigluoai::Params {
        alpha: 1.702,
        limit: 7.0,
    };
    let (gate, up) = ([-10.0, 1.0, 9.0, 7.0, 8.0], [0.0, -9.0, 0.0, 0.0, 9.0]);
    let y = swigluoai::forward(
        &swigluoai::Inputs {
            params,
            gate: &gate,
            up: &up,
        },
        &EXACT,
    )
    .y;
    assert!((y[0] - -4.058e-7).abs() <= 5e-11, "{}", y[0]);
    assert!((y[1] - -5.07477).abs() <= 5e-6, "{}", y[1]);
    assert_eq!(y[2], y[3]);
    assert!((y[4] - 56.0 / (1.0 + (-1.702f64 * 7.0).exp())).abs() <= 1e-12);
}
