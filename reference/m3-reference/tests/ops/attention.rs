//! Dense attention.

use crate::check::{assert_close, assert_derivative, uniform};
use m3_reference::Rounding;
use m3_reference::math::dot;
use m3_reference::ops::attention::{Grads, Inputs, Output, Params, backward, forward};

const EXACT: Rounding = Rounding::Exact;

fn params(tokens: usize, causal: bool) -> Params {
    Params {
        tokens,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 6,
        scale: 6f64.powf(-0.5),
        causal,
    }
}

fn qkv(tokens: usize) -> [Vec<f64>; 3] {
    [
        uniform(1, tokens * 24),
        uniform(2, tokens * 12),
        uniform(3, tokens * 12),
    ]
}

fn run(params: Params, x: &[Vec<f64>], cu_seqlens: &[i32]) -> Output {
    forward(
        &Inputs {
            params,
            q: &x[0],
            k: &x[1],
            v: &x[2],
            cu_seqlens,
        },
        &EXACT,
    )
}

#[test]
fn attention_gradients_are_its_derivative() {
    for causal in [true, false] {
        let (params, x, cu_seqlens) = (params(7, causal), qkv(7), [0, 3, 3, 7]);
        let d_o = uniform(4, 7 * 24);
        let inputs = Inputs {
            params,
            q: &x[0],
            k: &x[1],
            v: &x[2],
            cu_seqlens: &cu_seqlens,
        };
        let output = run(params, &x, &cu_seqlens);
        let g = backward(&inputs, &output, &Grads { d_o: &d_o }, &EXACT);
        assert_derivative(&x, &[g.dq, g.dk, g.dv], |x| {
            dot(&run(params, x, &cu_seqlens).o, &d_o)
        });
    }
}

#[test]
fn a_packed_sequence_equals_the_sequence_alone() {
    let x = qkv(7);
    let packed = run(params(7, true), &x, &[0, 3, 7, 7]);
    let second = [&x[0][3 * 24..], &x[1][3 * 12..], &x[2][3 * 12..]].map(<[f64]>::to_vec);
    let alone = run(params(4, true), &second, &[0, 4]);
    assert_eq!(packed.o[3 * 24..], alone.o);
    assert_eq!(packed.lse[3 * 4..], alone.lse);
}

#[test]
fn lse_is_the_natural_log_of_the_sum_of_exponentials() {
    let x = [vec![1.0], vec![2.0], vec![5.0]];
    let params = Params {
        tokens: 1,
        q_heads: 1,
        kv_heads: 1,
        head_dim: 1,
        scale: 0.5,
        causal: true,
    };
    let output = run(params, &x, &[0, 1]);
    assert_eq!((output.o[0], output.lse[0]), (5.0, 1.0));
}

#[test]
fn a_row_whose_scores_are_all_minus_infinity_is_zero_and_passes_no_gradient() {
    let params = Params {
        tokens: 4,
        q_heads: 1,
        kv_heads: 1,
        head_dim: 1,
        scale: 1.0,
        causal: false,
    };
    let x = [
        vec![-1.0, -1.0, -1.0, 2.0],
        vec![f64::INFINITY, f64::INFINITY, f64::INFINITY, 1.0],
        vec![1.0, 2.0, 3.0, 4.0],
    ];
    let cu_seqlens = [0, 3, 4];
    let output = run(params, &x, &cu_seqlens);
    assert_eq!(output.o, [0.0, 0.0, 0.0, 4.0]);
    assert_eq!(
        output.lse,
        [f64::NEG_INFINITY, f64::NEG_INFINITY, f64::NEG_INFINITY, 2.0]
    );
    let inputs = Inputs {
        params,
        q: &x[0],
        k: &x[1],
        v: &x[2],
        cu_seqlens: &cu_seqlens,
    };
    let g = backward(&inputs, &output, &Grads { d_o: &[1.0; 4] }, &EXACT);
    assert_eq!((g.dq, g.dk), (vec![0.0; 4], vec![0.0; 4]));
    assert_eq!(g.dv, [0.0, 0.0, 0.0, 1.0]);
}

#[test]
fn the_last_partial_block_has_no_padding_keys() {
    let params = Params {
        tokens: 129,
        q_heads: 1,
        kv_heads: 1,
        head_dim: 1,
        scale: 1.0,
        causal: true,
    };
    let x = [vec![-8.0; 129], vec![1.0; 129], vec![1.0; 129]];
    assert_close(&run(params, &x, &[0, 129]).o, &[1.0; 129], 1e-14);
}

#[test]
fn tokens_past_the_last_sequence_are_empty_rows() {
    let output = run(params(4, true), &qkv(4), &[0, 3, 3]);
    assert!(output.o[3 * 24..].iter().all(|&o| o == 0.0));
    assert!(
        output.lse[3 * 4..]
            .iter()
            .all(|&lse| lse == f64::NEG_INFINITY)
    );
}

/// One query over two keys, every rounding written out. `operand` says whether P and dS round before their products.
fn one_query(q: f64, k: [f64; 2], v: [f64; 2], d_o: f64, operand: bool) -> [f64; 4] {
    let twin = Rounding::BF16;
    let operand = |x| if operand { twin.operand(x) } else { x };
    let s = k.map(|k| 0.7 * (q * k));
    let largest = if s[0] > s[1] { s[0] } else { s[1] };
    let e = s.map(|s| (s - largest).exp());
    let sum = e[0] + e[1];
    let o = twin.store((operand(e[0]) * v[0] + operand(e[1]) * v[1]) / sum);
    let p = s.map(|s| (s - twin.fp32(largest + sum.ln())).exp());
    let delta = twin.fp32(d_o * o);
    let ds = [0, 1].map(|j| operand(p[j] * (d_o * v[j] - delta)));
    let dq = twin.store(0.7 * ds[0] * k[0] + 0.7 * ds[1] * k[1]);
    [
        o,
        dq,
        twin.store(0.7 * ds[0] * q),
        twin.store(operand(p[1]) * d_o),
    ]
}

#[test]
fn p_and_ds_are_rounded_once_before_their_products_and_the_scale_comes_after() {
    let params = Params {
        tokens: 2,
        q_heads: 1,
        kv_heads: 1,
        head_dim: 1,
        scale: 0.7,
        causal: false,
    };
    let mut seen = [false; 4];
    for seed in 0..64 {
        let x = Rounding::BF16.store_all(uniform(seed, 6));
        let (q, k, v, d_o) = ([x[0], 0.0], [x[1], x[2]], [x[3], x[4]], [x[5], 0.0]);
        let inputs = Inputs {
            params,
            q: &q,
            k: &k,
            v: &v,
            cu_seqlens: &[0, 2],
        };
        let output = forward(&inputs, &Rounding::BF16);
        let g = backward(&inputs, &output, &Grads { d_o: &d_o }, &Rounding::BF16);
        let got = [output.o[0], g.dq[0], g.dk[0], g.dv[1]];
        assert_eq!(got, one_query(q[0], k, v, d_o[0], true), "seed {seed}");
        let unrounded = one_query(q[0], k, v, d_o[0], false);
        (0..4).for_each(|i| seen[i] |= got[i] != unrounded[i]);
    }
    assert_eq!(
        seen, [true; 4],
        "each of o, dq, dk and dv shows the rounding somewhere"
    );
}
