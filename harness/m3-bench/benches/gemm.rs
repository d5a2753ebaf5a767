//! Our matrix product beside the `gemm` crate, W stored `[N, K]`.
//!
//! `cargo bench -p m3-bench --bench gemm`. A rate of 1 Gelem/s is 1 GFLOP/s. Bound: ours reaches 80 % of the crate's
//! rate on 512x128x128 and 2048x512x2048. bf16 has no counterpart there.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use gemm::Parallelism;
use half::bf16;
use m3_kernels::cpu::gemm::{Matrix, MatrixMut, gemm as ours};
use m3_spec::inputs::{Distribution, Inputs};

/// M, N, K: two products with a bound, then a decode step.
const SHAPES: [[usize; 3]; 3] = [[512, 128, 128], [2048, 512, 2048], [16, 2048, 512]];

fn crate_gemm([m, n, k]: [usize; 3], x: &[f32], w: &[f32], y: &mut [f32], threads: usize) {
    let parallelism = match threads {
        1 => Parallelism::None,
        threads => Parallelism::Rayon(threads),
    };
    let [n_stride, k_stride] = [n as isize, k as isize];
    // SAFETY: three row-major matrices of these extents, W transposed.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            y.as_mut_ptr(),
            1,
            n_stride,
            false,
            x.as_ptr(),
            1,
            k_stride,
            w.as_ptr(),
            k_stride,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn bench(criterion: &mut Criterion) {
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.expect("a pool");
        for shape @ [m, n, k] in SHAPES {
            let mut group = criterion.benchmark_group(format!("gemm/{m}x{n}x{k}"));
            group
                .warm_up_time(Duration::from_millis(500))
                .measurement_time(Duration::from_millis(1500))
                .sample_size(20)
                .throughput(Throughput::Elements(2 * (m * n * k) as u64));
            let inputs = Inputs::new(0, "gemm");
            let normal = Distribution::Normal { std: 1.0 };
            let x = inputs.f32s("x", normal, m * k);
            let w = inputs.f32s("w", normal, n * k);
            let x_bf16 = inputs.bf16s("x", normal, m * k);
            let w_bf16 = inputs.bf16s("w", normal, n * k);
            let mut y = vec![0.0_f32; m * n];
            let mut y_bf16 = vec![bf16::ZERO; m * n];
            group.bench_function(BenchmarkId::new("ours_f32", threads), |bencher| {
                pool.install(|| {
                    bencher.iter(|| {
                        let w = Matrix::row_major(&w, n, k).transposed();
                        let y = MatrixMut::row_major(&mut y, m, n);
                        ours(Matrix::row_major(&x, m, k), w, y, false);
                    });
                });
            });
            group.bench_function(BenchmarkId::new("ours_bf16", threads), |bencher| {
                pool.install(|| {
                    bencher.iter(|| {
                        let w = Matrix::row_major(&w_bf16, n, k).transposed();
                        let y = MatrixMut::row_major(&mut y_bf16, m, n);
                        ours(Matrix::row_major(&x_bf16, m, k), w, y, false);
                    });
                });
            });
            group.bench_function(BenchmarkId::new("crate_f32", threads), |bencher| {
                pool.install(|| bencher.iter(|| crate_gemm(shape, &x, &w, &mut y, threads)));
            });
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
