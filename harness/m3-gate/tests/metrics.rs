//! Every metric on numbers worked out by hand, and every way in which there is no number.

use m3_gate::{MeasureError, Metric, Operand, Operands, RatioTerms, Storage, measure};

const EXACT: RatioTerms = RatioTerms {
    floor: 0.0,
    small: false,
};
const SMALL: RatioTerms = RatioTerms {
    floor: 0.0,
    small: true,
};

fn operand<'a>(source: &'a str, shape: &'a [usize], values: &'a [f64]) -> Operand<'a> {
    Operand {
        source,
        buffer: None,
        shape,
        values,
    }
}

fn pair<'a>(
    storage: Storage,
    shape: &'a [usize],
    got: &'a [f64],
    reference: &'a [f64],
) -> Operands<'a> {
    Operands {
        got: Some(operand("subject", shape, got)),
        reference: Some(operand("reference", shape, reference)),
        twin: None,
        storage,
    }
}

/// A copy at an address of its own: the compiler may lay equal constants on one another.
fn apart(values: &[f64]) -> Vec<f64> {
    values.to_vec()
}

fn f32_metric(metric: Metric, got: &[f64], reference: &[f64]) -> Result<f64, MeasureError> {
    let reference = apart(reference);
    measure(
        metric,
        &pair(Storage::F32, &[got.len()], got, &reference),
        EXACT,
    )
}

fn ratio(
    metric: Metric,
    terms: RatioTerms,
    (got, reference, twin): (&[f64], &[f64], &[f64]),
) -> Result<f64, MeasureError> {
    let shape = [got.len()];
    let (reference, twin) = (apart(reference), apart(twin));
    let mut operands = pair(Storage::Bf16, &shape, got, &reference);
    operands.twin = Some(operand("twin", &shape, &twin));
    measure(metric, &operands, terms)
}

#[test]
fn max_abs_is_the_largest_difference() {
    assert_eq!(
        f32_metric(Metric::MaxAbs, &[1.0, -2.5, 0.0], &[1.25, -2.0, 0.0]),
        Ok(0.5)
    );
}

#[test]
fn max_rel_divides_by_the_reference() {
    assert_eq!(
        f32_metric(Metric::MaxRel, &[1.5, 100.0, 0.0], &[1.0, 101.0, 0.0]),
        Ok(0.5)
    );
    let zero = f32_metric(Metric::MaxRel, &[1.0, 0.5], &[1.0, 0.0]);
    assert_eq!(
        zero,
        Err(MeasureError::ZeroReference {
            metric: "max_rel",
            first: 1,
            got: 0.5
        })
    );
}

#[test]
fn max_ulp_counts_steps_of_the_storage_type() {
    let step = 2f64.powi(-7);
    let bf16 = |got: &[f64], reference: &[f64]| {
        measure(
            Metric::MaxUlp,
            &pair(Storage::Bf16, &[got.len()], got, reference),
            EXACT,
        )
    };
    assert_eq!(bf16(&[1.0 + 3.0 * step, -1.0], &[1.0, -1.0]), Ok(3.0));
    assert_eq!(
        f32_metric(Metric::MaxUlp, &[1.0 + step], &[1.0]),
        Ok(65536.0)
    );
}

#[test]
fn a_correct_rounding_of_a_large_value_is_zero_ulp_and_a_half_of_a_small_one_is_many() {
    let bf16 = |got: f64, reference: f64| {
        measure(
            Metric::MaxUlp,
            &pair(Storage::Bf16, &[1], &[got], &[reference]),
            EXACT,
        )
    };
    assert_eq!(bf16(16.0, 16.0625), Ok(0.0));
    assert!(bf16(0.15, 0.1).unwrap() > 70.0);
}

#[test]
fn norm_rel_is_the_ratio_of_norms() {
    assert_eq!(
        f32_metric(Metric::NormRel, &[3.0, 4.5], &[3.0, 4.0]),
        Ok(0.1)
    );
    assert_eq!(
        f32_metric(Metric::NormRel, &[0.0, -0.0], &[0.0, 0.0]),
        Ok(0.0)
    );
    let zero = f32_metric(Metric::NormRel, &[0.0, 1e-9], &[0.0, 0.0]);
    assert_eq!(
        zero,
        Err(MeasureError::ZeroReference {
            metric: "norm_rel",
            first: 1,
            got: 1e-9
        })
    );
}

#[test]
fn a_floor_opens_a_relative_metric_at_zero() {
    let floor = RatioTerms {
        floor: 0.5,
        small: false,
    };
    let shape = [2];
    let (got, reference) = ([0.25, -0.25], [0.0, 0.0]);
    let zeros = pair(Storage::F32, &shape, &got, &reference);
    assert_eq!(measure(Metric::NormRel, &zeros, floor), Ok(0.5));
    assert_eq!(measure(Metric::MaxRel, &zeros, floor), Ok(0.5));
    let ones = pair(Storage::F32, &shape, &[1.75, 1.0], &[1.0, 1.0]);
    assert_eq!(measure(Metric::MaxRel, &ones, floor), Ok(0.5));
}

#[test]
fn norms_neither_vanish_nor_overflow() {
    for scale in [1e-200, 1e200] {
        let (got, reference) = ([3.0 * scale, 4.5 * scale], [3.0 * scale, 4.0 * scale]);
        let value = f32_metric(Metric::NormRel, &got, &reference).unwrap();
        assert!((value - 0.1).abs() < 1e-15, "{value}");
    }
}

#[test]
fn cosine_gap_sees_direction_and_not_length() {
    let near = |metric: Result<f64, MeasureError>, expected: f64| {
        let value = metric.unwrap();
        assert!((value - expected).abs() <= 1e-15, "{value} {expected}");
    };
    near(f32_metric(Metric::CosineGap, &[2.0, 0.0], &[1.0, 0.0]), 0.0);
    near(f32_metric(Metric::CosineGap, &[0.0, 1.0], &[1.0, 0.0]), 1.0);
    near(
        f32_metric(Metric::CosineGap, &[-1.0, 0.0], &[1.0, 0.0]),
        2.0,
    );
    near(f32_metric(Metric::CosineGap, &[0.0, 0.0], &[0.0, 0.0]), 0.0);
    near(f32_metric(Metric::CosineGap, &[0.0, 0.0], &[1.0, 0.0]), 1.0);
    // 1 - dot/(norms) in f64 would say 0 here.
    let tilt = f32_metric(Metric::CosineGap, &[1.0, 1e-9], &[1.0, 0.0]).unwrap();
    assert!((tilt / 5e-19 - 1.0).abs() < 1e-6, "{tilt}");
}

#[test]
fn ratios_are_to_the_error_of_the_twin() {
    let (got, reference, twin) = (
        [1.0, 2.0, 3.0, 4.5],
        [1.0, 2.0, 3.0, 4.0],
        [1.25, 2.0, 3.0, 4.0],
    );
    let all: (&[f64], &[f64], &[f64]) = (&got, &reference, &twin);
    assert_eq!(ratio(Metric::ErrRatio, SMALL, all), Ok(2.0));
    assert_eq!(ratio(Metric::RmsRatio, SMALL, all), Ok(2.0));
    let floor = RatioTerms {
        floor: 0.25,
        small: true,
    };
    assert_eq!(ratio(Metric::ErrRatio, floor, all), Ok(1.0));
}

#[test]
fn an_exact_twin_is_no_scale() {
    let all: (&[f64], &[f64], &[f64]) = (&[1.0, 2.0], &[1.0, 2.0], &[1.0, 2.0]);
    let refused = ratio(Metric::ErrRatio, SMALL, all);
    assert_eq!(
        refused,
        Err(MeasureError::ZeroTwin {
            metric: "err_ratio"
        })
    );
    let floor = RatioTerms {
        floor: 1e-6,
        small: true,
    };
    assert_eq!(ratio(Metric::RmsRatio, floor, all), Ok(0.0));
}

#[test]
fn a_ratio_needs_4096_elements_or_a_reason() {
    let of = |n: usize, terms| {
        let (got, reference, twin) = (vec![1.5; n], vec![1.0; n], vec![1.25; n]);
        ratio(Metric::RmsRatio, terms, (&got, &reference, &twin))
    };
    assert_eq!(of(4096, EXACT), Ok(2.0));
    assert_eq!(of(4095, SMALL), Ok(2.0));
    let refused = of(4095, EXACT);
    assert_eq!(
        refused,
        Err(MeasureError::TooFew {
            metric: "rms_ratio",
            got: 4095,
            min: 4096
        })
    );
}

#[test]
fn mismatches_are_counted_against_the_rounded_reference() {
    let ids = pair(
        Storage::I32,
        &[4],
        &[0.0, 3.0, 5.0, -1.0],
        &[0.0, 2.0, 5.0, 7.0],
    );
    assert_eq!(measure(Metric::MismatchCount, &ids, EXACT), Ok(2.0));
    let rounded = pair(Storage::Bf16, &[2], &[16.0, -0.0], &[16.0625, 0.0]);
    assert_eq!(measure(Metric::MismatchCount, &rounded, EXACT), Ok(0.0));
}

#[test]
fn agree_rate_counts_whole_rows() {
    let got = [0.0, 3.0, 1.0, 2.0, 0.0, -1.0, 4.0, 5.0];
    let reference = [0.0, 3.0, 1.0, 3.0, 0.0, -1.0, 4.0, 5.0];
    let rows = pair(Storage::I32, &[2, 2, 2], &got, &reference);
    assert_eq!(measure(Metric::AgreeRate, &rows, EXACT), Ok(0.75));
    let elements = pair(Storage::I32, &[8], &got, &reference);
    assert_eq!(measure(Metric::AgreeRate, &elements, EXACT), Ok(0.875));
}

#[test]
fn bitwise_tells_signed_zeros_apart() {
    assert_eq!(
        f32_metric(Metric::Bitwise, &[0.0, 1.0], &[-0.0, 1.0]),
        Ok(1.0)
    );
    assert_eq!(
        f32_metric(Metric::MismatchCount, &[0.0, 1.0], &[-0.0, 1.0]),
        Ok(0.0)
    );
}

#[test]
fn finite_match_counts_positions_of_another_class() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let value = f32_metric(
        Metric::FiniteMatch,
        &[1.0, nan, inf, -inf],
        &[2.0, nan, -inf, 0.0],
    );
    assert_eq!(value, Ok(2.0));
}

#[test]
fn matching_infinities_are_left_out_of_every_difference() {
    let (got, reference) = ([f64::NEG_INFINITY, 1.5], [f64::NEG_INFINITY, 1.0]);
    for metric in [Metric::MaxAbs, Metric::MaxRel, Metric::NormRel] {
        assert_eq!(f32_metric(metric, &got, &reference), Ok(0.5), "{metric:?}");
    }
    let nothing = f32_metric(Metric::MaxAbs, &[f64::INFINITY], &[f64::INFINITY]);
    assert_eq!(nothing, Err(MeasureError::NoFinite { metric: "max_abs" }));
}

#[test]
fn infinity_never_equals_a_finite_value() {
    let (inf, largest) = (f64::INFINITY, f64::from(f32::MAX));
    for metric in tensor_metrics().filter(|&m| m != Metric::FiniteMatch) {
        for (got, reference) in [(inf, 1.0), (largest, inf), (-inf, inf)] {
            let refused = with_twin(metric, &[got, 1.0], &[reference, 1.0]);
            assert!(
                matches!(refused, Err(MeasureError::InfMask { first: 0, .. })),
                "{refused:?}"
            );
        }
    }
    assert_eq!(f32_metric(Metric::MaxUlp, &[inf], &[inf]), Ok(0.0));
}

#[test]
fn a_nan_is_refused_by_every_metric_wherever_it_stands() {
    for metric in tensor_metrics().filter(|&m| m != Metric::FiniteMatch) {
        for (got, reference) in [(f64::NAN, 1.0), (1.0, f64::NAN), (f64::NAN, f64::NAN)] {
            let refused = with_twin(metric, &[1.0, got], &[1.0, reference]);
            assert!(
                matches!(refused, Err(MeasureError::Nan { first: 1, .. })),
                "{refused:?}"
            );
        }
    }
    let twin = ratio(Metric::ErrRatio, SMALL, (&[1.0], &[1.0], &[f64::NAN]));
    assert_eq!(
        twin,
        Err(MeasureError::Nan {
            operand: "twin",
            count: 1,
            first: 0
        })
    );
}

#[test]
fn an_empty_tensor_is_refused_by_every_metric() {
    for metric in tensor_metrics() {
        let refused = with_twin(metric, &[], &[]);
        assert_eq!(
            refused,
            Err(MeasureError::Empty {
                operand: "reference",
                shape: vec![0]
            })
        );
    }
}

#[test]
fn a_missing_operand_is_refused_by_name() {
    let full = pair(Storage::F32, &[1], &[1.0], &[1.0]);
    for (operands, operand) in [
        (Operands { got: None, ..full }, "got"),
        (
            Operands {
                reference: None,
                ..full
            },
            "reference",
        ),
        (full, "twin"),
    ] {
        let refused = measure(Metric::RmsRatio, &operands, SMALL);
        assert_eq!(
            refused,
            Err(MeasureError::Missing {
                operand,
                metric: "rms_ratio"
            })
        );
    }
}

#[test]
fn an_aliased_pair_is_refused_and_equal_values_are_not() {
    let (a, b) = (apart(&[1.0, 2.0]), apart(&[1.0, 2.0]));
    let shape = [2];
    let refused = |got: Operand<'_>, reference: Operand<'_>| {
        let (got, reference) = (Some(got), Some(reference));
        let operands = Operands {
            got,
            reference,
            twin: None,
            storage: Storage::F32,
        };
        measure(Metric::MaxAbs, &operands, EXACT).map_err(|e| e.to_string())
    };
    let got = operand("subject", &shape, &a);
    assert_eq!(refused(got, operand("reference", &shape, &b)), Ok(0.0));
    assert_eq!(
        refused(got, operand("subject", &shape, &b)),
        Err(
            "got and reference are one and the same source (subject): a tensor agrees with itself"
                .into()
        )
    );
    assert_eq!(
        refused(got, operand("reference", &shape, &a)),
        Err("got and reference are one and the same memory: a tensor agrees with itself".into())
    );
    let one = Operand {
        buffer: Some(7),
        ..got
    };
    let two = Operand {
        buffer: Some(7),
        ..operand("reference", &shape, &b)
    };
    assert_eq!(
        refused(one, two),
        Err("got and reference are one and the same buffer: a tensor agrees with itself".into())
    );
}

#[test]
fn a_twin_that_is_the_reference_is_refused() {
    let values = [1.0, 2.0];
    let shape = [2];
    let mut operands = pair(Storage::F32, &shape, &[1.0, 2.5], &values);
    operands.twin = Some(operand("twin", &shape, &values));
    let refused = measure(Metric::ErrRatio, &operands, SMALL);
    let what = "memory".to_owned();
    assert_eq!(
        refused,
        Err(MeasureError::Aliased {
            first: "reference",
            second: "twin",
            what
        })
    );
}

#[test]
fn a_short_output_is_refused_before_any_value_is_read() {
    let reference = operand("reference", &[4], &[1.0, 2.0, 3.0, f64::NAN]);
    let with = |shape, values| Operands {
        got: Some(operand("subject", shape, values)),
        reference: Some(reference),
        twin: None,
        storage: Storage::F32,
    };
    let short = measure(Metric::MaxAbs, &with(&[3], &[1.0, 2.0, 3.0]), EXACT).unwrap_err();
    assert_eq!(short.to_string(), "got has shape [3], reference has [4]");
    let lying = measure(Metric::MaxAbs, &with(&[4], &[1.0, 2.0, 3.0]), EXACT).unwrap_err();
    assert_eq!(
        lying.to_string(),
        "got holds 3 elements, its shape [4] needs 4"
    );
    let turned = measure(Metric::MaxAbs, &with(&[2, 2], &[1.0; 4]), EXACT).unwrap_err();
    assert_eq!(
        turned.to_string(),
        "got has shape [2, 2], reference has [4]"
    );
}

#[test]
fn a_value_gate_has_no_tensors_to_measure() {
    let refused = f32_metric(Metric::Value, &[1.0], &[1.0]);
    assert_eq!(
        refused,
        Err(MeasureError::Missing {
            operand: "value",
            metric: "value"
        })
    );
}

fn tensor_metrics() -> impl Iterator<Item = Metric> {
    Metric::ALL.into_iter().filter(|&m| m != Metric::Value)
}

fn with_twin(metric: Metric, got: &[f64], reference: &[f64]) -> Result<f64, MeasureError> {
    ratio(metric, SMALL, (got, reference, &vec![1.0; got.len()]))
}
