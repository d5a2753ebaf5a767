//! What a step is measured by, from the samples and the trainer's report.

use std::collections::BTreeMap;

use m3_trainer::{Sample, StepReport};
use serde_json::{Map, Value};

/// Differences between the log-probs of trainer and engine at the sampled tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gap {
    /// Mean of |trainer − engine|.
    pub mean: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Largest.
    pub max: f64,
    /// Mean of e^x − 1 − x with x = trainer − engine: an estimate of KL(engine ‖ trainer).
    pub k3: f64,
}

impl Gap {
    /// Over every response token; both sides were recorded on their own. NaN, which no gate passes, when a sample lacks a
    /// value on one side or there is none at all.
    pub fn new(samples: &[Sample], report: &StepReport) -> Self {
        let paired = samples.len() == report.log_probs.len()
            && samples
                .iter()
                .zip(&report.log_probs)
                .all(|(s, t)| s.rollout_log_probs.len() == t.len());
        let engine = samples.iter().flat_map(|sample| &sample.rollout_log_probs);
        let trainer = report.log_probs.iter().flatten();
        let differences: Vec<f64> = trainer
            .zip(engine)
            .map(|(&t, &e)| f64::from(t) - f64::from(e))
            .collect();
        if !paired || differences.is_empty() {
            let nan = f64::NAN;
            return Gap {
                mean: nan,
                p999: nan,
                max: nan,
                k3: nan,
            };
        }
        let mut sizes: Vec<f64> = differences.iter().map(|x| x.abs()).collect();
        sizes.sort_by(f64::total_cmp);
        Gap {
            mean: mean(sizes.iter().copied()),
            p999: quantile(&sizes, 0.999),
            max: quantile(&sizes, 1.0),
            k3: mean(differences.iter().map(|x| x.exp_m1() - x)),
        }
    }
}

/// The value below which a share of the ascending values lies; NaN sorts last and shows at the top, and is the quantile
/// of nothing.
fn quantile(ascending: &[f64], share: f64) -> f64 {
    let rank = (share * ascending.len() as f64).ceil() as usize;
    ascending
        .get(rank.saturating_sub(1))
        .copied()
        .unwrap_or(f64::NAN)
}

/// One line of `metrics.jsonl`: a flat object, in the order of insertion.
#[derive(Clone, Debug, Default)]
pub struct Line(Map<String, Value>);

impl Line {
    /// Adds a number. A number that is not finite is written as its name, since JSON has none.
    pub fn put(&mut self, name: &str, value: f64) {
        let number = serde_json::Number::from_f64(value);
        let value = number.map_or_else(|| Value::String(value.to_string()), Value::Number);
        self.0.insert(name.into(), value);
    }

    /// A number of the line.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.0.get(name).and_then(Value::as_f64)
    }

    /// Every number of the line; what is not finite stays what it is.
    pub fn values(&self) -> BTreeMap<String, f64> {
        let number = |value: &Value| match value {
            Value::String(text) => text.parse().ok(),
            value => value.as_f64(),
        };
        let pairs = self.0.iter();
        pairs
            .filter_map(|(name, value)| Some((name.clone(), number(value)?)))
            .collect()
    }

    /// The line, without its end.
    pub fn text(&self) -> String {
        Value::Object(self.0.clone()).to_string()
    }
}

/// Mean of values; NaN of none.
pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, count) = values
        .into_iter()
        .fold((0.0, 0u32), |(sum, count), x| (sum + x, count + 1));
    sum / f64::from(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_log_probs_leave_no_gap_and_a_shift_shows_in_all() {
        let sample = |log_probs: &[f32]| Sample {
            group: 0,
            tokens: vec![0; log_probs.len() + 1],
            prompt_len: 1,
            loss_mask: vec![true; log_probs.len()],
            rollout_log_probs: log_probs.to_vec(),
            reward: None,
            weight_version: 1,
        };
        let report = StepReport {
            log_probs: vec![vec![-1.0, -2.0]],
            ..StepReport::default()
        };
        assert_eq!(Gap::new(&[sample(&[-1.0, -2.0])], &report), Gap::default());
        for missing in [
            &[sample(&[-1.0])][..],
            &[],
            &[sample(&[-1.0, -2.0]), sample(&[-1.0])],
        ] {
            assert!(Gap::new(missing, &report).mean.is_nan());
        }
        let gap = Gap::new(&[sample(&[-1.0, -2.5])], &report);
        assert_eq!((gap.mean, gap.max), (0.25, 0.5));
        assert!((gap.k3 - 0.5 * (0.5f64.exp() - 1.5)).abs() < 1e-12);
    }
}
