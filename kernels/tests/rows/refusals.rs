//! What lies in a buffer and points nowhere is refused, with its place and its value; nothing is written.

use m3_kernels::{Backend, Error, Result, ops};
use m3_spec::dtype::DType;

use crate::lab::{Lab, T};

/// The refused index, as (tensor, index, value).
fn refused(result: Result<()>) -> (&'static str, usize, i64) {
    match result {
        Err(Error::Index {
            tensor,
            index,
            value,
            ..
        }) => (tensor, index, value),
        other => panic!("expected an index to be refused, got {other:?}"),
    }
}

#[test]
fn token_ids_outside_the_table_are_refused() {
    let lab = Lab::plain();
    let table = lab.put(&[1.0f32; 6], [3, 2]);
    for (ids, place) in [([0, 3], ("ids", 1, 3)), ([-1, 0], ("ids", 0, -1))] {
        let (ids, out) = (lab.put(&ids, [2]), lab.f32s([2, 2]));
        let args = ops::Embedding {
            ids: &ids,
            table: &table,
            out: &out,
        };
        assert_eq!(refused(lab.backend.embedding(&lab.stream, &args)), place);
        assert_eq!(lab.read(&out), [0.0; 4]);
        let args = ops::EmbeddingBackward {
            ids: &ids,
            d_out: &table.slice(0, 0..2),
            d_table: &out,
        };
        let backward = lab.backend.embedding_backward(&lab.stream, &args);
        assert_eq!(refused(backward).0, "ids");
        assert_eq!(lab.read(&out), [0.0; 4]);
    }
}

#[test]
fn positions_outside_the_rotary_table_are_refused() {
    let lab = Lab::plain();
    let x = lab.put(&[1.0f32; 8], [2, 1, 4]);
    let (weight, cos_sin) = (lab.f32s([4]), lab.f32s([10, 2, 2]));
    let (out, rstd) = (lab.f32s([2, 1, 4]), lab.put(&[1.0f32; 2], [2, 1]));
    for (positions, place) in [
        ([9, 10], ("positions", 1, 10)),
        ([-1, 0], ("positions", 0, -1)),
    ] {
        let positions = lab.put(&positions, [2]);
        let args = ops::QkNormRope {
            x: &x,
            weight: &weight,
            cos_sin: &cos_sin,
            positions: &positions,
            out: &out,
            rstd: &rstd,
            eps: 1e-6,
        };
        assert_eq!(refused(lab.backend.qk_norm_rope(&lab.stream, &args)), place);
        let args = ops::QkNormRopeBackward {
            x: &x,
            weight: &weight,
            cos_sin: &cos_sin,
            positions: &positions,
            rstd: &rstd,
            d_out: &x,
            dx: &out,
            d_weight: &lab.f32s([4]),
        };
        assert_eq!(
            refused(lab.backend.qk_norm_rope_backward(&lab.stream, &args)),
            place
        );
    }
}

#[test]
fn expert_ids_out_of_range_duplicated_or_unsorted_are_refused() {
    let lab = Lab::plain();
    let logits = lab.f32s([2, 4]);
    let (weights, d_logits) = (lab.f32s([2, 2]), lab.f32s([2, 4]));
    for (ids, place) in [
        ([0, 1, 2, 4], ("expert_ids", 3, 4)),
        ([-1, 1, 2, 3], ("expert_ids", 0, -1)),
        ([0, 1, 2, 2], ("expert_ids", 3, 2)),
        ([1, 0, 2, 3], ("expert_ids", 1, 0)),
    ] {
        let expert_ids = lab.put(&ids, [2, 2]);
        let args = ops::RouterWeights {
            logits: &logits,
            expert_ids: &expert_ids,
            weights: &weights,
        };
        assert_eq!(
            refused(lab.backend.router_weights(&lab.stream, &args)),
            place
        );
        let args = ops::RouterBackward {
            logits: &logits,
            expert_ids: &expert_ids,
            d_weights: &weights,
            d_logits: &d_logits,
        };
        assert_eq!(
            refused(lab.backend.router_backward(&lab.stream, &args)),
            place
        );
        let args = ops::MoePlan {
            expert_ids: &expert_ids,
            expert_offsets: &lab.i32s([5]),
            row_of_slot: &lab.i32s([2, 2]),
            token_of_row: &lab.i32s([4]),
        };
        assert_eq!(refused(lab.backend.moe_plan(&lab.stream, &args)), place);
    }
}

#[test]
fn rows_and_tokens_that_do_not_exist_are_refused() {
    let lab = Lab::plain();
    let (x, out) = (lab.f32s([2, 3]), lab.f32s([4, 3]));
    let args = ops::MoePermute {
        x: &x,
        token_of_row: &lab.put(&[0, 1, 2, 0], [4]),
        out: &out,
    };
    let permute = lab.backend.moe_permute(&lab.stream, &args);
    assert_eq!(refused(permute), ("token_of_row", 2, 2));
    let row_of_slot = lab.put(&[0, 1, 4, 2], [2, 2]);
    let args = ops::MoePermuteBackward {
        d_rows: &out,
        row_of_slot: &row_of_slot,
        dx: &x,
    };
    let backward = lab.backend.moe_permute_backward(&lab.stream, &args);
    assert_eq!(refused(backward), ("row_of_slot", 2, 4));
    let args = ops::MoeCombine {
        down: &out,
        row_of_slot: &row_of_slot,
        weights: &lab.f32s([2, 2]),
        shared: None,
        out: &x,
        scaling: 2.0,
    };
    let combine = lab.backend.moe_combine(&lab.stream, &args);
    assert_eq!(refused(combine), ("row_of_slot", 2, 4));
    assert_eq!(
        refused(combine_backward(&lab, &[0, 1, 5, 2]).0),
        ("row_of_slot", 2, 5)
    );
}

fn combine_backward(lab: &Lab, row_of_slot: &[i32; 4]) -> (Result<()>, T) {
    let d_down = lab.put(&[f32::NAN; 15], [5, 3]);
    let down = lab.put(&[1.0f32; 15], [5, 3]);
    let args = ops::MoeCombineBackward {
        d_out: &lab.put(&[1.0f32; 6], [2, 3]),
        down: &down,
        row_of_slot: &lab.put(row_of_slot, [2, 2]),
        weights: &lab.put(&[0.5f32; 4], [2, 2]),
        d_down: &d_down,
        d_weights: &lab.f32s([2, 2]),
        scaling: 2.0,
    };
    let args = lab.backend.moe_combine_backward(&lab.stream, &args);
    (args, d_down)
}

#[test]
fn two_slots_share_no_row_and_a_row_without_a_slot_gets_zeros() {
    let lab = Lab::plain();
    let message = combine_backward(&lab, &[0, 1, 1, 2])
        .0
        .unwrap_err()
        .to_string();
    assert!(message.contains("row_of_slot[2] = 1"), "{message}");
    let (result, d_down) = combine_backward(&lab, &[0, 4, 1, 2]);
    result.unwrap();
    let rows = [1.0, 1.0, 1.0, 0.0, 1.0];
    assert_eq!(lab.read(&d_down), rows.map(|row| [row; 3]).concat());
}

#[test]
fn a_target_outside_the_vocabulary_is_refused_and_a_negative_one_skipped() {
    let lab = Lab::plain();
    // A skipped row may hold anything.
    let x = lab.put(&[1.0f32, f32::NAN, 2.0], [3, 1]);
    let weight = lab.put(&[0.5f32, 0.25], [2, 1]);
    let temperature = lab.put(&[1.0f32], [1]);
    let run = |targets: [i32; 3]| {
        let targets = lab.put(&targets, [3]);
        let [log_prob, lse, entropy] = [(); 3].map(|()| lab.put(&[9.0f32; 3], [3]));
        let args = ops::LogProb {
            x: &x,
            weight: &weight,
            targets: &targets,
            temperature: &temperature,
            log_prob: &log_prob,
            lse: &lse,
            entropy: &entropy,
        };
        let forward = lab.backend.log_prob(&lab.stream, &args);
        let (dx, d_weight) = (lab.put(&[9.0f32; 3], [3, 1]), lab.f32s([2, 1]));
        let args = ops::LogProbBackward {
            x: &x,
            weight: &weight,
            targets: &targets,
            temperature: &temperature,
            lse: &lse,
            d_log_prob: &lab.put(&[1.0f32; 3], [3]),
            dx: &dx,
            d_weight: &d_weight,
        };
        let backward = lab.backend.log_prob_backward(&lab.stream, &args);
        let values = [&log_prob, &lse, &entropy, &dx, &d_weight].map(|tensor| lab.read(tensor));
        (forward, backward, values)
    };
    let (forward, backward, _) = run([0, -1, 2]);
    assert_eq!(refused(forward), ("targets", 2, 2));
    assert_eq!(refused(backward), ("targets", 2, 2));
    let (forward, backward, values) = run([0, -1, 1]);
    forward.and(backward).unwrap();
    assert!(
        values[..4].iter().all(|values| values[1].to_bits() == 0),
        "{values:?}"
    );
    assert!(values.concat().iter().all(|x| x.is_finite()), "{values:?}");
}

#[test]
fn a_step_counts_from_one_and_a_gradient_that_is_not_finite_changes_nothing() {
    let lab = Lab::plain();
    let run = |step: i32, grad: f32| {
        let grad = lab.put(&[grad, 1.0], [2]);
        let [sum, norm, coefficient] = [(); 3].map(|()| lab.f32s([1]));
        let finite = lab.i32s([1]);
        let args = ops::SumSquares {
            source: &grad,
            sum: &sum,
        };
        lab.backend.sum_squares(&lab.stream, &args).unwrap();
        let args = ops::ClipCoefficient {
            sums: &sum,
            norm: &norm,
            coefficient: &coefficient,
            finite: &finite,
            max_norm: 1.0,
        };
        lab.backend.clip_coefficient(&lab.stream, &args).unwrap();
        let [master, exp_avg, exp_avg_sq, param] = [(); 4].map(|()| lab.put(&[0.5f32; 2], [2]));
        let args = ops::AdamW {
            grad: &grad,
            master: &master,
            exp_avg: &exp_avg,
            exp_avg_sq: &exp_avg_sq,
            param: &param,
            learning_rate: &lab.put(&[0.1f32], [1]),
            step: &lab.put(&[step], [1]),
            coefficient: &coefficient,
            finite: &finite,
            beta1: 0.9,
            beta2: 0.98,
            eps: 1e-8,
            weight_decay: 0.0,
        };
        let result = lab.backend.adamw(&lab.stream, &args);
        let state = [&master, &exp_avg, &exp_avg_sq, &param].map(|tensor| lab.read(tensor));
        (result, lab.read_i32(&finite)[0], state)
    };
    for grad in [f32::NAN, f32::INFINITY] {
        let (result, finite, state) = run(1, grad);
        result.unwrap();
        assert_eq!((finite, state), (0, [(); 4].map(|()| vec![0.5; 2])));
    }
    let message = run(0, 1.0).0.unwrap_err().to_string();
    assert!(message.contains("step 0"), "{message}");
    let (result, finite, state) = run(1, 1.0);
    result.unwrap();
    assert!(finite == 1 && state[0][0] < 0.5, "{state:?}");
    assert_eq!(state[0], state[3]);
}

#[test]
fn digests_refuse_positions_beyond_64_bits() {
    let lab = Lab::plain();
    let sums = m3_kernels::Tensor::zeros(&lab.backend, DType::U64, [2]).unwrap();
    let args = ops::Digest {
        source: &lab.f32s([4]),
        start: u64::MAX - 3,
        sums: &sums,
    };
    assert!(lab.backend.digest(&lab.stream, &args).is_err());
}
