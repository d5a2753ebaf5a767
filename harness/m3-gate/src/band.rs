//! Bands: a value must stay within a two-sided interval round trusted history.
//!
//! The width comes from the history and the gate alone, never from the value that is judged.

use crate::gate::Op;
use crate::metrics::largest;
use crate::source::Source;
use crate::verdict::Severity;

/// The `band` table of a gate. Half the width is max(rel · |median|, floor).
#[derive(Debug, Clone, PartialEq)]
pub struct Band {
    /// Relative half-width.
    pub rel: f64,
    /// Absolute half-width below which the band never shrinks.
    pub floor: f64,
    /// Trusted values needed before the band says anything.
    pub history_min: usize,
    /// Weight of the verdict; a new band starts in shadow.
    pub severity: Severity,
    /// Where the width comes from.
    pub source: Source,
}

/// What a band says about a value.
#[derive(Debug, Clone, PartialEq)]
pub enum BandVerdict {
    /// The value stands inside.
    Inside([f64; 2]),
    /// The value stands outside.
    Outside([f64; 2]),
    /// History cannot judge yet, and why.
    Inactive(String),
    /// A value or the history is not finite.
    Error(String),
}

/// Judges `value` against the trusted values of its series, oldest first or in any other order.
pub fn judge_band(band: &Band, value: f64, history: &[f64]) -> BandVerdict {
    if !value.is_finite() {
        return BandVerdict::Error(format!("the value is {value}"));
    }
    if let Some(bad) = history.iter().find(|x| !x.is_finite()) {
        return BandVerdict::Error(format!("trusted history holds {bad}"));
    }
    let (have, need) = (history.len(), band.history_min.max(1));
    if have < need {
        return BandVerdict::Inactive(format!("{have} of {need} trusted values"));
    }
    let mut sorted = history.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = 0.5 * (sorted[(have - 1) / 2] + sorted[have / 2]);
    let half = largest([band.rel * middle.abs(), band.floor].into_iter());
    let spread = sorted[have - 1] - sorted[0];
    if !Op::Le.holds(spread, 2.0 * half) {
        return BandVerdict::Inactive(format!(
            "no verdict, baseline too noisy: it spreads {spread:.4}, the band is {:.4} wide",
            2.0 * half
        ));
    }
    let range = [middle - half, middle + half];
    if range[0] <= value && value <= range[1] {
        BandVerdict::Inside(range)
    } else {
        BandVerdict::Outside(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn band(rel: f64, floor: f64, history_min: usize) -> Band {
        let source = Source::Analytic {
            why: "test".to_owned(),
        };
        Band {
            rel,
            floor,
            history_min,
            severity: Severity::Shadow,
            source,
        }
    }

    #[test]
    fn a_band_is_two_sided_round_the_median() {
        let history = [1.0, 1.02, 0.98, 1.01];
        let judge = |value| judge_band(&band(0.05, 0.0, 3), value, &history);
        let (low, high) = (1.005 - 0.05 * 1.005, 1.005 + 0.05 * 1.005);
        assert_eq!(judge(1.0), BandVerdict::Inside([low, high]));
        assert_eq!(judge(low), BandVerdict::Inside([low, high]));
        assert!(matches!(judge(1.06), BandVerdict::Outside(_)));
        assert!(matches!(judge(0.95), BandVerdict::Outside(_)));
    }

    #[test]
    fn the_floor_keeps_a_band_round_zero_open() {
        let judge = |value| judge_band(&band(0.1, 1e-3, 1), value, &[0.0, 0.0]);
        assert_eq!(judge(9e-4), BandVerdict::Inside([-1e-3, 1e-3]));
        assert!(matches!(judge(-2e-3), BandVerdict::Outside(_)));
    }

    #[test]
    fn too_little_history_is_inactive() {
        let verdict = judge_band(&band(0.1, 0.0, 3), 1.0, &[1.0]);
        assert_eq!(
            verdict,
            BandVerdict::Inactive("1 of 3 trusted values".to_owned())
        );
        assert!(matches!(
            judge_band(&band(0.1, 0.0, 0), 1.0, &[]),
            BandVerdict::Inactive(_)
        ));
    }

    #[test]
    fn a_baseline_noisier_than_the_band_gives_no_verdict() {
        // Nightly times in seconds with a spread of 65.8 % of the median.
        let verdict = judge_band(&band(0.05, 0.0, 3), 158.4, &[168.2, 297.5, 196.6]);
        let BandVerdict::Inactive(why) = verdict else {
            panic!("{verdict:?}")
        };
        assert!(why.starts_with("no verdict, baseline too noisy"), "{why}");
    }

    #[test]
    fn nan_is_an_error_on_either_side() {
        assert!(matches!(
            judge_band(&band(0.1, 0.0, 1), f64::NAN, &[1.0]),
            BandVerdict::Error(_)
        ));
        assert!(matches!(
            judge_band(&band(0.1, 0.0, 1), 1.0, &[f64::NAN]),
            BandVerdict::Error(_)
        ));
    }
}
