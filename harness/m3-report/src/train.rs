//! The page of a training run: is it green, what was learned, the curves, the gates.

use crate::gate_rows::{GateRow, gate_rows};
use crate::html::{bound_of, machine, value_of, verdict_word};
use crate::page::{escape, page};
use crate::plot::{self, Plot, Rule, Scale, Series};
use m3_gate::record::{Device, VerdictRecord};
use m3_gate::{Op, is_green, value_text};
use std::collections::BTreeMap;

/// Steps at either end that show what was learned.
const END_STEPS: usize = 5;

const REWARD: &str = "rollout/raw_reward";
const ENTROPY: &str = "rollout/entropy";
const GAP_MEAN: &str = "train/train_rollout_logprob_abs_diff";
const GAP_MAX: &str = "train/train_rollout_logprob_abs_diff_max";
const KL: &str = "train/train_rollout_kl";
const GRAD_NORM: &str = "train/grad_norm";
const ROLLOUT_TIME: &str = "perf/rollout_time";
const TRAIN_TIME: &str = "perf/actor_train_time";
const STEP_TIME: &str = "perf/step_time";

/// Columns of the table of steps.
const COLUMNS: [&str; 9] = [
    REWARD,
    GAP_MEAN,
    GAP_MAX,
    KL,
    GRAD_NORM,
    ENTROPY,
    ROLLOUT_TIME,
    TRAIN_TIME,
    STEP_TIME,
];

const STYLE: &str = "\
.banner{border-left:.4rem solid var(--good);background:var(--card);padding:.7rem 1rem;border-radius:4px}\
.banner.red{border-color:var(--bad)}.banner h1 b{color:var(--good)}.banner.red h1 b{color:var(--bad)}\
.banner ul{margin:.3rem 0 .5rem;padding-left:1.2rem}\
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,8.5rem),1fr));gap:.5rem 1rem;margin:.3rem 0}\
dt{font-size:.75rem;color:var(--muted)}dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}\
.ends,details table{width:auto}.fold td:last-child{min-width:16rem}.ends th{white-space:nowrap}\
.gates td:nth-child(5){font-size:.85rem;color:var(--muted)}.gates td{overflow-wrap:anywhere}\
@media(max-width:46rem){.gates thead{display:none}.gates tr{display:block;border-bottom:1px solid var(--line);padding:.5rem 0}\
.gates td{display:block;border:0;padding:.05rem 0;text-align:left;white-space:normal}\
.gates td[data-name]:before{content:attr(data-name) \": \";color:var(--muted)}}";

/// What a training run leaves for its report.
#[derive(Debug, Clone)]
pub struct TrainRun<'a> {
    /// Name of the recipe.
    pub recipe: String,
    /// Seed of everything random.
    pub seed: u64,
    /// What was trained, in words: configuration, dtype, parameters.
    pub model: String,
    /// Machine.
    pub device: Device,
    /// Commit of the tree, where it is known.
    pub commit: Option<String>,
    /// Metric name of `metrics.jsonl` → value, one map a step in the order of the steps. A value
    /// that is not finite stays what it is; a metric that was not recorded is absent.
    pub steps: Vec<BTreeMap<String, f64>>,
    /// Every verdict of the run.
    pub verdicts: &'a [VerdictRecord],
    /// Mean reward of the best policy that ignores its prompt, where the task knows it.
    pub best_blind_reward: Option<f64>,
}

/// The page of a training run: self-contained, without scripts, for narrow and wide screens, light
/// and dark.
pub fn train_html(run: &TrainRun<'_>) -> String {
    let rows = gate_rows(run.verdicts);
    let colour = if is_green(run.verdicts) {
        "green"
    } else {
        "red"
    };
    let body = [
        headline(run, &rows),
        learned(run),
        curves(run),
        gate_table(&rows),
        not_passed(&rows),
        step_table(run),
    ];
    let style = format!("{}{STYLE}", plot::STYLE);
    page(
        &format!("Training run {}: {colour}", run.recipe),
        &style,
        &body.concat(),
    )
}

impl TrainRun<'_> {
    /// A value a step; none where it was not recorded.
    fn metric(&self, name: &str) -> Vec<Option<f64>> {
        self.steps
            .iter()
            .map(|step| step.get(name).copied())
            .collect()
    }

    /// Step numbers as recorded, or counted from 1.
    fn numbers(&self) -> Vec<u64> {
        let number = |(i, step): (usize, &BTreeMap<String, f64>)| {
            let recorded = step
                .get("train/step")
                .filter(|x| x.is_finite() && **x >= 0.0);
            recorded.map_or(i as u64 + 1, |&x| x as u64)
        };
        self.steps.iter().enumerate().map(number).collect()
    }
}

fn headline(run: &TrainRun<'_>, rows: &[GateRow<'_>]) -> String {
    let block = rows
        .iter()
        .filter(|row| row.worst.severity == m3_gate::Severity::Block)
        .count();
    let red: Vec<String> = rows
        .iter()
        .filter(|row| row.is_red())
        .map(why_red)
        .collect();
    let green = is_green(run.verdicts);
    let (colour, words) = if green {
        ("green", format!("all {block} block gates hold"))
    } else if red.is_empty() {
        ("red", "no block gate was judged".to_owned())
    } else {
        (
            "red",
            format!("{} of {block} block gates do not hold", red.len()),
        )
    };
    let red = if red.is_empty() {
        String::new()
    } else {
        format!("<ul>{}</ul>", red.concat())
    };
    let seconds: Option<f64> = run.metric(STEP_TIME).into_iter().sum();
    let time = seconds.filter(|s| !run.steps.is_empty() && s.is_finite());
    let facts = [
        ("recipe", run.recipe.clone()),
        ("seed", run.seed.to_string()),
        ("steps", run.steps.len().to_string()),
        (
            "time in steps",
            time.map_or_else(|| "not known".to_owned(), |s| format!("{s:.1} s")),
        ),
        ("model", run.model.clone()),
        ("device", machine(&run.device)),
        (
            "commit",
            run.commit.clone().unwrap_or_else(|| "not known".to_owned()),
        ),
    ];
    let facts = facts
        .iter()
        .map(|(name, value)| format!("<div><dt>{name}</dt><dd>{}</dd></div>", escape(value)));
    format!(
        "<div class=\"banner {colour}\"><h1>Training run {}: <b>{colour}</b></h1><p>{words}</p>{red}<dl>{}</dl></div>\n",
        escape(&run.recipe),
        facts.collect::<String>(),
    )
}

/// One sentence on a red gate: how often, since when, by how much.
fn why_red(row: &GateRow<'_>) -> String {
    let mut red = row.verdicts.iter().filter(|v| !v.verdict.is_green());
    let count = red.clone().count();
    let first = red
        .find_map(|v| v.step)
        .map_or_else(String::new, |step| format!(", first at step {step}"));
    let (worst, total) = (row.worst, row.verdicts.len());
    let note = worst
        .note
        .as_ref()
        .map_or_else(String::new, |note| format!(" ({note})"));
    let text = format!(
        "{} {}: {count} of {total} verdicts {}{first}; worst {}, asked {}{note}",
        worst.label(),
        worst.case,
        worst.verdict.name(),
        value_of(worst),
        bound_of(worst),
    );
    format!("<li>{}</li>", escape(&text))
}

fn learned(run: &TrainRun<'_>) -> String {
    let rewards = run.metric(REWARD);
    let count = END_STEPS.min(rewards.len());
    let (first, last) = (&rewards[..count], &rewards[rewards.len() - count..]);
    let blind = run.best_blind_reward.map(|reward| {
        format!(
            " The best policy that ignores its prompt is rewarded {}.",
            value_text(reward)
        )
    });
    let words = match (mean(first), mean(last)) {
        _ if count == 0 => "No step ran, so nothing was learned.".to_owned(),
        (Some(before), Some(after)) => {
            let verb = match after.total_cmp(&before) {
                std::cmp::Ordering::Greater => "rose",
                std::cmp::Ordering::Equal => "stayed",
                std::cmp::Ordering::Less => "fell",
            };
            let plural = if count == 1 { "" } else { "s" };
            format!(
                "Mean reward {verb} from {before:.3} to {after:.3} (first and last {count} step{plural})."
            )
        }
        _ => "What was learned cannot be told: a reward at either end is missing or not finite."
            .to_owned(),
    };
    let row = |name: &str, values: &[Option<f64>]| {
        let cell = |value: &Option<f64>| {
            let text = value.map_or_else(|| "none".to_owned(), |x| format!("{x:.3}"));
            format!("<td class=\"num\">{text}</td>")
        };
        let cells: String = values.iter().map(cell).collect();
        format!("<tr><th>{name} {count}</th>{cells}</tr>")
    };
    let table = if count == 0 {
        String::new()
    } else {
        format!(
            "<div class=\"scroll\"><table class=\"ends\">{}{}</table></div>\n",
            row("first", first),
            row("last", last)
        )
    };
    format!(
        "<h2>What was learned</h2>\n<p>{words}{}</p>\n{table}",
        blind.unwrap_or_default()
    )
}

/// None when a value is missing or not finite.
fn mean(values: &[Option<f64>]) -> Option<f64> {
    let sum: Option<f64> = values.iter().copied().sum();
    sum.map(|sum| sum / values.len() as f64)
        .filter(|mean| mean.is_finite())
}

fn curves(run: &TrainRun<'_>) -> String {
    if run.steps.is_empty() {
        return String::new();
    }
    let steps = run.numbers();
    let one = |title, scale, series: &[(&'static str, &str)], rule| {
        let series = series.iter().map(|&(label, metric)| Series {
            label,
            values: run.metric(metric),
        });
        Plot {
            title,
            unit: "",
            scale,
            steps: &steps,
            series: series.collect(),
            rule,
        }
    };
    let blind = run.best_blind_reward.map(|value| Rule {
        label: format!("best prompt-blind policy {}", value_text(value)),
        value,
    });
    let figures = [
        one("Reward", Scale::Linear, &[("mean", REWARD)], blind).curves(),
        one(
            "Log-prob gap, trainer to engine",
            Scale::Log,
            &[("mean", GAP_MEAN), ("max", GAP_MAX)],
            step_gate(run, "logprob_gap", "gate on the mean"),
        )
        .curves(),
        one(
            "KL, engine to trainer (k3)",
            Scale::Log,
            &[("k3", KL)],
            step_gate(run, "kl_k3", "gate"),
        )
        .curves(),
        one(
            "Gradient norm",
            Scale::Linear,
            &[("before clipping", GRAD_NORM)],
            None,
        )
        .curves(),
        one(
            "Entropy of the policy",
            Scale::Linear,
            &[("mean", ENTROPY)],
            None,
        )
        .curves(),
        step_time(run, &steps).stack(),
    ];
    format!(
        "<h2>Curves</h2>\n<div class=\"plots\">\n{}</div>\n",
        figures.concat()
    )
}

/// The bound of a gate that is judged every step.
fn step_gate(run: &TrainRun<'_>, gate: &str, words: &str) -> Option<Rule> {
    let mut verdicts = run.verdicts.iter();
    let v = verdicts
        .find(|v| v.gate == gate && v.step.is_some() && matches!(v.op, Some(Op::Le | Op::Eq)))?;
    let m3_gate::Bound::Limit(value) = v.bound? else {
        return None;
    };
    Some(Rule {
        label: format!("{words} {}", bound_of(v)),
        value,
    })
}

fn step_time<'a>(run: &TrainRun<'_>, steps: &'a [u64]) -> Plot<'a> {
    let (rollout, train) = (run.metric(ROLLOUT_TIME), run.metric(TRAIN_TIME));
    let whole = run.metric(STEP_TIME);
    let parts = rollout.iter().zip(&train).zip(&whole);
    let rest = parts.map(|((rollout, train), whole)| {
        let rest = (*whole)? - (*rollout)? - (*train)?;
        // Clocks read one after the other may cross by a rounding.
        Some(if rest < 0.0 { 0.0 } else { rest })
    });
    let series = vec![
        Series {
            label: "rollout",
            values: rollout.clone(),
        },
        Series {
            label: "train",
            values: train.clone(),
        },
        Series {
            label: "rest",
            values: rest.collect(),
        },
    ];
    Plot {
        title: "Time of a step",
        unit: " s",
        scale: Scale::Linear,
        steps,
        series,
        rule: None,
    }
}

fn gate_table(rows: &[GateRow<'_>]) -> String {
    if rows.is_empty() {
        return "<h2>Gates</h2>\n<p>No gate was judged.</p>\n".to_owned();
    }
    let row = |row: &GateRow<'_>| {
        let v = row.worst;
        let count = row.verdicts.len();
        format!(
            "<tr><td>{word}</td><td><b>{gate}</b> <span class=\"muted\">{case}</span></td>\
             <td class=\"num\" data-name=\"worst\">{value}, asked {bound}</td>\
             <td class=\"num\" data-name=\"verdicts\">{count}</td><td data-name=\"source\">{source}</td></tr>\n",
            word = verdict_word(v.verdict, v.severity),
            gate = escape(&v.label()),
            case = escape(&v.case),
            value = value_of(v),
            bound = escape(&bound_of(v)),
            source = escape(&v.source),
        )
    };
    let rows: String = rows.iter().map(row).collect();
    format!(
        "<h2>Gates</h2>\n<table class=\"gates\"><thead><tr><th>verdict</th><th>gate, case</th><th class=\"num\">worst value</th>\
         <th class=\"num\">verdicts</th><th>source of the bound</th></tr></thead>\n<tbody>{rows}</tbody></table>\n"
    )
}

/// Every verdict that is not PASS, a fold a gate.
fn not_passed(rows: &[GateRow<'_>]) -> String {
    let fold = |row: &GateRow<'_>| {
        let worst = row.worst;
        let lines: String = row.not_passed().map(verdict_line).collect();
        let count = row.not_passed().count();
        (count > 0).then(|| {
            format!(
                "<details><summary>{word} {gate} {case}: {count} of {total}</summary>\n\
                 <p>asked {bound}; {source} <span class=\"muted\">{at}</span></p>\n\
                 <div class=\"scroll fold\"><table><tr><th class=\"num\">step</th><th>verdict</th><th class=\"num\">value</th>\
                 <th class=\"num\">of its bound</th><th>note</th></tr>\n{lines}</table></div></details>\n",
                word = verdict_word(worst.verdict, worst.severity),
                gate = escape(&worst.label()),
                case = escape(&worst.case),
                total = row.verdicts.len(),
                bound = escape(&bound_of(worst)),
                source = escape(&worst.source),
                at = escape(&worst.at),
            )
        })
    };
    let folds: String = rows.iter().filter_map(fold).collect();
    if folds.is_empty() {
        return String::new();
    }
    format!("<h2>Verdicts other than PASS</h2>\n{folds}")
}

fn verdict_line(v: &VerdictRecord) -> String {
    let step = v
        .step
        .map_or_else(|| "whole run".to_owned(), |step| step.to_string());
    let used = v
        .bound_used()
        .map_or_else(String::new, |used| format!("{used:.2}"));
    let note = v.note.as_deref().unwrap_or_default();
    format!(
        "<tr><td class=\"num\">{step}</td><td class=\"{word}\">{word}</td><td class=\"num\">{value}</td><td class=\"num\">{used}</td><td>{note}</td></tr>\n",
        word = v.verdict.name(),
        value = value_of(v),
        note = escape(note),
    )
}

/// The curves once more as numbers, for readers who cannot point at a plot.
fn step_table(run: &TrainRun<'_>) -> String {
    if run.steps.is_empty() {
        return String::new();
    }
    let head: String = COLUMNS
        .iter()
        .map(|name| format!("<th class=\"num\">{}</th>", escape(name)))
        .collect();
    let line = |(number, step): (u64, &BTreeMap<String, f64>)| {
        let cell = |name: &&str| {
            let text = step
                .get(*name)
                .map_or_else(|| "none".to_owned(), |&x| value_text(x));
            format!("<td class=\"num\">{text}</td>")
        };
        format!(
            "<tr><td class=\"num\">{number}</td>{}</tr>\n",
            COLUMNS.iter().map(cell).collect::<String>()
        )
    };
    let lines: String = run
        .numbers()
        .into_iter()
        .zip(&run.steps)
        .map(line)
        .collect();
    format!(
        "<h2>Numbers</h2>\n<details><summary>the curves, step by step</summary>\n\
         <div class=\"scroll\"><table><tr><th class=\"num\">step</th>{head}</tr>\n{lines}</table></div></details>\n"
    )
}
