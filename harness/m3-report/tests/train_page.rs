//! The page of a made-up training run.

use m3_gate::record::{Device, VerdictRecord};
use m3_gate::{Case, Date, GateSet, Storage, Value, judge_value, parse_gates};
use m3_report::{TrainRun, gate_rows, train_html};
use std::collections::BTreeMap;

const GATES: &str = r#"
[[gate]]
id = "weights_equal"
metric = "value"
op = "=="
bound = 0
cases = "*"
source = { kind = "analytic", why = "tensors whose digests differ between trainer and engine after an update; an update copies" }

[[gate]]
id = "logprob_gap"
metric = "value"
op = "<="
bound = 5e-3
cases = "*"
source = { kind = "seed", doc = "train/rollout log-prob abs diff of the 4-layer model", why = "mean of <trainer> & engine" }

[[gate]]
id = "kl_k3"
metric = "value"
op = "<="
bound = 1e-4
cases = "*"
source = { kind = "analytic", why = "k3 of a gap d is about d^2/2" }

[[gate]]
id = "grad_norm"
metric = "value"
cases = "*"
band = { rel = 0.25, floor = 1e-3, history_min = 10, source = { kind = "literature", cite = "two-sided band round trusted history" } }

[[gate]]
id = "route_overlap"
metric = "value"
op = ">="
bound = 0.99
cases = "*"
source = { kind = "analytic", why = "share of tokens whose expert set is the same in trainer and engine" }
"#;

fn judge(values: &[(&str, Option<u64>, f64)]) -> Vec<VerdictRecord> {
    let today = Date {
        year: 2026,
        month: 12,
        day: 1,
    };
    let gates = GateSet::new([parse_gates("gates/run.toml", GATES, today).unwrap()]).unwrap();
    let case = Case {
        name: "echo",
        suite: "train",
        arch: "cpu",
        dtype: Storage::F32,
    };
    let rows = values.iter().flat_map(|&(gate, step, value)| {
        let value = Value {
            value: Some(value),
            step,
            history: &[],
        };
        judge_value(&gates, gates.gate(gate).unwrap(), &case, value)
    });
    rows.collect()
}

/// A number in 0..1 that looks random and is the same every time.
fn noise(step: usize, stream: usize) -> f64 {
    let x = (step * 31 + stream * 17 + 7) as f64;
    (x.sin() * 43_758.547).rem_euclid(1.0)
}

fn step(step: usize) -> BTreeMap<String, f64> {
    let n = |stream| noise(step, stream);
    let reward = 0.06 + 0.92 / (1.0 + (-(step as f64 - 18.0) / 3.0).exp()) + 0.03 * (n(0) - 0.5);
    let (rollout, train) = (0.16 + 0.04 * n(1), 0.22 + 0.05 * n(2));
    let gap = 2e-7 * (1.0 + n(3));
    let values = [
        ("train/step", step as f64),
        ("rollout/raw_reward", reward),
        ("train/train_rollout_logprob_abs_diff", gap),
        (
            "train/train_rollout_logprob_abs_diff_max",
            gap * (8.0 + 30.0 * n(4)),
        ),
        ("train/train_rollout_kl", gap * gap * 3.0),
        (
            "train/grad_norm",
            0.4 + 1.8 * (-((step as f64 - 17.0) / 9.0).powi(2)).exp() + 0.2 * n(5),
        ),
        ("rollout/entropy", 2.7 * (1.02 - reward) + 0.05 * n(6)),
        ("perf/rollout_time", rollout),
        ("perf/actor_train_time", train),
        ("perf/step_time", rollout + train + 0.05),
    ];
    values.map(|(name, x)| (name.to_owned(), x)).into()
}

fn verdicts(steps: &[BTreeMap<String, f64>]) -> Vec<VerdictRecord> {
    let mut values = vec![("weights_equal", Some(0), 0.0)];
    for (i, step) in steps.iter().enumerate() {
        let at = Some(i as u64 + 1);
        values.extend([
            ("weights_equal", at, 0.0),
            (
                "logprob_gap",
                at,
                step["train/train_rollout_logprob_abs_diff"],
            ),
            ("kl_k3", at, step["train/train_rollout_kl"]),
            ("grad_norm", at, step["train/grad_norm"]),
            ("route_overlap", at, 1.0 - 0.001 * noise(i, 9)),
        ]);
    }
    judge(&values)
}

fn run(steps: Vec<BTreeMap<String, f64>>, verdicts: &[VerdictRecord]) -> TrainRun<'_> {
    TrainRun {
        recipe: "echo".to_owned(),
        seed: 7,
        model: "echo, f32, 373 k parameters".to_owned(),
        device: Device {
            name: "cpu (2 threads)".to_owned(),
            arch: "cpu".to_owned(),
            ..Device::default()
        },
        commit: Some("abc1234".to_owned()),
        steps,
        verdicts,
        best_blind_reward: Some(0.094),
    }
}

fn steps(count: usize) -> Vec<BTreeMap<String, f64>> {
    (1..=count).map(step).collect()
}

#[test]
fn a_green_run_says_what_it_is_and_what_was_learned() {
    let steps = steps(60);
    let verdicts = verdicts(&steps);
    let page = train_html(&run(steps, &verdicts));
    for said in [
        "Training run echo: <b>green</b>",
        "all 4 block gates hold",
        "<dd>7</dd>",
        "<dd>60</dd>",
        "<dd>abc1234</dd>",
        "cpu (2 threads)",
        "Mean reward rose from 0.0",
        "ignores its prompt is rewarded 0.094",
        "gate on the mean &lt;= 5e-3",
        "mean of &lt;trainer&gt; &amp; engine",
    ] {
        assert!(page.contains(said), "{said}");
    }
    assert_eq!(page.matches("<svg").count(), 6);
    // The band has no history; a fold holds its sixty rows.
    assert!(page.contains("grad_norm echo: 60 of 60"));
}

#[test]
fn the_page_needs_nothing_else_and_escapes_what_it_shows() {
    let steps = steps(3);
    let mut verdicts = verdicts(&steps);
    verdicts[1].case = "<b onclick=\"x\">'&".to_owned();
    let mut run = run(steps, &verdicts);
    run.recipe = "</title><script>alert(1)</script>".to_owned();
    run.model = "<img>".to_owned();
    run.commit = Some("<i>".to_owned());
    run.device.name = "\"<u>".to_owned();
    let page = train_html(&run);
    for foreign in [
        "<script",
        "<img",
        "<b onclick",
        "<u>",
        "src=",
        "href=",
        "http",
        "@import",
        "url(",
    ] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    assert!(page.contains("&lt;b onclick=&quot;x&quot;&gt;&#39;&amp;"));
}

#[test]
fn a_red_run_names_the_gate_the_step_and_the_value() {
    let mut steps = steps(20);
    for (i, value) in [(11, 7e-3), (12, 9e-3)] {
        steps[i].insert("train/train_rollout_logprob_abs_diff".to_owned(), value);
    }
    let verdicts = verdicts(&steps);
    let page = train_html(&run(steps, &verdicts));
    assert!(page.contains("Training run echo: <b>red</b>"));
    assert!(page.contains("1 of 4 block gates do not hold"));
    let why = "logprob_gap echo: 2 of 20 verdicts FAIL, first at step 12; worst 9.00e-3, asked &lt;= 5e-3";
    assert!(page.contains(why), "{page}");
}

#[test]
fn values_that_are_not_finite_are_gaps_that_are_said() {
    let mut steps = steps(10);
    steps[3].insert("rollout/raw_reward".to_owned(), f64::NAN);
    steps[9].insert("rollout/raw_reward".to_owned(), f64::INFINITY);
    steps[5].remove("train/grad_norm");
    let page = train_html(&run(steps, &[]));
    assert!(
        page.contains("mean: NaN at step 4; mean: infinite at step 10"),
        "{page}"
    );
    assert!(page.contains("before clipping: not recorded at step 6"));
    assert!(page.contains("cannot be told"));
    let drawn = page.split(" d=\"").skip(1).map(|d| d.split('"').next());
    for d in drawn.flatten() {
        assert!(!d.contains("NaN") && !d.contains("inf"), "{d}");
    }
}

#[test]
fn equal_log_probs_are_said_to_be_exactly_equal() {
    let mut steps = steps(6);
    for step in &mut steps {
        for name in ["abs_diff", "abs_diff_max"] {
            step.insert(format!("train/train_rollout_logprob_{name}"), 0.0);
        }
    }
    let page = train_html(&run(steps, &[]));
    assert!(page.contains("exactly 0 at all 6 steps"));
}

#[test]
fn a_run_without_steps_or_verdicts_is_red_and_says_so() {
    let page = train_html(&run(Vec::new(), &[]));
    for said in [
        "<b>red</b>",
        "no block gate was judged",
        "No step ran",
        "No gate was judged",
    ] {
        assert!(page.contains(said), "{said}");
    }
    assert!(!page.contains("<svg") && !page.contains("NaN"));
    let page = train_html(&run(steps(1), &[]));
    assert!(page.contains("first and last 1 step)"), "{page}");
}

#[test]
fn the_worst_of_a_row_is_the_worst_verdict_and_then_the_value_nearest_to_its_bound() {
    let verdicts = judge(&[
        ("kl_k3", Some(1), 1e-6),
        ("route_overlap", Some(1), 0.995),
        ("kl_k3", Some(2), 9e-5),
        ("route_overlap", Some(2), 0.992),
        ("kl_k3", Some(3), 1e-7),
    ]);
    let rows = gate_rows(&verdicts);
    let worst: Vec<_> = rows
        .iter()
        .map(|r| (r.worst.value, r.verdicts.len()))
        .collect();
    assert_eq!(worst, [(Some(9e-5), 3), (Some(0.992), 2)]);

    // A band's text moves with its history, and a NaN has none at all: still one row.
    let verdicts = judge(&[
        ("grad_norm", Some(1), 1.0),
        ("grad_norm", Some(2), f64::NAN),
    ]);
    let rows = gate_rows(&verdicts);
    assert_eq!((rows.len(), rows[0].worst.step), (1, Some(2)));
    assert!(!rows[0].is_red(), "a shadow gate");

    let verdicts = judge(&[
        ("kl_k3", Some(1), f64::NAN),
        ("kl_k3", Some(2), 1.0),
        ("kl_k3", Some(3), 0.0),
    ]);
    let rows = gate_rows(&verdicts);
    assert_eq!((rows[0].worst.step, rows[0].is_red()), (Some(1), true));
    assert_eq!(rows[0].not_passed().count(), 2);
}
