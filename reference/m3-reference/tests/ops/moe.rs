//! Router, permutation, experts, combination.

use crate::check::{assert_close, assert_derivative, uniform};
use m3_reference::math::dot;
use m3_reference::ops::{grouped_gemm, moe_combine, moe_permute, router};
use m3_reference::{Precision, Rounding};

const EXACT: Rounding = Rounding::Exact;

fn route(logits: &[f64], bias: &[f64], topk: usize, rounding: &Rounding) -> router::Output {
    let params = router::Params {
        tokens: logits.len() / bias.len(),
        experts: bias.len(),
        topk,
    };
    router::forward(
        &router::Inputs {
            params,
            logits,
            bias,
            replay: None,
        },
        rounding,
    )
}

#[test]
fn router_gradients_are_its_derivative() {
    let params = router::Params {
        tokens: 4,
        experts: 8,
        topk: 3,
    };
    let (logits, bias, dw) = ([uniform(1, 32)], uniform(2, 8), uniform(3, 12));
    for replay in [None, Some([0, 1, 2, 5, 6, 7, 0, 3, 7, 1, 2, 4])] {
        let replay = replay.as_ref().map(|ids| &ids[..]);
        let run = |x: &[Vec<f64>]| {
            router::forward(
                &router::Inputs {
                    params,
                    logits: &x[0],
                    bias: &bias,
                    replay,
                },
                &EXACT,
            )
        };
        let output = run(&logits);
        if let Some(ids) = replay {
            assert_eq!(output.expert_ids, ids);
        }
        let inputs = router::Inputs {
            params,
            logits: &logits[0],
            bias: &bias,
            replay,
        };
        let grads = router::Grads {
            dexpert_weights: &dw,
        };
        let g = router::backward(&inputs, &output, &grads, &EXACT);
        assert_derivative(&logits, &[g.dlogits], |x| dot(&run(x).expert_weights, &dw));
    }
}

#[test]
fn the_bias_selects_and_does_not_weigh() {
    let output = route(
        &[2.0, 1.0, 0.0, -1.0],
        &[0.0, 0.0, 0.0, 1.0],
        2,
        &Rounding::F32,
    );
    assert_eq!(output.expert_ids, [0, 3]);
    let scaled: Vec<f64> = output.expert_weights.iter().map(|w| 2.0 * w).collect();
    assert_close(&scaled, &[1.53217, 0.46783], 5e-6);
}

#[test]
fn the_lower_expert_wins_an_exact_tie() {
    assert_eq!(
        route(&[0.0, 1.0, 1.0, 1.0, 0.0], &[0.0; 5], 2, &EXACT).expert_ids,
        [1, 2]
    );
    // Saturated sigmoids are equal in fp32 though the logits are not.
    assert_eq!(
        route(&[40.0, 50.0, 60.0], &[0.0; 3], 1, &Rounding::F32).expert_ids,
        [0]
    );
}

#[test]
fn close_logits_and_biases_are_told_apart_in_fp32_whatever_the_storage() {
    for rounding in [Rounding::BF16, Rounding::F32] {
        assert_eq!(
            route(&[8.01, 8.02], &[0.0; 2], 1, &rounding).expert_ids,
            [1]
        );
        assert_eq!(
            route(&[0.0; 2], &[34.5, 34.56], 1, &rounding).expert_ids,
            [1]
        );
    }
}

#[test]
#[should_panic(expected = "replayed ids")]
fn replayed_ids_with_a_duplicate_are_refused() {
    let params = router::Params {
        tokens: 1,
        experts: 4,
        topk: 2,
    };
    let replay = Some(&[1, 1][..]);
    router::forward(
        &router::Inputs {
            params,
            logits: &[0.0; 4],
            bias: &[0.0; 4],
            replay,
        },
        &EXACT,
    );
}

const PERMUTE: moe_permute::Params = moe_permute::Params {
    tokens: 3,
    hidden: 2,
    experts: 4,
    topk: 2,
    dx: Precision::Storage,
};
const IDS: [i32; 6] = [0, 3, 1, 3, 0, 1];

#[test]
fn rows_are_grouped_by_expert_then_token() {
    let x = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5];
    let output = moe_permute::forward(
        &moe_permute::Inputs {
            params: PERMUTE,
            x: &x,
            expert_ids: &IDS,
        },
        &EXACT,
    );
    assert_eq!(output.expert_offsets, [0, 2, 4, 4, 6]);
    assert_eq!(output.token_of_row, [0, 2, 1, 2, 0, 1]);
    assert_eq!(output.row_of_slot, [0, 4, 2, 5, 1, 3]);
    assert_eq!(
        output.permuted,
        [1.0, 1.5, 3.0, 3.5, 2.0, 2.5, 3.0, 3.5, 1.0, 1.5, 2.0, 2.5]
    );
}

#[test]
fn moe_permute_gradients_are_its_derivative() {
    let (x, dpermuted, dshared) = ([uniform(1, 6)], uniform(2, 12), uniform(3, 6));
    let run = |x: &[Vec<f64>]| {
        let inputs = moe_permute::Inputs {
            params: PERMUTE,
            x: &x[0],
            expert_ids: &IDS,
        };
        moe_permute::forward(&inputs, &EXACT)
    };
    let inputs = moe_permute::Inputs {
        params: PERMUTE,
        x: &x[0],
        expert_ids: &IDS,
    };
    let grads = moe_permute::Grads {
        dpermuted: &dpermuted,
        dshared: Some(&dshared),
        drouter: None,
    };
    let g = moe_permute::backward(&inputs, &run(&x), &grads, &EXACT);
    assert_derivative(&x, &[g.dx], |x| {
        dot(&run(x).permuted, &dpermuted) + dot(&x[0], &dshared)
    });
}

#[test]
fn grouped_gemm_gradients_are_its_derivative_with_an_empty_expert() {
    let params = grouped_gemm::Params {
        rows: 6,
        experts: 4,
        n: 3,
        k: 5,
    };
    let (x, dy, offsets) = (
        [uniform(1, 30), uniform(2, 60)],
        uniform(3, 18),
        [0, 2, 4, 4, 6],
    );
    let run = |x: &[Vec<f64>]| {
        let inputs = grouped_gemm::Inputs {
            params,
            x: &x[0],
            w: &x[1],
            expert_offsets: &offsets,
        };
        grouped_gemm::forward(&inputs, &EXACT)
    };
    let inputs = grouped_gemm::Inputs {
        params,
        x: &x[0],
        w: &x[1],
        expert_offsets: &offsets,
    };
    let g = grouped_gemm::backward(&inputs, &run(&x), &grouped_gemm::Grads { dy: &dy }, &EXACT);
    assert!(g.dw[2 * 15..3 * 15].iter().all(|&dw| dw == 0.0));
    assert_derivative(&x, &[g.dx, g.dw], |x| dot(&run(x).y, &dy));
}

#[test]
fn moe_combine_gradients_are_its_derivative() {
    let params = moe_combine::Params {
        tokens: 3,
        hidden: 5,
        topk: 2,
        scaling: 2.0,
    };
    let x = [uniform(1, 30), uniform(2, 6), uniform(3, 15)];
    let (dy, row_of_slot) = (uniform(4, 15), [0, 4, 2, 5, 1, 3]);
    fn inputs<'a>(
        params: moe_combine::Params,
        x: &'a [Vec<f64>],
        row_of_slot: &'a [i32],
    ) -> moe_combine::Inputs<'a> {
        let (down, expert_weights, shared) = (&x[0][..], &x[1][..], Some(&x[2][..]));
        moe_combine::Inputs {
            params,
            down,
            expert_weights,
            row_of_slot,
            shared,
        }
    }
    let run = |x: &[Vec<f64>]| moe_combine::forward(&inputs(params, x, &row_of_slot), &EXACT);
    let grads = moe_combine::Grads { dy: &dy };
    let g = moe_combine::backward(&inputs(params, &x, &row_of_slot), &run(&x), &grads, &EXACT);
    assert_derivative(&x, &[g.ddown, g.dexpert_weights, dy.clone()], |x| {
        dot(&run(x).y, &dy)
    });
}

#[test]
fn the_shared_expert_is_not_scaled() {
    let params = moe_combine::Params {
        tokens: 1,
        hidden: 1,
        topk: 2,
        scaling: 2.0,
    };
    let inputs = moe_combine::Inputs {
        params,
        down: &[10.0, 1.0],
        expert_weights: &[0.25, 0.75],
        row_of_slot: &[1, 0],
        shared: Some(&[100.0]),
    };
    assert_eq!(
        moe_combine::forward(&inputs, &EXACT).y,
        [2.0 * (0.25 + 7.5) + 100.0]
    );
}

#[test]
fn rows_past_the_last_expert_are_zero() {
    let params = grouped_gemm::Params {
        rows: 3,
        experts: 2,
        n: 1,
        k: 1,
    };
    let (x, w, expert_offsets) = (&[1.0, 2.0, 3.0], &[10.0, 100.0], &[0, 1, 2]);
    let inputs = grouped_gemm::Inputs {
        params,
        x,
        w,
        expert_offsets,
    };
    let output = grouped_gemm::forward(&inputs, &EXACT);
    assert_eq!(output.y, [10.0, 200.0, 0.0]);
    let g = grouped_gemm::backward(
        &inputs,
        &output,
        &grouped_gemm::Grads { dy: &[1.0; 3] },
        &EXACT,
    );
    assert_eq!((g.dx, g.dw), (vec![10.0, 100.0, 0.0], vec![1.0, 2.0]));
}
