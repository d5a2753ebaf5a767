//! The metrics: one number for a pair (or triple) of tensors.
//!
//! Below, d = got − ref, e = twin − ref, and sums and maxima run over the elements that are finite;
//! the non-finite ones have been shown to match before. `f64::max` is not used: it drops NaN.

use crate::operand::{Checked, Class, MeasureError, Operands};
use serde::{Deserialize, Serialize};

/// Elements below which a ratio to the twin's error is refused.
///
/// Both errors are samples of the same rounding noise; with n elements the ratio of their maxima
/// and of their rms scatters by about 1/√n, 1.6 % at 4,096, against bounds of 1.6x and 2x.
pub const RATIO_ELEMENTS_MIN: usize = 4096;

/// What a gate measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// max |d|.
    MaxAbs,
    /// max |d| / (|ref| + floor); without a floor a zero reference must be met by a zero.
    MaxRel,
    /// Largest distance in representable values of the storage type, reference rounded once.
    MaxUlp,
    /// rms(d) / (rms(e) + floor).
    RmsRatio,
    /// max |d| / (max |e| + floor).
    ErrRatio,
    /// ‖d‖ / ‖ref‖, that is rms(d) / (rms(ref) + floor); two zero tensors give 0.
    NormRel,
    /// 1 − cos(got, ref); two zero tensors give 0, one of two gives 1.
    CosineGap,
    /// Elements whose value differs from the reference rounded once to the storage type.
    MismatchCount,
    /// Share of rows (last axis; elements when there is one axis) that agree in every element.
    AgreeRate,
    /// Elements whose bits differ; +0 and −0 differ, the reference is taken as it is.
    Bitwise,
    /// Elements whose class (finite, NaN, +Inf, −Inf) differs. The one metric for which a NaN may
    /// stand in the reference.
    FiniteMatch,
    /// A number that the caller measured: the gates of a training run.
    Value,
}

impl Metric {
    /// Every metric, in the order of the documentation.
    pub const ALL: [Metric; 12] = [
        Metric::MaxAbs,
        Metric::MaxRel,
        Metric::MaxUlp,
        Metric::RmsRatio,
        Metric::ErrRatio,
        Metric::NormRel,
        Metric::CosineGap,
        Metric::MismatchCount,
        Metric::AgreeRate,
        Metric::Bitwise,
        Metric::FiniteMatch,
        Metric::Value,
    ];

    /// Name in gate files and records.
    pub fn name(self) -> &'static str {
        match self {
            Metric::MaxAbs => "max_abs",
            Metric::MaxRel => "max_rel",
            Metric::MaxUlp => "max_ulp",
            Metric::RmsRatio => "rms_ratio",
            Metric::ErrRatio => "err_ratio",
            Metric::NormRel => "norm_rel",
            Metric::CosineGap => "cosine_gap",
            Metric::MismatchCount => "mismatch_count",
            Metric::AgreeRate => "agree_rate",
            Metric::Bitwise => "bitwise",
            Metric::FiniteMatch => "finite_match",
            Metric::Value => "value",
        }
    }

    /// True for the metrics that divide and so take a floor: what is granted where the divisor is 0.
    pub fn takes_floor(self) -> bool {
        self.needs_twin() || matches!(self, Metric::MaxRel | Metric::NormRel)
    }

    /// True for the ratios to the twin's error.
    pub fn needs_twin(self) -> bool {
        matches!(self, Metric::RmsRatio | Metric::ErrRatio)
    }
}

/// What a gate adds to a metric that divides.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RatioTerms {
    /// Added to the divisor: the error that is granted, by the bound's measure, where the twin
    /// happens to be exact or the reference is zero.
    pub floor: f64,
    /// The gate says why fewer than [`RATIO_ELEMENTS_MIN`] elements are enough.
    pub small: bool,
}

/// Measures `metric` on `operands`.
///
/// # Errors
/// A [`MeasureError`] when there is no finite number: missing, aliased, empty or misshapen
/// operands, a NaN, infinities in different places, a ratio without a scale. The caller's verdict
/// is then ERROR.
pub fn measure(
    metric: Metric,
    operands: &Operands<'_>,
    terms: RatioTerms,
) -> Result<f64, MeasureError> {
    let pair = operands.check(metric)?;
    let value = match metric {
        Metric::MaxAbs => largest(finite_pairs(metric, &pair)?.map(|(g, r)| (g - r).abs())),
        Metric::MaxRel => max_rel(&pair, terms.floor)?,
        Metric::MaxUlp => max_ulp(&pair),
        Metric::RmsRatio | Metric::ErrRatio => ratio(metric, &pair, terms)?,
        Metric::NormRel => norm_rel(&pair, terms.floor)?,
        Metric::CosineGap => cosine_gap(&pair)?,
        Metric::MismatchCount => count(&pair, |p, i| !same_value(p, i)),
        Metric::AgreeRate => agree_rate(&pair),
        Metric::Bitwise => count(&pair, |p, i| {
            p.got.values[i].to_bits() != p.reference.values[i].to_bits()
        }),
        Metric::FiniteMatch => count(&pair, |p, i| {
            Class::of(p.got.values[i]) != Class::of(p.reference.values[i])
        }),
        Metric::Value => {
            return Err(MeasureError::Missing {
                operand: "value",
                metric: metric.name(),
            });
        }
    };
    if value.is_finite() {
        Ok(value)
    } else {
        Err(MeasureError::NotFinite {
            metric: metric.name(),
            value,
        })
    }
}

/// Largest of non-NaN values; NaN wins, so that it cannot be dropped.
pub(crate) fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |top, x| if x <= top { top } else { x })
}

/// Root of the mean square, scaled by the largest value so that squares neither vanish nor overflow.
pub(crate) fn rms(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let scale = largest(values.clone().map(f64::abs));
    if scale == 0.0 || !scale.is_finite() {
        return scale;
    }
    let (sum, n) = values.fold((0.0, 0usize), |(s, n), x| {
        (s + (x / scale) * (x / scale), n + 1)
    });
    scale * (sum / n as f64).sqrt()
}

fn finite_pairs<'a>(
    metric: Metric,
    pair: &Checked<'a>,
) -> Result<impl Iterator<Item = (f64, f64)> + Clone + use<'a>, MeasureError> {
    let values = pair
        .got
        .values
        .iter()
        .copied()
        .zip(pair.reference.values.iter().copied());
    let finite = values.filter(|(_, r)| r.is_finite());
    match finite.clone().next() {
        Some(_) => Ok(finite),
        None => Err(MeasureError::NoFinite {
            metric: metric.name(),
        }),
    }
}

fn max_rel(pair: &Checked<'_>, floor: f64) -> Result<f64, MeasureError> {
    let name = Metric::MaxRel.name();
    let (got, reference) = (pair.got.values, pair.reference.values);
    let undefined = |i: &usize| reference[*i] == 0.0 && got[*i] != 0.0;
    if let Some(first) = (0..got.len()).find(undefined).filter(|_| floor == 0.0) {
        let got = got[first];
        return Err(MeasureError::ZeroReference {
            metric: name,
            first,
            got,
        });
    }
    let pairs = finite_pairs(Metric::MaxRel, pair)?;
    Ok(largest(pairs.map(|(g, r)| relative_error(g, r, floor))))
}

/// |got − ref| / (|ref| + floor), 0 where both are the same.
pub(crate) fn relative_error(got: f64, reference: f64, floor: f64) -> f64 {
    if got == reference {
        0.0
    } else {
        (got - reference).abs() / (reference.abs() + floor)
    }
}

fn max_ulp(pair: &Checked<'_>) -> f64 {
    let distances = pair.got.values.iter().zip(pair.reference.values);
    distances
        .map(|(&g, &r)| pair.storage.ulp_distance(g, r))
        .max()
        .unwrap_or(0) as f64
}

fn ratio(metric: Metric, pair: &Checked<'_>, terms: RatioTerms) -> Result<f64, MeasureError> {
    let errors = finite_pairs(metric, pair)?.map(|(g, r)| g - r);
    let elements = errors.clone().count();
    if elements < RATIO_ELEMENTS_MIN && !terms.small {
        return Err(MeasureError::TooFew {
            metric: metric.name(),
            got: elements,
            min: RATIO_ELEMENTS_MIN,
        });
    }
    let scale = twin_error(metric, pair) + terms.floor;
    if scale == 0.0 {
        return Err(MeasureError::ZeroTwin {
            metric: metric.name(),
        });
    }
    let error = match metric {
        Metric::RmsRatio => rms(errors),
        _ => largest(errors.map(f64::abs)),
    };
    Ok(error / scale)
}

/// rms(e) or max |e|; 0 without a twin.
pub(crate) fn twin_error(metric: Metric, pair: &Checked<'_>) -> f64 {
    let Some(twin) = pair.twin else { return 0.0 };
    let errors = twin.values.iter().zip(pair.reference.values);
    let errors = errors.filter(|(_, r)| r.is_finite()).map(|(t, r)| t - r);
    match metric {
        Metric::RmsRatio => rms(errors),
        _ => largest(errors.map(f64::abs)),
    }
}

fn norm_rel(pair: &Checked<'_>, floor: f64) -> Result<f64, MeasureError> {
    let pairs = finite_pairs(Metric::NormRel, pair)?;
    let scale = rms(pairs.clone().map(|(_, r)| r)) + floor;
    let error = rms(pairs.map(|(g, r)| g - r));
    if error == 0.0 {
        return Ok(0.0);
    }
    if scale == 0.0 {
        let first = pair.got.values.iter().position(|&g| g != 0.0).unwrap_or(0);
        let got = pair.got.values[first];
        return Err(MeasureError::ZeroReference {
            metric: Metric::NormRel.name(),
            first,
            got,
        });
    }
    Ok(error / scale)
}

/// Half the squared distance of the unit vectors: 1 − cos without the cancellation.
fn cosine_gap(pair: &Checked<'_>) -> Result<f64, MeasureError> {
    let pairs = finite_pairs(Metric::CosineGap, pair)?;
    let got = rms(pairs.clone().map(|(g, _)| g));
    let reference = rms(pairs.clone().map(|(_, r)| r));
    if got == 0.0 || reference == 0.0 {
        return Ok(if got == reference { 0.0 } else { 1.0 });
    }
    let (sum, n) = pairs.fold((0.0, 0usize), |(sum, n), (g, r)| {
        let gap = g / got - r / reference;
        (sum + gap * gap, n + 1)
    });
    Ok(0.5 * sum / n as f64)
}

/// True when the subject's value is the reference rounded once to the storage type.
pub(crate) fn same_value(pair: &Checked<'_>, i: usize) -> bool {
    pair.got.values[i] == pair.storage.round(pair.reference.values[i])
}

fn count(pair: &Checked<'_>, differs: impl Fn(&Checked<'_>, usize) -> bool) -> f64 {
    (0..pair.got.values.len())
        .filter(|&i| differs(pair, i))
        .count() as f64
}

/// Elements of a row: the last axis, or one element when there is one axis.
pub(crate) fn row_len(shape: &[usize]) -> usize {
    if shape.len() < 2 {
        1
    } else {
        shape[shape.len() - 1]
    }
}

fn agree_rate(pair: &Checked<'_>) -> f64 {
    let row = row_len(pair.got.shape);
    let rows = pair.got.values.len() / row;
    let agrees = |r: &usize| (r * row..(r + 1) * row).all(|i| same_value(pair, i));
    (0..rows).filter(agrees).count() as f64 / rows as f64
}
