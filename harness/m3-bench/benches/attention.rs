//! Block-sparse attention beside our own matrix product and our own dense path: 16 q / 1 kv heads of 128 channels, f32,
//! blocks of 128, top-16 with the own block forced and the others random.
//!
//! `cargo bench -p m3-bench --bench attention`. A rate of 1 Gelem/s is 1 GFLOP/s; attention counts the pairs of query
//! and key that are selected and causal. Bound: at T 4096 the forward pass reaches 45 % of the product's rate.
//!
//! `M3_TIER=full` adds T 16384, sparse and dense, which takes minutes. Bound: sparse is 3 times faster.

use std::time::Duration;

use criterion::{Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use m3_kernels::backend::Backend;
use m3_kernels::cpu::CpuBackend;
use m3_kernels::cpu::gemm::{Matrix, MatrixMut, gemm};
use m3_kernels::launch::{self, AttentionConfig};
use m3_kernels::ops;
use m3_kernels::ops::{AttentionDims, attention_backward_workspace, map_capacity};
use m3_kernels::{Shape, Tensor};
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};

const HEADS: usize = 16;
const HEAD_DIM: usize = 128;
const BLOCK: usize = 128;
const TOPK: usize = 16;

/// M, N, K of the product that the rate is measured against.
const PRODUCT: [usize; 3] = [2048, 512, 2048];

type CpuTensor = Tensor<CpuBackend>;

/// Operands of one sequence of `tokens`.
struct Problem {
    backend: CpuBackend,
    tokens: usize,
    config: AttentionConfig,
    q: CpuTensor,
    k: CpuTensor,
    v: CpuTensor,
    d_o: CpuTensor,
    cu_seqlens: CpuTensor,
    block_ids: CpuTensor,
    /// Pairs of query and key that are selected and causal.
    pairs: u64,
    o: CpuTensor,
    lse: CpuTensor,
}

impl Problem {
    fn new(tokens: usize) -> Self {
        let backend = CpuBackend::default();
        let stream = backend.stream();
        let inputs = Inputs::new(0, "attention bench");
        let normal = |label, shape: [usize; 3]| {
            let len = shape.iter().product();
            let values = inputs.f32s(label, Distribution::Normal { std: 1.0 }, len);
            Tensor::from_slice(&backend, &stream, &values, shape).expect("memory")
        };
        let (ids, pairs) = selection(&inputs, tokens);
        let ints = |values: &[i32], shape: Shape| {
            Tensor::from_slice(&backend, &stream, values, shape).expect("memory")
        };
        let q_shape = [tokens, HEADS, HEAD_DIM];
        Problem {
            tokens,
            config: launch::attention(BLOCK, HEAD_DIM, HEADS, backend.arch()),
            q: normal("q", q_shape),
            k: normal("k", [tokens, 1, HEAD_DIM]),
            v: normal("v", [tokens, 1, HEAD_DIM]),
            d_o: normal("d_o", q_shape),
            cu_seqlens: ints(&[0, tokens as i32], [2].into()),
            block_ids: ints(&ids, [1, tokens, TOPK].into()),
            pairs,
            o: zeros(&backend, DType::F32, q_shape),
            lse: zeros(&backend, DType::F32, [tokens, HEADS]),
            backend,
        }
    }

    /// Two products of HEAD_DIM a pair and head.
    fn forward_flops(&self, pairs: u64) -> u64 {
        4 * (HEADS * HEAD_DIM) as u64 * pairs
    }

    fn causal_pairs(&self) -> u64 {
        (self.tokens * (self.tokens + 1) / 2) as u64
    }

    fn scale(&self) -> f32 {
        (HEAD_DIM as f32).powf(-0.5)
    }

    fn sparse(&self) {
        let args = ops::MsaAttention {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            cu_seqlens: &self.cu_seqlens,
            block_ids: &self.block_ids,
            o: &self.o,
            lse: &self.lse,
            block: BLOCK,
            scale: self.scale(),
            config: self.config,
        };
        self.backend
            .msa_attention(&self.backend.stream(), &args)
            .expect("fitting operands");
    }

    fn dense(&self) {
        let args = ops::Attention {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            cu_seqlens: &self.cu_seqlens,
            o: &self.o,
            lse: &self.lse,
            scale: self.scale(),
            causal: true,
            config: self.config,
        };
        self.backend
            .attention(&self.backend.stream(), &args)
            .expect("fitting operands");
    }

    /// The backward pass with all its operands, ready to be repeated.
    fn sparse_backward(&self) -> impl Fn() {
        let (backend, stream) = (self.backend.clone(), self.backend.stream());
        let int = |shape: Shape| zeros(&backend, DType::I32, shape);
        let block_offsets = int([2].into());
        let row_offsets = int([1, map_capacity(self.tokens, 1, BLOCK) + 1].into());
        let queries = int([1, self.tokens * TOPK].into());
        let map = ops::TileMap {
            block_ids: &self.block_ids,
            cu_seqlens: &self.cu_seqlens,
            block_offsets: &block_offsets,
            row_offsets: &row_offsets,
            queries: &queries,
            block: BLOCK,
        };
        backend.tile_map(&stream, &map).expect("fitting operands");
        let dims = AttentionDims {
            tokens: self.tokens,
            q_heads: HEADS,
            kv_heads: 1,
            head_dim: HEAD_DIM,
            sequences: 1,
        };
        let needed = attention_backward_workspace(&dims, self.config);
        let workspace = zeros(&backend, DType::F32, [needed]);
        let [dq, dk, dv] =
            [&self.q, &self.k, &self.v].map(|like| zeros(&backend, DType::F32, like.shape()));
        move || {
            let args = ops::MsaAttentionBackward {
                q: &self.q,
                k: &self.k,
                v: &self.v,
                cu_seqlens: &self.cu_seqlens,
                block_ids: &self.block_ids,
                block_offsets: &block_offsets,
                row_offsets: &row_offsets,
                queries: &queries,
                o: &self.o,
                lse: &self.lse,
                d_o: &self.d_o,
                dq: &dq,
                dk: &dk,
                dv: &dv,
                workspace: &workspace,
                block: BLOCK,
                scale: self.scale(),
                config: self.config,
            };
            backend
                .msa_attention_backward(&stream, &args)
                .expect("fitting operands");
        }
    }
}

fn zeros(backend: &CpuBackend, dtype: DType, shape: impl Into<Shape>) -> CpuTensor {
    Tensor::zeros(backend, dtype, shape).expect("memory")
}

/// Ids `[1, tokens, TOPK]`, and the causal pairs in them.
fn selection(inputs: &Inputs, tokens: usize) -> (Vec<i32>, u64) {
    let blocks = tokens.div_ceil(BLOCK);
    let draws = inputs.integers("ids", u32::MAX, tokens * blocks);
    let (mut ids, mut pairs) = (Vec::with_capacity(tokens * TOPK), 0);
    for (token, draws) in draws.chunks_exact(blocks).enumerate() {
        let own = token / BLOCK;
        let mut selected: Vec<usize> = (0..own).collect();
        selected.sort_by_key(|&block| draws[block]);
        selected.truncate(TOPK - 1);
        pairs += (selected.len() * BLOCK + token % BLOCK + 1) as u64;
        selected.push(own);
        selected.sort_unstable();
        let tail = std::iter::repeat_n(-1, TOPK - selected.len());
        ids.extend(selected.iter().map(|&block| block as i32).chain(tail));
    }
    (ids, pairs)
}

fn rates(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention/4096");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3))
        .sampling_mode(SamplingMode::Flat);

    let [m, n, k] = PRODUCT;
    let inputs = Inputs::new(0, "attention bench");
    let x = inputs.f32s("x", Distribution::Normal { std: 1.0 }, m * k);
    let w = inputs.f32s("w", Distribution::Normal { std: 1.0 }, n * k);
    let mut y = vec![0.0_f32; m * n];
    group.throughput(Throughput::Elements(2 * (m * n * k) as u64));
    group.bench_function("gemm_2048x512x2048", |bencher| {
        let pool = rayon::ThreadPoolBuilder::new().build().expect("a pool");
        pool.install(|| {
            bencher.iter(|| {
                let w = Matrix::row_major(&w, n, k).transposed();
                let y = MatrixMut::row_major(&mut y, m, n);
                gemm(Matrix::row_major(&x, m, k), w, y, false);
            });
        });
    });

    let problem = Problem::new(4096);
    let flops = problem.forward_flops(problem.pairs);
    group.throughput(Throughput::Elements(flops));
    group.bench_function("sparse_forward", |bencher| {
        bencher.iter(|| problem.sparse())
    });
    // Five products a pair; what is computed twice is not counted twice.
    group.throughput(Throughput::Elements(flops / 2 * 5));
    let backward = problem.sparse_backward();
    group.bench_function("sparse_backward", |bencher| bencher.iter(&backward));
    let dense = problem.forward_flops(problem.causal_pairs());
    group.throughput(Throughput::Elements(dense));
    group.bench_function("dense_forward", |bencher| bencher.iter(|| problem.dense()));
    group.finish();
}

fn long(criterion: &mut Criterion) {
    if std::env::var("M3_TIER").as_deref() != Ok("full") {
        return;
    }
    let mut group = criterion.benchmark_group("attention/16384");
    group
        .sample_size(10)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(30))
        .sampling_mode(SamplingMode::Flat);
    let problem = Problem::new(16384);
    group.throughput(Throughput::Elements(problem.forward_flops(problem.pairs)));
    group.bench_function("sparse_forward", |bencher| {
        bencher.iter(|| problem.sparse())
    });
    let dense = problem.forward_flops(problem.causal_pairs());
    group.throughput(Throughput::Elements(dense));
    group.bench_function("dense_forward", |bencher| bencher.iter(|| problem.dense()));
    group.finish();
}

criterion_group!(benches, rates, long);
criterion_main!(benches);
