//! From operands to verdicts: what passes, what fails, what is an error, and when a run is green.

use m3_gate::record::{CaseRecord, Device, VerdictRecord};
use m3_gate::{
    Bound, Case, Date, GateSet, Operand, Operands, Severity, Storage, Tensor, Value, Verdict,
    is_green, judge_case, judge_value, parse_gates, series_id, verdicts_json,
};

const TODAY: Date = Date {
    year: 2026,
    month: 12,
    day: 1,
};
const CASE: Case<'_> = Case {
    name: "op::f32/t4",
    suite: "ops",
    arch: "cpu",
    dtype: Storage::F32,
};
const SOURCE: &str = "source = { kind = \"analytic\", why = \"w\" }";

fn gates(text: &str) -> GateSet {
    let file = parse_gates("op.toml", &text.replace("SOURCE", SOURCE), TODAY).unwrap();
    GateSet::new([file]).unwrap()
}

fn max_abs(bound: &str) -> GateSet {
    gates(&format!(
        "[[gate]]\nid=\"op.o\"\ntensor=\"o\"\nmetric=\"max_abs\"\nop=\"<=\"\nbound={bound}\n\
         cases=\"op::*\"\nSOURCE\n"
    ))
}

fn tensor<'a>(
    name: &'a str,
    shape: &'a [usize],
    got: &'a [f64],
    reference: &'a [f64],
) -> Tensor<'a> {
    let operand = |source, values| {
        Some(Operand {
            source,
            buffer: None,
            shape,
            values,
        })
    };
    let operands = Operands {
        got: operand("subject", got),
        reference: operand("reference", reference),
        twin: None,
        storage: Storage::F32,
    };
    Tensor {
        name,
        operands,
        decoder: None,
    }
}

fn one(gates: &GateSet, got: &[f64], reference: &[f64]) -> VerdictRecord {
    let shape = [got.len()];
    // A copy: the compiler may lay equal constants on one another, and then they are aliased.
    let reference = reference.to_vec();
    let mut verdicts = judge_case(gates, &CASE, &[tensor("o", &shape, got, &reference)]);
    assert_eq!(verdicts.len(), 1);
    verdicts.remove(0)
}

#[test]
fn a_bound_is_kept_up_to_and_at_its_value() {
    let verdict = |got| one(&max_abs("0.5"), &[got], &[1.0]).verdict;
    assert_eq!(verdict(1.5), Verdict::Pass);
    assert_eq!(verdict(1.5000001), Verdict::Fail);
}

#[test]
fn a_planted_nan_is_an_error_under_the_widest_bound() {
    let row = one(&max_abs("1e300"), &[1.0, f64::NAN], &[1.0, 1.0]);
    assert_eq!((row.verdict, row.value), (Verdict::Error, None));
    assert_eq!(
        row.note.as_deref(),
        Some("got holds 1 NaN, the first at element 1")
    );
    let evidence = row.evidence.unwrap();
    assert_eq!((evidence.nan, evidence.worst.unwrap().index), (1, 1));
}

#[test]
fn a_gate_without_its_tensor_is_an_error() {
    let verdicts = judge_case(&max_abs("1.0"), &CASE, &[]);
    assert_eq!(verdicts[0].verdict, Verdict::Error);
    let note = verdicts[0].note.as_deref();
    assert_eq!(note, Some("o is missing: the case produced no such tensor"));
}

#[test]
fn a_tensor_without_a_gate_is_an_error() {
    let (got, reference) = (vec![1.0], vec![1.0]);
    let tensors = [
        tensor("o", &[1], &got, &reference),
        tensor("lse", &[1], &got, &reference),
    ];
    let verdicts = judge_case(&max_abs("1.0"), &CASE, &tensors);
    assert_eq!(verdicts[0].verdict, Verdict::Pass);
    assert_eq!(
        (verdicts[1].verdict, verdicts[1].gate.as_str()),
        (Verdict::Error, "ungated")
    );
    assert!(!is_green(&verdicts));
}

#[test]
fn a_gate_of_another_case_is_silent() {
    let other = Case {
        name: "other::f32/t4",
        ..CASE
    };
    assert!(judge_case(&max_abs("1.0"), &other, &[]).is_empty());
}

#[test]
fn a_waiver_excuses_a_failure_and_never_an_error() {
    let waived = gates(
        "[[gate]]\nid=\"op.o\"\ntensor=\"o\"\nmetric=\"max_abs\"\nop=\"<=\"\nbound=0.5\n\
         cases=\"op::*\"\nSOURCE\n[[waiver]]\ngate=\"op.o\"\ncases=\"op::f32/*\"\nissue=\"#7\"\n\
         until=2026-12-01\n",
    );
    let row = one(&waived, &[2.0], &[1.0]);
    assert_eq!(row.verdict, Verdict::Waived);
    assert_eq!(row.note.as_deref(), Some("waived until 2026-12-01: #7"));
    assert!(is_green(&[row]));
    assert_eq!(one(&waived, &[f64::NAN], &[1.0]).verdict, Verdict::Error);
    let mended = one(&waived, &[1.0], &[1.0]);
    assert_eq!(mended.verdict, Verdict::Pass);
    assert_eq!(
        mended.note.as_deref(),
        Some("passes: the waiver for #7 (op.toml:9) can go")
    );
}

const GRAD_NORM: &str = "[[gate]]\nid=\"grad_norm\"\nmetric=\"value\"\nop=\"<=\"\nbound=1e-5\n\
    cases=\"*\"\nSOURCE\n[gate.band]\nrel=0.1\nfloor=1e-9\nhistory_min=2\nSOURCE\n";

fn grad_norm(value: Option<f64>, history: &[f64]) -> Vec<VerdictRecord> {
    let gates = gates(GRAD_NORM);
    let gate = gates.gate("grad_norm").unwrap();
    judge_value(
        &gates,
        gate,
        &CASE,
        Value {
            value,
            step: Some(3),
            history,
        },
    )
}

#[test]
fn a_bound_and_a_band_are_two_rows_under_one_id() {
    let rows = grad_norm(Some(5e-6), &[4e-6, 4e-6]);
    let seen: Vec<_> = rows
        .iter()
        .map(|r| (r.gate.as_str(), r.severity, r.verdict))
        .collect();
    let expected = [
        ("grad_norm", Severity::Block, Verdict::Pass),
        ("grad_norm", Severity::Shadow, Verdict::Fail),
    ];
    assert_eq!(seen, expected);
    assert!(matches!(rows[1].bound, Some(Bound::Range([low, high])) if low < 4e-6 && high > 4e-6));
    assert!(is_green(&rows), "shadow turns nothing red");
}

#[test]
fn a_band_without_history_is_inactive() {
    let rows = grad_norm(Some(5e-6), &[]);
    assert_eq!((rows[1].verdict, rows[1].bound), (Verdict::Inactive, None));
    assert!(is_green(&rows));
}

#[test]
fn a_value_that_is_missing_or_not_finite_is_an_error() {
    for value in [None, Some(f64::NAN), Some(f64::NEG_INFINITY)] {
        let rows = grad_norm(value, &[4e-6, 4e-6]);
        assert!(
            rows.iter()
                .all(|row| row.verdict == Verdict::Error && row.value.is_none())
        );
        assert!(!is_green(&rows));
    }
}

#[test]
fn a_run_that_judged_nothing_is_not_green() {
    assert!(!is_green(&[]));
    let shadow_only = grad_norm(Some(5e-6), &[]).split_off(1);
    assert!(!is_green(&shadow_only));
}

#[test]
fn an_inactive_block_verdict_is_not_green() {
    let mut rows = grad_norm(Some(5e-6), &[]);
    rows[1].severity = Severity::Block;
    assert!(!is_green(&rows));
}

#[test]
fn verdicts_json_keeps_its_contract() {
    let expected = r#"{
  "schema": 1,
  "verdicts": [
    {
      "gate": "grad_norm",
      "case": "op::f32/t4",
      "step": 3,
      "metric": "value",
      "value": 5e-6,
      "bound": 0.00001,
      "verdict": "PASS",
      "severity": "block",
      "source": "analytic, w"
    },
    {
      "gate": "grad_norm",
      "case": "op::f32/t4",
      "step": 3,
      "metric": "value",
      "value": 5e-6,
      "bound": null,
      "verdict": "INACTIVE",
      "severity": "shadow",
      "source": "analytic, w"
    }
  ]
}"#;
    assert_eq!(verdicts_json(&grad_norm(Some(5e-6), &[])), expected);
}

#[test]
fn a_record_survives_json_with_its_non_finite_numbers() {
    let verdicts = vec![one(&max_abs("0.5"), &[f64::INFINITY, 1.0], &[1.0, 1.0])];
    let record = CaseRecord {
        case: "op::f32/t4".into(),
        seed: u64::MAX,
        inputs_digest: "00".into(),
        record: "r.jsonl".into(),
        device: Device::default(),
        duration_ms: 1,
        skipped: None,
        verdicts,
    };
    let text = serde_json::to_string(&record).unwrap();
    assert!(text.contains("\"got\":\"inf\""), "{text}");
    assert_eq!(serde_json::from_str::<CaseRecord>(&text).unwrap(), record);
}

#[test]
fn a_series_is_its_test_suite_arch_gate_and_step() {
    let (a, b) = (max_abs("0.5"), max_abs("0.50"));
    let id = |test, suite, arch, set: &GateSet, step| {
        series_id(test, suite, arch, &set.gates()[0], step)
    };
    let first = id("t", "s", "cpu", &a, None);
    assert_eq!(first, id("t", "s", "cpu", &max_abs("0.5"), None));
    let others = [
        id("u", "s", "cpu", &a, None),
        id("t", "v", "cpu", &a, None),
        id("t", "s", "sm_90a", &a, None),
        id("t", "s", "cpu", &b, None),
        id("t", "s", "cpu", &a, Some(0)),
        id("ts", "", "cpu", &a, None),
    ];
    assert!(others.iter().all(|other| *other != first));
    // Pinned: histories are looked up by this string.
    assert_eq!(first, "c98b1676e0cbeca546ae9bb6b9f69970");
}
