//! Scales, their round numbers and the lines behind a drawing.

use super::Scale;

/// Left and upper edge of the room for the curves.
pub(super) const LEFT: f64 = 46.0;
pub(super) const TOP: f64 = 8.0;

/// Round numbers on either axis, at most about this many.
const TICKS: f64 = 5.0;
const STEP_TICKS: u64 = 7;

/// The vertical axis.
pub(super) struct Axis {
    scale: Scale,
    /// Ends, as logarithms where the scale is logarithmic.
    low: f64,
    high: f64,
    bottom: f64,
    /// Values that get a line and a number.
    ticks: Vec<f64>,
}

impl Axis {
    /// Wide enough for every value that has a place, and ending at round numbers.
    pub(super) fn over(scale: Scale, values: impl Iterator<Item = f64>, bottom: f64) -> Self {
        let placed: Vec<f64> = match scale {
            Scale::Linear => values.filter(|x| x.is_finite()).chain([0.0]).collect(),
            Scale::Log => values
                .filter(|x| x.is_finite() && *x > 0.0)
                .map(f64::log10)
                .collect(),
        };
        let low = placed.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0);
        let high = placed.iter().copied().max_by(f64::total_cmp).unwrap_or(0.0);
        let unit = match scale {
            Scale::Linear => round_unit((high - low) / TICKS),
            Scale::Log => ((high.ceil() - low.floor()) / TICKS).ceil(),
        };
        let unit = if unit > 0.0 { unit } else { 1.0 };
        let (first, mut last) = ((low / unit).floor(), (high / unit).ceil());
        if first == last {
            last += 1.0;
        }
        let count = (last - first) as usize;
        let marks = (0..=count).map(|i| (first + i as f64) * unit);
        let ticks = match scale {
            Scale::Linear => marks.collect(),
            Scale::Log => marks.map(|mark| 10f64.powf(mark)).collect(),
        };
        Axis {
            scale,
            low: first * unit,
            high: last * unit,
            bottom,
            ticks,
        }
    }

    /// Height of a value; none where the scale has no place for it.
    pub(super) fn y(&self, value: f64) -> Option<f64> {
        let x = match self.scale {
            Scale::Linear => value,
            Scale::Log => value.log10(),
        };
        let share = (x - self.low) / (self.high - self.low);
        share
            .is_finite()
            .then_some(self.bottom - share * (self.bottom - TOP))
    }

    /// Lines at the round numbers, with the numbers.
    pub(super) fn grid(&self, right: f64) -> String {
        let line = |&tick: &f64| {
            let y = self.y(tick)?;
            let (x, text) = (LEFT - 6.0, self.number(tick));
            Some(format!(
                "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{right}\"/>\
                 <text x=\"{x}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                y + 3.8
            ))
        };
        self.ticks.iter().filter_map(line).collect()
    }

    fn number(&self, tick: f64) -> String {
        let unit = self.ticks[1] - self.ticks[0];
        if self.scale == Scale::Log {
            match tick.log10().round() {
                0.0 => "1".to_owned(),
                power => format!("1e{power}"),
            }
        } else if tick == 0.0 {
            "0".to_owned()
        } else if (1e-4..1e5).contains(&unit) && tick.abs() < 1e6 {
            let decimals = (-unit.log10().floor()).clamp(0.0, 4.0) as usize;
            format!("{tick:.decimals$}")
        } else {
            format!("{tick:.1e}")
        }
    }
}

/// The least of 1, 2, 5 times a power of ten that is no smaller.
fn round_unit(x: f64) -> f64 {
    let power = 10f64.powf(x.log10().floor());
    let rounds = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power);
    // The last is larger by construction; a power that over- or underflows has no round number.
    rounds.into_iter().find(|round| *round >= x).unwrap_or(0.0)
}

/// Places in `steps` that get a number: round ones, or the first where none is round.
pub(super) fn step_ticks(steps: &[u64]) -> Vec<usize> {
    let count = steps.len() as u64;
    let mut units = (0..19).flat_map(|power| [1, 2, 5].map(|digit| digit * 10u64.pow(power)));
    let unit = units.find(|unit| count / unit < STEP_TICKS).unwrap_or(1);
    let round: Vec<usize> = (0..steps.len())
        .filter(|&i| steps[i].is_multiple_of(unit))
        .collect();
    if round.is_empty() && !steps.is_empty() {
        vec![0]
    } else {
        round
    }
}
