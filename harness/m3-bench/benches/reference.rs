//! Block-sparse attention beside its reference: 16 q / 1 kv heads, D 128, 128-token blocks, top-16, fp32, T 4096.
//!
//! The reference is single-threaded f64 and takes every 16th query; its time stands for a sixteenth of a pass. A line at
//! the end says how many times faster the CPU backend is.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use m3_kernels::cpu::CpuBackend;
use m3_kernels::{Backend, Tensor, launch, ops};
use m3_reference::Rounding;
use m3_reference::ops::{block_select, msa_attention};
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};

const TOKENS: usize = 4096;
const Q_HEADS: usize = 16;
const HEAD_DIM: usize = 128;
const BLOCK: usize = 128;
const TOPK: usize = 16;

/// Queries that the reference skips between two.
const SAMPLED: usize = 16;

fn bench(criterion: &mut Criterion) {
    let inputs = Inputs::new(1, "bench");
    let normal = |label: &str, len: usize| {
        inputs.f64s(label, Distribution::Normal { std: 1.0 }, DType::F32, len)
    };
    let q = normal("q", TOKENS * Q_HEADS * HEAD_DIM);
    let (k, v) = (
        normal("k", TOKENS * HEAD_DIM),
        normal("v", TOKENS * HEAD_DIM),
    );
    let cu_seqlens = [0, TOKENS as i32];
    let max_blocks = TOKENS / BLOCK;
    let params = block_select::Params {
        tokens: TOKENS,
        index_heads: 1,
        block: BLOCK,
        max_blocks,
        topk: TOPK,
        init_blocks: 0,
        local_blocks: 1,
    };
    let scores = normal("scores", TOKENS * max_blocks);
    let selection = block_select::Inputs {
        params,
        scores: &scores,
        cu_seqlens: &cu_seqlens,
    };
    let block_ids = block_select::forward(&selection).block_ids;

    let scale = (HEAD_DIM as f64).powf(-0.5);
    let reference = msa_attention::Inputs {
        params: msa_attention::Params {
            tokens: TOKENS,
            q_heads: Q_HEADS,
            kv_heads: 1,
            head_dim: HEAD_DIM,
            scale,
            block: BLOCK,
            topk: TOPK,
        },
        q: &q,
        k: &k,
        v: &v,
        block_ids: &block_ids,
        cu_seqlens: &cu_seqlens,
    };
    let backend = CpuBackend::default();
    let stream = backend.stream();
    let upload = |values: &[f64], heads: usize| {
        let values: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        Tensor::from_slice(&backend, &stream, &values, [TOKENS, heads, HEAD_DIM])
    };
    let device = [upload(&q, Q_HEADS), upload(&k, 1), upload(&v, 1)].map(Result::unwrap);
    let ids = Tensor::from_slice(&backend, &stream, &block_ids, [1, TOKENS, TOPK]).unwrap();
    let ends = Tensor::from_slice(&backend, &stream, &cu_seqlens, [2]).unwrap();
    let o = Tensor::zeros(&backend, DType::F32, [TOKENS, Q_HEADS, HEAD_DIM]).unwrap();
    let lse = Tensor::zeros(&backend, DType::F32, [TOKENS, Q_HEADS]).unwrap();
    let args = ops::MsaAttention {
        q: &device[0],
        k: &device[1],
        v: &device[2],
        cu_seqlens: &ends,
        block_ids: &ids,
        o: &o,
        lse: &lse,
        block: BLOCK,
        scale: scale as f32,
        config: launch::attention(BLOCK, HEAD_DIM, Q_HEADS, backend.arch()),
    };

    let mut group = criterion.benchmark_group("msa_attention 4096");
    group
        .sample_size(10)
        .sampling_mode(criterion::SamplingMode::Flat);
    let (mut ours, mut theirs) = (Duration::MAX, Duration::MAX);
    group.bench_function("cpu backend", |bencher| {
        bencher.iter_custom(|repeats| {
            let started = Instant::now();
            (0..repeats).for_each(|_| backend.msa_attention(&stream, &args).unwrap());
            ours = ours.min(started.elapsed() / repeats as u32);
            started.elapsed()
        });
    });
    group.bench_function("reference, every 16th query", |bencher| {
        bencher.iter_custom(|repeats| {
            let started = Instant::now();
            for _ in 0..repeats {
                let queries = (0..TOKENS).step_by(SAMPLED);
                black_box(msa_attention::forward_rows(
                    &reference,
                    queries,
                    &Rounding::Exact,
                ));
            }
            theirs = theirs.min(started.elapsed() / repeats as u32);
            started.elapsed()
        });
    });
    group.finish();
    let ratio = theirs.as_secs_f64() * SAMPLED as f64 / ours.as_secs_f64();
    println!("the CPU backend is {ratio:.0} times faster than the single-threaded reference");
}

criterion_group!(benches, bench);
criterion_main!(benches);
