//! Bits: a row's depend on the row alone; sums over rows do not depend on threads; no layout or instruction set shows.

use std::ops::Range;

use m3_kernels::cpu::simd::{Isa, with_isa};
use m3_kernels::{Backend, Tensor, ops};
use m3_spec::dtype::DType;

use crate::lab::{Lab, Layout, T, host_rows, ids_of};

const TOKENS: usize = 300;

/// Bits of every row, of all outputs together, and of the sums over rows.
#[derive(Default, PartialEq)]
struct Outcome {
    rows: Vec<Vec<u32>>,
    sums: Vec<u32>,
}

impl Outcome {
    fn rows(mut self, lab: &Lab, output: &T) -> Self {
        let count = output.shape()[0];
        self.rows.resize(count, Vec::new());
        let bits = lab.bits(output);
        for (row, bits) in self
            .rows
            .iter_mut()
            .zip(bits.chunks_exact(bits.len() / count))
        {
            row.extend(bits);
        }
        self
    }

    fn sum(mut self, lab: &Lab, sum: &T) -> Self {
        self.sums.extend(lab.bits(sum));
        self
    }
}

type Case = fn(&Lab, &Range<usize>) -> Outcome;

/// What every operation with a row per token promises.
fn holds(case: Case) {
    for storage in [DType::F32, DType::BF16] {
        let lab = Lab::new(2, storage, Layout::Dense);
        let whole = case(&lab, &(0..TOKENS));
        let nan = |bits: &Vec<u32>| bits.iter().any(|&bits| f32::from_bits(bits).is_nan());
        assert!(!whole.rows.iter().any(nan) && !nan(&whole.sums));
        for count in 1..TOKENS {
            let part = case(&lab, &(0..count));
            assert!(
                part.rows == whole.rows[..count],
                "{storage:?}, {count} rows"
            );
        }
        for token in [0, 1, 63, 64, 128, 299] {
            let alone = case(&lab, &(token..token + 1));
            assert!(
                alone.rows[0] == whole.rows[token],
                "{storage:?}, row {token} alone"
            );
        }
        for threads in [1, 3] {
            let same = case(&Lab::new(threads, storage, Layout::Dense), &(0..TOKENS)) == whole;
            assert!(same, "{storage:?}, {threads} threads");
        }
        let same = case(&Lab::new(2, storage, Layout::Fused), &(0..TOKENS)) == whole;
        assert!(same, "{storage:?}, slices of fused rows");
        for isa in Isa::available() {
            let same = with_isa(isa, || case(&lab, &(0..TOKENS))) == whole;
            assert!(same, "{storage:?}, {isa:?}");
        }
    }
}

#[test]
fn embedding_rows_depend_on_their_id_alone() {
    holds(|lab, tokens| {
        let (vocab, hidden) = (50, 300);
        let table = lab.rows(1, &(0..vocab), hidden);
        let ids: Vec<i32> = tokens.clone().map(|t| (t * 7 % vocab) as i32).collect();
        let ids = lab.put(&ids, [tokens.len()]);
        let out = lab.out([tokens.len(), hidden]);
        let d_out = lab.rows(2, tokens, hidden);
        let d_table = lab.f32s([vocab, hidden]);
        let forward = ops::Embedding {
            ids: &ids,
            table: &table,
            out: &out,
        };
        lab.backend.embedding(&lab.stream, &forward).unwrap();
        let backward = ops::EmbeddingBackward {
            ids: &ids,
            d_out: &d_out,
            d_table: &d_table,
        };
        lab.backend
            .embedding_backward(&lab.stream, &backward)
            .unwrap();
        Outcome::default().rows(lab, &out).sum(lab, &d_table)
    });
}

#[test]
fn products_have_one_sum_per_element() {
    holds(|lab, tokens| {
        let (n, k) = (37, 700);
        let a = lab.rows(1, tokens, k);
        let w = lab.rows(2, &(0..n), k);
        let c = lab.out([tokens.len(), n]);
        let dw = lab.f32s([n, k]);
        let product = ops::Gemm {
            a: &a,
            b: &w.transpose(0, 1),
            c: &c,
            accumulate: false,
        };
        lab.backend.gemm(&lab.stream, &product).unwrap();
        let columns = lab.out([tokens.len(), 5]);
        let product = ops::Gemm {
            a: &a,
            b: &w.slice(0, 30..35).transpose(0, 1),
            c: &columns,
            accumulate: false,
        };
        lab.backend.gemm(&lab.stream, &product).unwrap();
        assert_eq!(lab.bits(&columns), lab.bits(&c.slice(1, 30..35)));
        let product = ops::Gemm {
            a: &c.transpose(0, 1),
            b: &a,
            c: &dw,
            accumulate: true,
        };
        lab.backend.gemm(&lab.stream, &product).unwrap();
        Outcome::default().rows(lab, &c).sum(lab, &dw)
    });
}

#[test]
fn norm_rows_do_not_see_each_other() {
    holds(|lab, tokens| {
        let hidden = 203;
        let shape = [tokens.len(), hidden];
        let [residual, y, d_out, passed] = [1, 2, 3, 4].map(|seed| lab.rows(seed, tokens, hidden));
        let weight = lab.rows(5, &(0..1), hidden).slice(0, 0..1);
        let weight = weight_vector(lab, &weight);
        let [sum, out, d_residual] = [(); 3].map(|()| lab.out(shape));
        let (rstd, d_weight) = (lab.f32s([tokens.len()]), lab.f32s([hidden]));
        let forward = ops::RmsNorm {
            residual: &residual,
            y: Some(&y),
            weight: &weight,
            residual_out: Some(&sum),
            out: &out,
            rstd: &rstd,
            eps: 1e-6,
        };
        lab.backend.rms_norm(&lab.stream, &forward).unwrap();
        let backward = ops::RmsNormBackward {
            residual: &sum,
            weight: &weight,
            rstd: &rstd,
            d_out: &d_out,
            d_residual_in: Some(&passed),
            d_residual: &d_residual,
            d_weight: &d_weight,
        };
        lab.backend
            .rms_norm_backward(&lab.stream, &backward)
            .unwrap();
        let outcome = Outcome::default().rows(lab, &sum).rows(lab, &out);
        outcome
            .rows(lab, &rstd)
            .rows(lab, &d_residual)
            .sum(lab, &d_weight)
    });
}

/// A dense vector of a one-row matrix's values, in its dtype.
fn weight_vector(lab: &Lab, matrix: &T) -> T {
    let width = matrix.shape()[1];
    let vector = Tensor::zeros(&lab.backend, matrix.dtype(), [1, width]).unwrap();
    let copy = ops::Copy {
        source: matrix,
        target: &vector,
    };
    lab.backend.copy(&lab.stream, &copy).unwrap();
    vector.reshape([width])
}

#[test]
fn heads_do_not_see_each_other() {
    holds(|lab, tokens| {
        let (heads, head_dim, rotary_dim, positions) = (3, 40, 24, 64);
        let width = heads * head_dim;
        let [x, d_out] = [1, 2].map(|seed| lab.rows(seed, tokens, width).split_last(head_dim));
        let weight = weight_vector(lab, &lab.rows(3, &(0..1), head_dim));
        let table = m3_spec::rope::RotaryTable::new(5e6, rotary_dim, positions);
        let cos_sin = lab.put(&table.cos_sin, [positions, rotary_dim / 2, 2]);
        let at: Vec<i32> = tokens.clone().map(|t| (t % positions) as i32).collect();
        let at = lab.put(&at, [tokens.len()]);
        let [out, dx] = [(); 2].map(|()| lab.out([tokens.len(), width]));
        let (rstd, d_weight) = (lab.f32s([tokens.len(), heads]), lab.f32s([head_dim]));
        let forward = ops::QkNormRope {
            x: &x,
            weight: &weight,
            cos_sin: &cos_sin,
            positions: &at,
            out: &out.split_last(head_dim),
            rstd: &rstd,
            eps: 1e-6,
        };
        lab.backend.qk_norm_rope(&lab.stream, &forward).unwrap();
        let backward = ops::QkNormRopeBackward {
            x: &x,
            weight: &weight,
            cos_sin: &cos_sin,
            positions: &at,
            rstd: &rstd,
            d_out: &d_out,
            dx: &dx.split_last(head_dim),
            d_weight: &d_weight,
        };
        lab.backend
            .qk_norm_rope_backward(&lab.stream, &backward)
            .unwrap();
        let outcome = Outcome::default().rows(lab, &out).rows(lab, &rstd);
        outcome.rows(lab, &dx).sum(lab, &d_weight)
    });
}

#[test]
fn activations_are_elementwise() {
    holds(|lab, tokens| {
        let width = 203;
        let [gate, up, d_out] = [1, 2, 3].map(|seed| lab.rows(seed, tokens, width));
        let [out, d_gate, d_up] = [(); 3].map(|()| lab.out([tokens.len(), width]));
        let (alpha, limit) = (1.702, 1.5);
        let forward = ops::Swigluoai {
            gate: &gate,
            up: &up,
            out: &out,
            alpha,
            limit,
        };
        lab.backend.swigluoai(&lab.stream, &forward).unwrap();
        let backward = ops::SwigluoaiBackward {
            gate: &gate,
            up: &up,
            d_out: &d_out,
            d_gate: &d_gate,
            d_up: &d_up,
            alpha,
            limit,
        };
        lab.backend
            .swigluoai_backward(&lab.stream, &backward)
            .unwrap();
        let outcome = Outcome::default().rows(lab, &out);
        outcome.rows(lab, &d_gate).rows(lab, &d_up)
    });
}

#[test]
fn routes_of_a_token_are_its_own() {
    holds(|lab, tokens| {
        let (experts, topk) = (37, 4);
        let logits = lab.put(&host_rows(1, tokens, experts), [tokens.len(), experts]);
        let bias = lab.put(&host_rows(2, &(0..1), experts), [experts]);
        let d_weights = lab.put(&host_rows(3, tokens, topk), [tokens.len(), topk]);
        let expert_ids = lab.i32s([tokens.len(), topk]);
        let weights = lab.f32s([tokens.len(), topk]);
        let d_logits = lab.f32s([tokens.len(), experts]);
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
        let backward = ops::RouterBackward {
            logits: &logits,
            expert_ids: &expert_ids,
            d_weights: &d_weights,
            d_logits: &d_logits,
        };
        lab.backend.router_backward(&lab.stream, &backward).unwrap();
        let outcome = Outcome::default().rows(lab, &expert_ids);
        outcome.rows(lab, &weights).rows(lab, &d_logits)
    });
}

#[test]
fn a_token_passes_its_experts_alone_or_among_others() {
    holds(|lab, tokens| {
        let (experts, topk, hidden, width) = (5, 2, 72, 33);
        let rows = tokens.len() * topk;
        let ids: Vec<i32> = tokens
            .clone()
            .flat_map(|t| ids_of(t, topk, experts))
            .collect();
        let ids = lab.put(&ids, [tokens.len(), topk]);
        let expert_offsets = lab.i32s([experts + 1]);
        let (row_of_slot, token_of_row) = (lab.i32s([tokens.len(), topk]), lab.i32s([rows]));
        let plan = ops::MoePlan {
            expert_ids: &ids,
            expert_offsets: &expert_offsets,
            row_of_slot: &row_of_slot,
            token_of_row: &token_of_row,
        };
        lab.backend.moe_plan(&lab.stream, &plan).unwrap();

        let x = lab.rows(1, tokens, hidden);
        let permuted = lab.out([rows, hidden]);
        let permute = ops::MoePermute {
            x: &x,
            token_of_row: &token_of_row,
            out: &permuted,
        };
        lab.backend.moe_permute(&lab.stream, &permute).unwrap();
        let w = Lab {
            layout: Layout::Dense,
            backend: lab.backend.clone(),
            stream: Default::default(),
            storage: lab.storage,
        };
        let w = w
            .rows(2, &(0..experts * width), hidden)
            .reshape([experts, width, hidden]);
        let down = lab.out([rows, width]);
        let product = ops::GroupedGemm {
            a: &permuted,
            b: &w.transpose(1, 2),
            expert_offsets: &expert_offsets,
            c: &down,
        };
        lab.backend.grouped_gemm(&lab.stream, &product).unwrap();

        let weights = lab.put(&host_rows(3, tokens, topk), [tokens.len(), topk]);
        let [shared, d_out] = [4, 5].map(|seed| lab.rows(seed, tokens, width));
        let (out, d_down) = (lab.out([tokens.len(), width]), lab.out([rows, width]));
        let d_weights = lab.f32s([tokens.len(), topk]);
        let combine = ops::MoeCombine {
            down: &down,
            row_of_slot: &row_of_slot,
            weights: &weights,
            shared: Some(&shared),
            out: &out,
            scaling: 2.0,
        };
        lab.backend.moe_combine(&lab.stream, &combine).unwrap();
        let backward = ops::MoeCombineBackward {
            d_out: &d_out,
            down: &down,
            row_of_slot: &row_of_slot,
            weights: &weights,
            d_down: &d_down,
            d_weights: &d_weights,
            scaling: 2.0,
        };
        lab.backend
            .moe_combine_backward(&lab.stream, &backward)
            .unwrap();

        let dw = lab.f32s([experts, width, hidden]);
        let product = ops::GroupedGemmWeights {
            a: &d_down,
            b: &permuted,
            expert_offsets: &expert_offsets,
            dw: &dw,
        };
        lab.backend
            .grouped_gemm_weights(&lab.stream, &product)
            .unwrap();
        let (d_permuted, dx) = (lab.out([rows, hidden]), lab.f32s([tokens.len(), hidden]));
        let product = ops::GroupedGemm {
            a: &d_down,
            b: &w,
            expert_offsets: &expert_offsets,
            c: &d_permuted,
        };
        lab.backend.grouped_gemm(&lab.stream, &product).unwrap();
        let backward = ops::MoePermuteBackward {
            d_rows: &d_permuted,
            row_of_slot: &row_of_slot,
            dx: &dx,
        };
        lab.backend
            .moe_permute_backward(&lab.stream, &backward)
            .unwrap();
        let outcome = Outcome::default().rows(lab, &out).rows(lab, &d_weights);
        outcome.rows(lab, &dx).sum(lab, &dw)
    });
}

#[test]
fn log_probs_of_a_row_are_its_own() {
    holds(|lab, tokens| {
        let (vocab, hidden) = (1100, 24);
        let (x, weight) = (
            lab.rows(1, tokens, hidden),
            lab.rows(2, &(0..vocab), hidden),
        );
        // Every fifth row is skipped.
        let targets: Vec<i32> = tokens
            .clone()
            .map(|t| {
                if t % 5 == 4 {
                    -1
                } else {
                    (t * 97 % vocab) as i32
                }
            })
            .collect();
        let targets = lab.put(&targets, [tokens.len()]);
        let temperature = lab.put(&[0.8f32], [1]);
        let [log_prob, lse, entropy] = [(); 3].map(|()| lab.f32s([tokens.len()]));
        let forward = ops::LogProb {
            x: &x,
            weight: &weight,
            targets: &targets,
            temperature: &temperature,
            log_prob: &log_prob,
            lse: &lse,
            entropy: &entropy,
        };
        lab.backend.log_prob(&lab.stream, &forward).unwrap();
        assert!(lab.read(&log_prob).iter().all(|&log_prob| log_prob <= 0.0));
        let d_log_prob = lab.put(&host_rows(3, tokens, 1), [tokens.len()]);
        let (dx, d_weight) = (lab.out([tokens.len(), hidden]), lab.f32s([vocab, hidden]));
        let backward = ops::LogProbBackward {
            x: &x,
            weight: &weight,
            targets: &targets,
            temperature: &temperature,
            lse: &lse,
            d_log_prob: &d_log_prob,
            dx: &dx,
            d_weight: &d_weight,
        };
        lab.backend
            .log_prob_backward(&lab.stream, &backward)
            .unwrap();
        let outcome = Outcome::default().rows(lab, &log_prob).rows(lab, &lse);
        outcome
            .rows(lab, &entropy)
            .rows(lab, &dx)
            .sum(lab, &d_weight)
    });
}

#[test]
fn copies_and_sums_do_not_see_the_layout() {
    holds(|lab, tokens| {
        let width = 77;
        let source = lab.rows(1, tokens, width);
        let [same, summed] = [(); 2].map(|()| lab.f32s([tokens.len(), width]));
        let copy = ops::Copy {
            source: &source,
            target: &same,
        };
        lab.backend.copy(&lab.stream, &copy).unwrap();
        let accumulate = ops::Accumulate {
            source: &source,
            target: &summed,
        };
        lab.backend.accumulate(&lab.stream, &accumulate).unwrap();
        let squares = lab.f32s([1]);
        let sum = ops::SumSquares {
            source: &source,
            sum: &squares,
        };
        lab.backend.sum_squares(&lab.stream, &sum).unwrap();
        Outcome::default()
            .rows(lab, &same)
            .rows(lab, &summed)
            .sum(lab, &squares)
    });
}

#[test]
fn large_sums_of_squares_have_equal_bits_for_any_threads_and_layout() {
    let rows = 500;
    let on = |threads, layout| {
        let lab = Lab::new(threads, DType::F32, layout);
        let (source, sum) = (lab.rows(1, &(0..rows), 333), lab.f32s([1]));
        let args = ops::SumSquares {
            source: &source,
            sum: &sum,
        };
        lab.backend.sum_squares(&lab.stream, &args).unwrap();
        lab.read(&sum)[0]
    };
    let exact: f64 = host_rows(1, &(0..rows), 333)
        .iter()
        .map(|&x| f64::from(x).powi(2))
        .sum();
    assert_eq!(on(1, Layout::Dense), exact as f32);
    for (threads, layout) in [(2, Layout::Dense), (3, Layout::Fused), (1, Layout::Fused)] {
        assert_eq!(
            on(threads, layout).to_bits(),
            on(1, Layout::Dense).to_bits()
        );
    }
}

#[test]
fn losses_and_steps_have_equal_bits_for_any_threads_and_set() {
    let tokens = 10_000;
    let on = |threads: usize| {
        let lab = Lab::new(threads, DType::BF16, Layout::Dense);
        let column = |seed| host_rows(seed, &(0..tokens), 1);
        let [new, old, advantage, weight] =
            [1, 2, 3, 4].map(|seed| lab.put(&column(seed), [tokens]));
        let (loss, stats, gradient) = (lab.f32s([1]), lab.f32s([2]), lab.f32s([tokens]));
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
        let [master, exp_avg] = [5, 6].map(|seed| lab.put(&column(seed), [tokens]));
        let squares: Vec<f32> = column(7).iter().map(|x| x * x).collect();
        let exp_avg_sq = lab.put(&squares, [tokens]);
        let param = Tensor::zeros(&lab.backend, DType::BF16, [tokens]).unwrap();
        let (one, rate) = (lab.put(&[1i32], [1]), lab.put(&[0.01f32], [1]));
        let args = ops::AdamW {
            grad: &gradient,
            master: &master,
            exp_avg: &exp_avg,
            exp_avg_sq: &exp_avg_sq,
            param: &param,
            learning_rate: &rate,
            step: &one,
            coefficient: &rate,
            finite: &one,
            beta1: 0.9,
            beta2: 0.98,
            eps: 1e-8,
            weight_decay: 0.1,
        };
        lab.backend.adamw(&lab.stream, &args).unwrap();
        let written = [
            &loss,
            &stats,
            &gradient,
            &master,
            &exp_avg,
            &exp_avg_sq,
            &param,
        ];
        written.map(|tensor| lab.bits(tensor))
    };
    let expected = on(1);
    assert!(on(2) == expected && on(3) == expected);
    for isa in Isa::available() {
        assert!(with_isa(isa, || on(2)) == expected, "{isa:?}");
    }
}
