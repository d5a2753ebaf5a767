use half::bf16;
use m3_spec::inputs::{Distribution, Inputs};
use rayon::ThreadPoolBuilder;

use super::*;
use crate::cpu::simd::with_isa;

fn normal(label: &str, length: usize) -> Vec<f32> {
    let distribution = Distribution::Normal { std: 1.0 };
    Inputs::new(7, "gemm").f32s(label, distribution, length)
}

fn narrow(x: &[f32]) -> Vec<bf16> {
    x.iter().map(|&x| bf16::from_f32(x)).collect()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn get<T: Copy>(matrix: Matrix<'_, T>, row: usize, col: usize) -> T {
    // SAFETY: the tests stay within their matrices.
    unsafe { *matrix.at(row, col) }
}

/// The definition of an element, word for word.
fn defined<A: Storage, B: Storage>(a: Matrix<'_, A>, b: Matrix<'_, B>) -> Vec<f32> {
    let element = |row, col| {
        let mut running = 0.0;
        for k in spans(a.cols(), CHUNK) {
            let mut sum = 0.0_f32;
            for k in k.range() {
                sum = get(a, row, k)
                    .to_f32()
                    .mul_add(get(b, k, col).to_f32(), sum);
            }
            running = if k.first == 0 { sum } else { running + sum };
        }
        running
    };
    (0..a.rows() * b.cols())
        .map(|index| element(index / b.cols(), index % b.cols()))
        .collect()
}

fn product<A: Storage, B: Storage>(a: Matrix<'_, A>, b: Matrix<'_, B>) -> Vec<f32> {
    let mut c = vec![f32::NAN; a.rows() * b.cols()];
    let to = MatrixMut::row_major(&mut c, a.rows(), b.cols());
    gemm(a, b, to, false);
    c
}

/// M, N, K round the edges of panels, blocks and chunks.
const SHAPES: [[usize; 3]; 12] = [
    [1, 1, 1],
    [1, 33, 7],
    [2, 5, 513],
    [4, 16, 8],
    [7, 31, 65],
    [12, 32, 512],
    [13, 33, 511],
    [16, 17, 1024],
    [25, 257, 40],
    [37, 64, 1537],
    [300, 70, 24],
    [515, 48, 9],
];

#[test]
fn elements_are_as_defined_on_every_set_and_in_every_layout() {
    for [m, n, k] in SHAPES {
        let (a, b) = (normal("a", m * k), normal("b", k * n));
        let rows = [k, 1];
        for a in [
            Matrix::new(&a, [m, k], rows),
            Matrix::new(&a, [m, k], [1, m]),
        ] {
            for b in [
                Matrix::new(&b, [k, n], [n, 1]),
                Matrix::new(&b, [k, n], [1, k]),
            ] {
                let expected = bits(&defined(a, b));
                for isa in Isa::available() {
                    let got = bits(&with_isa(isa, || product(a, b)));
                    assert!(
                        got == expected,
                        "{isa:?}, {m}x{n}x{k}, {:?} {:?}",
                        a.strides(),
                        b.strides()
                    );
                }
            }
        }
    }
}

#[test]
fn bf16_operands_count_as_the_f32_values_they_are() {
    for [m, n, k] in SHAPES {
        let a = narrow(&normal("a", m * k));
        let b = narrow(&normal("b", k * n));
        let wide = |x: &[bf16]| -> Vec<f32> { x.iter().map(|x| x.to_f32()).collect() };
        let (wide_a, wide_b) = (wide(&a), wide(&b));
        for [a_strides, b_strides] in [[[k, 1], [1, k]], [[1, m], [n, 1]]] {
            let expected = bits(&product(
                Matrix::new(&wide_a, [m, k], a_strides),
                Matrix::new(&wide_b, [k, n], b_strides),
            ));
            let a = Matrix::new(&a, [m, k], a_strides);
            let b = Matrix::new(&b, [k, n], b_strides);
            let mixed = product(a, Matrix::new(&wide_b, [k, n], b_strides));
            for isa in Isa::available() {
                assert!(
                    bits(&with_isa(isa, || product(a, b))) == expected,
                    "{isa:?}, {m}x{n}x{k}"
                );
            }
            assert!(bits(&mixed) == expected, "mixed, {m}x{n}x{k}");
        }
    }
}

#[test]
fn a_bf16_result_is_rounded_once() {
    for [m, n, k] in SHAPES {
        let (a, b) = (normal("a", m * k), normal("b", k * n));
        let (a, b) = (Matrix::row_major(&a, m, k), Matrix::row_major(&b, k, n));
        let expected = narrow(&product(a, b));
        for isa in Isa::available() {
            let mut c = vec![bf16::NAN; m * n];
            with_isa(isa, || {
                gemm(a, b, MatrixMut::row_major(&mut c, m, n), false)
            });
            assert!(c == expected, "{isa:?}, {m}x{n}x{k}");
        }
    }
}

#[test]
fn accumulating_adds_the_finished_product_once() {
    for [m, n, k] in SHAPES {
        let (a, b, before) = (normal("a", m * k), normal("b", k * n), normal("c", m * n));
        let (a, b) = (Matrix::row_major(&a, m, k), Matrix::row_major(&b, k, n));
        let sum = |(c, ab): (&f32, f32)| c + ab;
        let expected: Vec<f32> = before.iter().zip(product(a, b)).map(sum).collect();
        for isa in Isa::available() {
            let mut c = before.clone();
            with_isa(isa, || gemm(a, b, MatrixMut::row_major(&mut c, m, n), true));
            assert!(bits(&c) == bits(&expected), "{isa:?}, {m}x{n}x{k}");
        }
    }
}

#[test]
fn a_strided_result_is_written_in_its_places_alone() {
    let [m, n, k] = [19, 37, 600];
    let (a, b) = (normal("a", m * k), normal("b", k * n));
    let (a, b) = (Matrix::row_major(&a, m, k), Matrix::row_major(&b, k, n));
    let expected = product(a, b);
    for strides in [[1, m], [2 * n, 2], [n + 3, 1], [3, 3 * m]] {
        for accumulate in [false, true] {
            let mut c = vec![1.0_f32; m * n * 4];
            gemm(a, b, MatrixMut::new(&mut c, [m, n], strides), accumulate);
            for row in 0..m {
                for col in 0..n {
                    let got = std::mem::replace(&mut c[row * strides[0] + col * strides[1]], 1.0);
                    let ab = expected[row * n + col];
                    let expected = if accumulate { 1.0 + ab } else { ab };
                    assert_eq!(got.to_bits(), expected.to_bits());
                }
            }
            assert!(c.iter().all(|&c| c == 1.0), "written beside {strides:?}");
        }
    }
}

#[test]
fn a_row_alone_has_the_bits_it_has_in_any_batch() {
    let [n, k] = [96, 520];
    let (a, w) = (normal("a", 300 * k), normal("w", n * k));
    let w = Matrix::row_major(&w, n, k).transposed();
    let all = bits(&product(Matrix::row_major(&a, 300, k), w));
    for m in 1..=300 {
        let first = (m * 7) % (301 - m);
        let batch = Matrix::row_major(&a[first * k..], m, k);
        let expected = &all[first * n..(first + m) * n];
        assert!(
            bits(&product(batch, w)) == expected,
            "rows {first} to {}",
            first + m
        );
    }
}

#[test]
fn sliced_columns_have_the_bits_of_the_whole() {
    let [m, n, k] = [9, 300, 130];
    let (a, w) = (normal("a", m * k), normal("w", n * k));
    let a = Matrix::row_major(&a, m, k);
    let w = Matrix::row_major(&w, n, k).transposed();
    let all = product(a, w);
    for first in (0..n).step_by(13) {
        for width in [1, 8, 31, 32, 64, 200] {
            let cols = first..(first + width).min(n);
            let got = product(a, w.block(0..k, cols.clone()));
            for (row, got) in got.chunks_exact(cols.len()).enumerate() {
                let expected = &all[row * n..][cols.clone()];
                assert!(bits(got) == bits(expected), "columns {cols:?}");
            }
        }
    }
}

#[test]
fn threads_do_not_show() {
    for [m, n, k] in [
        [700, 96, 600],
        [16, 1000, 300],
        [40, 24, 3000],
        [600, 600, 70],
    ] {
        let (a, w) = (normal("a", m * k), normal("w", n * k));
        let a = Matrix::row_major(&a, m, k);
        let w = Matrix::row_major(&w, n, k).transposed();
        let on = |threads| {
            let pool = ThreadPoolBuilder::new().num_threads(threads).build();
            bits(&pool.expect("a pool").install(|| product(a, w)))
        };
        let alone = on(1);
        assert!(on(2) == alone && on(7) == alone, "{m}x{n}x{k}");
    }
}

#[test]
fn a_packed_operand_gives_the_same_bits_and_can_be_packed_anew() {
    let mut packed = PackedB::default();
    let mut scratch = Scratch::default();
    for [m, n, k] in SHAPES {
        let (a, b) = (normal("a", m * k), normal("b", k * n));
        let a = Matrix::row_major(&a, m, k);
        for strides in [[n, 1], [1, k]] {
            let b = Matrix::new(&b, [k, n], strides);
            packed.pack(b);
            let mut c = vec![f32::NAN; m * n];
            let to = MatrixMut::row_major(&mut c, m, n);
            gemm_packed(&mut scratch, a, &packed, to, false);
            assert!(bits(&c) == bits(&product(a, b)), "{m}x{n}x{k}");
        }
    }
}

#[test]
fn products_are_near_their_f64_value() {
    for [m, n, k] in SHAPES {
        let (a, b) = (normal("a", m * k), normal("b", k * n));
        let got = product(Matrix::row_major(&a, m, k), Matrix::row_major(&b, k, n));
        for (index, &got) in got.iter().enumerate() {
            let (row, col) = (&a[index / n * k..][..k], index % n);
            let term = |k: usize| f64::from(row[k]) * f64::from(b[k * n + col]);
            let exact: f64 = (0..k).map(term).sum();
            let magnitude: f64 = (0..k).map(|k| term(k).abs()).sum();
            // A chain of at most 512 roundings, and one for each further chunk.
            let bound = 515.0 * f64::from(f32::EPSILON) / 2.0 * magnitude;
            let error = (f64::from(got) - exact).abs();
            assert!(error <= bound, "{m}x{n}x{k}: {got}, exactly {exact}");
        }
    }
}

/// candle's fault (huggingface/candle 3894): a packed copy is made and the old buffer is read.
#[test]
fn a_weight_that_is_a_column_slice_is_read_where_it_lies() {
    let buffer: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let w = Matrix::row_major(&buffer, 2, 6).block(0..2, 2..4);
    let x = Matrix::row_major(&[1.0_f32, 10.0], 1, 2);
    assert_eq!(product(x, w.transposed()), [32.0, 98.0]);
    let mut packed = PackedB::default();
    packed.pack(w.transposed());
    let mut y = [0.0_f32; 2];
    let to = MatrixMut::row_major(&mut y, 1, 2);
    gemm_packed(&mut Scratch::default(), x, &packed, to, false);
    assert_eq!(y, [32.0, 98.0]);
}

#[test]
fn empty_extents_are_products_too() {
    let a = [1.0_f32; 6];
    for [m, n] in [[0, 3], [3, 0], [0, 0]] {
        let mut c = vec![1.0_f32; m * n];
        let to = MatrixMut::row_major(&mut c, m, n);
        gemm(
            Matrix::row_major(&a, m, 2),
            Matrix::row_major(&a, 2, n),
            to,
            false,
        );
    }
    let (a, b) = (Matrix::row_major(&a, 3, 0), Matrix::row_major(&a, 0, 2));
    for (accumulate, expected) in [(false, 0.0), (true, 5.0)] {
        let mut c = [5.0_f32; 6];
        gemm(a, b, MatrixMut::row_major(&mut c, 3, 2), accumulate);
        assert_eq!(c, [expected; 6]);
    }
    let mut c = [bf16::ONE; 6];
    gemm(a, b, MatrixMut::row_major(&mut c, 3, 2), false);
    assert_eq!(c, [bf16::ZERO; 6]);
}

#[test]
fn a_nan_stays_in_its_row_and_column() {
    let [m, n, k] = [14, 40, 20];
    let (mut a, mut b) = (vec![1.0_f32; m * k], vec![1.0_f32; k * n]);
    a[13 * k] = f32::NAN;
    b[33] = f32::INFINITY;
    let c = product(Matrix::row_major(&a, m, k), Matrix::row_major(&b, k, n));
    for (index, &c) in c.iter().enumerate() {
        match (index / n, index % n) {
            (13, _) => assert!(c.is_nan()),
            (_, 33) => assert_eq!(c, f32::INFINITY),
            _ => assert_eq!(c, 20.0),
        }
    }
}

#[test]
#[should_panic(expected = "does not give")]
fn shapes_that_do_not_fit_are_refused() {
    let x = [0.0_f32; 6];
    let mut c = [0.0_f32; 4];
    let to = MatrixMut::row_major(&mut c, 2, 2);
    gemm(
        Matrix::row_major(&x, 2, 3),
        Matrix::row_major(&x, 2, 3),
        to,
        false,
    );
}

#[test]
fn tasks_cover_few_rows_by_columns_and_stay_alone_when_small() {
    assert_eq!(task_extents(16, 128, 128, 2), (16, 128));
    assert_eq!(task_extents(512, 128, 128, 2), (256, 128));
    assert_eq!(task_extents(2048, 512, 2048, 2), (512, 256));
    assert_eq!(task_extents(16, 200, 6144, 2), (16, 128));
    assert_eq!(task_extents(2048, 512, 2048, 1), (2048, 512));
    assert_eq!(task_extents(0, 0, 5, 2), (1, 1));
}
