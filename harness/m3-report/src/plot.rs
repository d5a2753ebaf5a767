//! Inline SVG: curves and stacked columns over the steps of a run, and the ulp histogram.
//!
//! What cannot be drawn is never drawn as something else: it leaves a marked gap, and the words
//! below the plot say what it was and where.

mod axis;
mod histogram;

pub(crate) use histogram::histogram;

use crate::page::escape;
use axis::{Axis, LEFT, TOP, step_ticks};
use m3_gate::value_text;

/// Room for the curves, and below it the row of step numbers.
const WIDTH: f64 = 400.0;
const HEIGHT: f64 = 200.0;
const RIGHT: f64 = 392.0;
const BOTTOM: f64 = 178.0;

/// Above this many steps a column is narrower than a pixel and no pointer finds it.
const TITLES_MAX: usize = 400;
/// Runs of steps that a note names one by one.
const NAMED_RUNS_MAX: usize = 4;

pub(crate) const STYLE: &str = "\
.plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,20.5rem),1fr))}\
.plots figure{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:.7rem .8rem}\
.legend{font-size:.8rem;margin:.15rem 0 .4rem}@media(min-width:46rem){.legend{min-height:2.9em}}.legend span{margin-right:.9em;white-space:nowrap}\
.legend i{display:inline-block;width:1.1em;height:.25em;border-radius:2px;vertical-align:.2em;margin-right:.4em}\
i.s0{background:var(--s0)}i.s1{background:var(--s1)}i.s2{background:var(--s2)}\
.legend i.rule{height:0;border-top:2px dashed var(--fg);border-radius:0}\
.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}\
.line.s0,.ring.s0{stroke:var(--s0)}.line.s1,.ring.s1{stroke:var(--s1)}.line.s2,.ring.s2{stroke:var(--s2)}\
.fill.s0{fill:var(--s0)}.fill.s1{fill:var(--s1)}.fill.s2{fill:var(--s2)}\
.ring{fill:var(--card);stroke-width:1.5}svg .rule{stroke:var(--fg);stroke-width:1.2;stroke-dasharray:5 4}\
.gap{fill:var(--gap)}.col{fill:transparent}.col:hover{fill:var(--hover)}\
figcaption{font-size:.8rem;color:var(--muted);margin-top:.35rem}\
.words{font-size:1.05rem;text-align:center;padding:2.6rem .5rem;margin:0}";

/// How values become heights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    /// From 0.
    Linear,
    /// Decades; zeros stand as rings on the lower edge.
    Log,
}

/// One curve, or one layer of a stack.
pub(crate) struct Series {
    pub(crate) label: &'static str,
    /// A value a step; none where the step has none.
    pub(crate) values: Vec<Option<f64>>,
}

/// A horizontal line to compare with.
pub(crate) struct Rule {
    pub(crate) label: String,
    /// Drawn where the scale has a place for it.
    pub(crate) value: f64,
}

/// Everything that one figure shows.
pub(crate) struct Plot<'a> {
    pub(crate) title: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) scale: Scale,
    /// Step numbers, as many as every series has values.
    pub(crate) steps: &'a [u64],
    pub(crate) series: Vec<Series>,
    pub(crate) rule: Option<Rule>,
}

/// What becomes of a value in a plot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Drawn,
    /// No place on a logarithmic scale.
    Zero,
    /// No place on a logarithmic scale.
    Negative,
    NotANumber,
    Infinite,
    Missing,
}

impl Place {
    fn of(value: Option<f64>, scale: Scale) -> Self {
        match value {
            None => Place::Missing,
            Some(x) if x.is_nan() => Place::NotANumber,
            Some(x) if x.is_infinite() => Place::Infinite,
            Some(x) if scale == Scale::Log && x == 0.0 => Place::Zero,
            Some(x) if scale == Scale::Log && x < 0.0 => Place::Negative,
            Some(_) => Place::Drawn,
        }
    }

    /// True where the reader must not take the gap for a value.
    fn is_gap(self) -> bool {
        !matches!(self, Place::Drawn | Place::Zero)
    }
}

impl Plot<'_> {
    /// One curve a series.
    pub(crate) fn curves(&self) -> String {
        self.figure(
            "last",
            |series| series.values.last().copied().flatten(),
            || {
                let drawn = self
                    .series
                    .iter()
                    .flat_map(|s| &s.values)
                    .flatten()
                    .copied();
                let rule = self.rule.iter().map(|rule| rule.value);
                let axis = Axis::over(self.scale, drawn.chain(rule), BOTTOM);
                let curves = self.series.iter().enumerate();
                let curves: String = curves
                    .map(|(i, series)| self.curve(i, series, &axis))
                    .collect();
                let rule = self.rule.as_ref().and_then(|rule| axis.y(rule.value));
                let rule = rule.map_or_else(String::new, |y| {
                    format!("<path class=\"rule\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>")
                });
                axis.grid(RIGHT) + &rule + &curves
            },
        )
    }

    /// One column a step, the series on top of each other; a step without all of them is a gap.
    pub(crate) fn stack(&self) -> String {
        self.figure(
            "mean",
            |series| mean(&series.values),
            || {
                let totals: Vec<Option<f64>> = (0..self.steps.len())
                    .map(|i| self.series.iter().map(|s| s.values[i]).sum())
                    .collect();
                let axis = Axis::over(self.scale, totals.iter().flatten().copied(), BOTTOM);
                let mut layers = vec![String::new(); self.series.len()];
                for (i, _) in totals
                    .iter()
                    .enumerate()
                    .filter(|(_, t)| t.is_some_and(f64::is_finite))
                {
                    let mut below = 0.0;
                    for (layer, series) in layers.iter_mut().zip(&self.series) {
                        let above = below + series.values[i].unwrap_or(0.0);
                        if let (Some(low), Some(high)) = (axis.y(below), axis.y(above)) {
                            let (x, width) = (self.left(i), 0.82 * self.column());
                            *layer += &format!("M{x:.1} {low:.1}V{high:.1}h{width:.1}V{low:.1}z");
                        }
                        below = above;
                    }
                }
                let layers = layers.iter().enumerate();
                let layers = layers.map(|(i, d)| format!("<path class=\"fill s{i}\" d=\"{d}\"/>"));
                axis.grid(RIGHT) + &layers.collect::<String>()
            },
        )
    }

    /// Title, legend, drawing and notes; words alone where there is nothing to draw.
    fn figure(
        &self,
        summary: &str,
        number: impl Fn(&Series) -> Option<f64>,
        drawing: impl Fn() -> String,
    ) -> String {
        let title = escape(self.title);
        if let Some(words) = self.words_alone() {
            let rule = self.rule.as_ref().map_or_else(String::new, |rule| {
                format!("<figcaption>{}</figcaption>", escape(&rule.label))
            });
            return format!(
                "<figure><h3>{title}</h3><p class=\"words\">{words}</p>{rule}</figure>\n"
            );
        }
        let mut legend = String::new();
        for (i, series) in self.series.iter().enumerate() {
            let value = number(series).map_or_else(|| "none".to_owned(), short);
            let (label, unit) = (escape(series.label), escape(self.unit));
            legend +=
                &format!("<span><i class=\"s{i}\"></i>{label}, {summary} {value}{unit}</span> ");
        }
        if let Some(rule) = &self.rule {
            legend += &format!("<span><i class=\"rule\"></i>{}</span>", escape(&rule.label));
        }
        let notes = self.notes();
        let notes = if notes.is_empty() {
            String::new()
        } else {
            format!("<figcaption>{}</figcaption>", escape(&notes.join("; ")))
        };
        format!(
            "<figure><h3>{title}</h3><div class=\"legend\">{legend}</div>\
             <svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title} by step\">\
             {gaps}{drawing}{ticks}{columns}</svg>{notes}</figure>\n",
            gaps = self.gaps(),
            drawing = drawing(),
            ticks = self.step_numbers(),
            columns = self.columns(),
        )
    }

    fn words_alone(&self) -> Option<String> {
        let mut values = self.series.iter().flat_map(|s| &s.values).peekable();
        let count = self.steps.len();
        if values.clone().all(Option::is_none) {
            Some("not recorded".to_owned())
        } else if values.all(|value| *value == Some(0.0)) {
            Some(if count == 1 {
                "exactly 0 at the one step".to_owned()
            } else {
                format!("exactly 0 at all {count} steps")
            })
        } else {
            None
        }
    }

    fn curve(&self, index: usize, series: &Series, axis: &Axis) -> String {
        let (mut path, mut rings, mut joined) = (String::new(), String::new(), false);
        for (i, &value) in series.values.iter().enumerate() {
            let (place, x) = (Place::of(value, self.scale), self.middle(i));
            let y = value.and_then(|value| axis.y(value));
            if let (Place::Drawn, Some(y)) = (place, y) {
                let next = series.values.get(i + 1).copied().flatten();
                let alone = !joined && Place::of(next, self.scale) != Place::Drawn;
                path += &match (joined, alone) {
                    (true, _) => format!("L{x:.1} {y:.1}"),
                    (false, false) => format!("M{x:.1} {y:.1}"),
                    // A line of no length is drawn as the round cap alone: a point.
                    (false, true) => format!("M{x:.1} {y:.1}h.01"),
                };
                joined = true;
            } else {
                joined = false;
            }
            if place == Place::Zero {
                rings += &format!(
                    "<circle class=\"ring s{index}\" cx=\"{x:.1}\" cy=\"{BOTTOM}\" r=\"2.6\"/>"
                );
            }
        }
        format!("<path class=\"line s{index}\" d=\"{path}\"/>{rings}")
    }

    fn gaps(&self) -> String {
        let is_gap = |i: &usize| {
            let mut values = self.series.iter().map(|series| series.values[*i]);
            values.any(|value| Place::of(value, self.scale).is_gap())
        };
        let gaps = (0..self.steps.len()).filter(is_gap);
        gaps.map(|i| self.rect("gap", i, "")).collect()
    }

    /// Invisible columns that name their step and values under the pointer.
    fn columns(&self) -> String {
        if self.steps.len() > TITLES_MAX {
            return String::new();
        }
        let column = |(i, step): (usize, &u64)| {
            let values = self.series.iter().map(|series| {
                let value = series.values[i].map_or_else(|| "none".to_owned(), value_text);
                format!("{} {value}{}", series.label, self.unit)
            });
            let values: Vec<String> = values.collect();
            let title = escape(&format!("step {step}: {}", values.join(", ")));
            self.rect("col", i, &format!("<title>{title}</title>"))
        };
        self.steps.iter().enumerate().map(column).collect()
    }

    fn rect(&self, class: &str, i: usize, inner: &str) -> String {
        let (x, width, height) = (self.left(i), self.column(), BOTTOM - TOP);
        format!(
            "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height}\">{inner}</rect>"
        )
    }

    fn step_numbers(&self) -> String {
        let y = HEIGHT - 6.0;
        let number = |i: usize| {
            let (x, step) = (self.middle(i), self.steps[i]);
            format!("<text x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{step}</text>")
        };
        let numbers: String = step_ticks(self.steps).into_iter().map(number).collect();
        let x = LEFT - 6.0;
        format!("{numbers}<text x=\"{x}\" y=\"{y}\" text-anchor=\"end\">step</text>")
    }

    fn column(&self) -> f64 {
        (RIGHT - LEFT) / self.steps.len() as f64
    }

    fn left(&self, i: usize) -> f64 {
        LEFT + i as f64 * self.column()
    }

    fn middle(&self, i: usize) -> f64 {
        self.left(i) + 0.5 * self.column()
    }

    /// What is not drawn, in words; curves that say the same share a note.
    fn notes(&self) -> Vec<String> {
        let mut notes: Vec<(String, Vec<&str>)> = Vec::new();
        for series in &self.series {
            for (place, words) in [
                (Place::Zero, "exactly 0 (rings on the lower edge)"),
                (Place::Negative, "negative, not drawn"),
                (Place::NotANumber, "NaN"),
                (Place::Infinite, "infinite"),
                (Place::Missing, "not recorded"),
            ] {
                let steps = self.steps_at(series, place);
                if steps.is_empty() {
                    continue;
                }
                let note = format!("{words} at {}", runs(&steps));
                match notes.iter_mut().find(|(known, _)| *known == note) {
                    Some((_, labels)) => labels.push(series.label),
                    None => notes.push((note, vec![series.label])),
                }
            }
        }
        let notes = notes.into_iter();
        notes
            .map(|(note, labels)| format!("{}: {note}", labels.join(", ")))
            .collect()
    }

    fn steps_at(&self, series: &Series, wanted: Place) -> Vec<u64> {
        let places = series
            .values
            .iter()
            .map(|&value| Place::of(value, self.scale));
        let found = places.zip(self.steps).filter(|(place, _)| *place == wanted);
        found.map(|(_, &step)| step).collect()
    }
}

/// Three significant digits, enough beside a curve.
fn short(x: f64) -> String {
    if (1e-2..1.0).contains(&x.abs()) {
        format!("{x:.3}")
    } else {
        value_text(x)
    }
}

/// Mean of what was recorded; NaN when a value is.
fn mean(values: &[Option<f64>]) -> Option<f64> {
    let count = values.iter().flatten().count();
    (count > 0).then(|| values.iter().flatten().sum::<f64>() / count as f64)
}

/// `step 3`, `steps 1–4, 9`, or how many when the list would be long.
fn runs(steps: &[u64]) -> String {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &step in steps {
        match runs.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(step) => *end = step,
            _ => runs.push((step, step)),
        }
    }
    if runs.len() > NAMED_RUNS_MAX {
        return format!("{} steps, the first of them {}", steps.len(), steps[0]);
    }
    let named: Vec<String> = runs
        .iter()
        .map(|(start, end)| {
            if start == end {
                start.to_string()
            } else {
                format!("{start}–{end}")
            }
        })
        .collect();
    let plural = if steps.len() == 1 { "" } else { "s" };
    format!("step{plural} {}", named.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot<'a>(scale: Scale, steps: &'a [u64], values: &[Option<f64>]) -> Plot<'a> {
        let series = vec![Series {
            label: "gap",
            values: values.to_vec(),
        }];
        Plot {
            title: "Gap",
            unit: "",
            scale,
            steps,
            series,
            rule: None,
        }
    }

    #[test]
    fn what_cannot_be_drawn_breaks_the_curve_and_is_said() {
        let values = [
            Some(1.0),
            Some(f64::NAN),
            Some(2.0),
            Some(3.0),
            None,
            Some(f64::INFINITY),
        ];
        let svg = plot(Scale::Linear, &[1, 2, 3, 4, 5, 6], &values).curves();
        assert!(
            svg.contains(
                "gap: NaN at step 2; gap: infinite at step 6; gap: not recorded at step 5"
            ),
            "{svg}"
        );
        assert_eq!(svg.matches("class=\"gap\"").count(), 3);
        let d = svg
            .split("class=\"line s0\" d=\"")
            .nth(1)
            .unwrap()
            .split('"')
            .next()
            .unwrap();
        assert_eq!(
            (
                d.matches('M').count(),
                d.matches('L').count(),
                d.matches("h.01").count()
            ),
            (2, 1, 1),
            "{d}"
        );
        assert!(!d.contains("NaN") && !d.contains("inf"));
    }

    #[test]
    fn zeros_have_no_place_on_a_log_scale_and_stand_as_rings() {
        let values = [Some(0.0), Some(1e-6), Some(0.0), Some(-1.0)];
        let svg = plot(Scale::Log, &[1, 2, 3, 4], &values).curves();
        assert_eq!(svg.matches("class=\"ring s0\"").count(), 2);
        assert!(
            svg.contains("exactly 0 (rings on the lower edge) at steps 1, 3"),
            "{svg}"
        );
        assert!(svg.contains("negative, not drawn at step 4"), "{svg}");
    }

    #[test]
    fn nothing_but_zeros_is_said_in_words() {
        for scale in [Scale::Linear, Scale::Log] {
            let svg = plot(scale, &[1, 2], &[Some(0.0), Some(0.0)]).curves();
            assert!(
                svg.contains("exactly 0 at all 2 steps") && !svg.contains("<svg"),
                "{svg}"
            );
        }
        let svg = plot(Scale::Log, &[1], &[None]).curves();
        assert!(svg.contains("not recorded"), "{svg}");
    }

    #[test]
    fn a_column_without_all_its_layers_is_a_gap() {
        let mut plot = plot(Scale::Linear, &[1, 2], &[Some(1.0), Some(1.0)]);
        plot.series.push(Series {
            label: "train",
            values: vec![Some(2.0), None],
        });
        let svg = plot.stack();
        assert_eq!(svg.matches('z').count(), 2, "{svg}");
        assert!(svg.contains("train: not recorded at step 2"), "{svg}");
    }

    #[test]
    fn steps_are_named_in_runs() {
        assert_eq!(runs(&[3]), "step 3");
        assert_eq!(runs(&[1, 2, 3, 9]), "steps 1–3, 9");
        assert_eq!(runs(&[1, 3, 5, 7, 9]), "5 steps, the first of them 1");
        assert_eq!(runs(&[u64::MAX, 0]), format!("steps {}, 0", u64::MAX));
    }
}
