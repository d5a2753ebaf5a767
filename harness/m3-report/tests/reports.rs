//! One run with every kind of case, in each of the four forms.

use m3_gate::record::{CaseRecord, Device, Run};
use m3_gate::{Case, Date, GateSet, Operand, Operands, Storage, Tensor, judge_case, parse_gates};
use m3_report::{GateRun, ReadError, html, json_lines, junit, read_json_lines, terminal};

const GATES: &str = r#"
[[gate]]
id = "rms_norm.o.max_abs"
tensor = "o"
metric = "max_abs"
op = "<="
bound = 0.5
cases = "*"
source = { kind = "analytic", why = "half of <one> & a \"step\"" }

[[waiver]]
gate = "rms_norm.o.max_abs"
cases = "log_prob::*"
issue = "https://example.org/7"
until = 2027-01-31
"#;

fn case(name: &str, got: f64) -> CaseRecord {
    let today = Date {
        year: 2026,
        month: 12,
        day: 1,
    };
    let gates = GateSet::new([parse_gates("gates/rms_norm.toml", GATES, today).unwrap()]).unwrap();
    let operand = |source, values| {
        Some(Operand {
            source,
            buffer: None,
            shape: &[1, 2],
            values,
        })
    };
    let (got, reference) = ([got, 2.0], [1.0, 2.0]);
    let operands = Operands {
        got: operand("cpu", &got),
        reference: operand("reference", &reference),
        twin: None,
        storage: Storage::F32,
    };
    let decoder = |i: usize| format!("token 0, column {i}");
    let tensor = Tensor {
        name: "o",
        operands,
        decoder: Some(&decoder),
    };
    let subject = Case {
        name,
        suite: "ops",
        arch: "cpu",
        dtype: Storage::F32,
    };
    CaseRecord {
        case: name.to_owned(),
        seed: 0x5eed,
        inputs_digest: "9f3c".to_owned(),
        record: "target/m3/run/x.jsonl".to_owned(),
        device: device(),
        duration_ms: 12,
        skipped: None,
        verdicts: judge_case(&gates, &subject, &[tensor]),
    }
}

fn device() -> Device {
    Device {
        name: "cpu".to_owned(),
        arch: "cpu".to_owned(),
        driver: None,
        cuda: None,
    }
}

fn run() -> GateRun {
    let mut skipped = case("rms_norm::f32/cuda", 1.0);
    skipped.skipped = Some("no CUDA device".to_owned());
    skipped.verdicts.clear();
    GateRun {
        run: Run {
            id: "01J".to_owned(),
            commit: "abc1234".to_owned(),
            started_utc: "2026-12-01T00:00:00Z".to_owned(),
            seed: 0x5eed,
            tier: "ci".to_owned(),
            device: device(),
        },
        cases: vec![
            case("rms_norm::f32/t1", 1.375),
            case("rms_norm::f32/t2", 2.0),
            case("log_prob::f32/t1", 3.0),
            case("rms_norm::f32/t3", f64::NAN),
            skipped,
        ],
    }
}

#[test]
fn the_terminal_shows_cases_then_failures_then_the_summary() {
    insta::assert_snapshot!(terminal(&run()));
}

#[test]
fn junit_has_a_suite_per_op_and_keeps_failure_error_and_skip_apart() {
    insta::assert_snapshot!(junit(&run()).unwrap());
}

#[test]
fn json_lines_are_read_back_as_they_were() {
    let text = json_lines(&run());
    assert!(
        text.starts_with("{\"type\":\"run\",\"data\":{\"schema_version\":1,"),
        "{text}"
    );
    // A NaN is no equal of itself: compare what would be written.
    let read = read_json_lines(&text).unwrap();
    assert_eq!(json_lines(&read), text);
    assert_eq!(read.summary(), run().summary());
}

#[test]
fn a_file_of_records_that_was_cut_off_is_refused() {
    let text = json_lines(&run());
    let lines: Vec<&str> = text.lines().collect();
    let refusal = |lines: &[&str]| read_json_lines(&lines.join("\n")).unwrap_err();
    assert!(matches!(
        refusal(&lines[..3]),
        ReadError::CutOff { cases: 2 }
    ));
    assert!(matches!(refusal(&lines[1..]), ReadError::NoRun));
    assert!(matches!(refusal(&[]), ReadError::NoRun));
    let half = &lines[2][..lines[2].len() / 2];
    assert!(matches!(
        refusal(&[lines[0], half]),
        ReadError::Line { line: 2, .. }
    ));
    let newer = text.replacen("\"schema_version\":1", "\"schema_version\":2", 1);
    let refused = read_json_lines(&newer).unwrap_err().to_string();
    let expected = "records of schema 2, expected 1; read them with the commit that wrote them";
    assert_eq!(refused, expected);
}

#[test]
fn the_page_is_self_contained_and_escapes_what_it_shows() {
    let page = html(&run());
    assert!(
        page.contains("half of &lt;one&gt; &amp; a &quot;step&quot;"),
        "{page}"
    );
    for foreign in [
        "<one>", "<script", "src=", "href=", "http://", "@import", "url(",
    ] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    assert_eq!(page.matches("<pre>").count(), 2);
    assert_eq!(page.matches("<svg").count(), 2);
    assert_eq!(page.matches("<details>").count(), 5);
}

#[test]
fn a_run_is_green_only_when_something_ran_and_nothing_is_red() {
    let green = |keep: &[usize]| {
        let mut report = run();
        let mut index = 0..report.cases.len();
        report
            .cases
            .retain(|_| index.next().is_some_and(|i| keep.contains(&i)));
        report.summary().green
    };
    assert!(green(&[0, 2, 4]), "passed, waived, skipped");
    assert!(!green(&[0, 1]) && !green(&[0, 3]));
    assert!(!green(&[]) && !green(&[4]), "nothing ran");
}
