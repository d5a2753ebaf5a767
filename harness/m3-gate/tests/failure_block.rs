//! How a failure reads: the whole text, and what each line is made of.

use m3_gate::record::{CaseRecord, Device};
use m3_gate::{
    Case, Date, GateSet, Operand, Operands, Storage, Tensor, Value, failure_block, failure_line,
    judge_case, judge_value, parse_gates,
};

const TODAY: Date = Date {
    year: 2026,
    month: 12,
    day: 1,
};
const CASE: Case<'_> = Case {
    name: "msa_attention::bf16/packed2_t131_b128",
    suite: "ops",
    arch: "sm_90a",
    dtype: Storage::Bf16,
};
/// Two packed sequences, 66 and 65 tokens, blocks of 64 keys: the last block of each is a tail.
const SHAPE: [usize; 3] = [131, 4, 16];
const GATES: &str = r#"
[[gate]]
id = "msa_attention.grad.err_ratio"
tensor = ["dv", "dk"]
metric = "err_ratio"
op = "<="
bound = 2.0
cases = "msa_attention::*"
source = { kind = "analytic", why = "kernel error at most 2x the same maths rounded to bf16" }

[[gate]]
id = "msa_attention.lse.max_abs"
tensor = "lse"
metric = "max_abs"
op = "<="
bound = 1e-3
cases = "msa_attention::*"
source = { kind = "seed", doc = "001" }

[[gate]]
id = "msa_attention.grad.norm_rel"
tensor = "dk"
metric = "norm_rel"
op = "<="
bound = 8e-3
cases = "msa_attention::*"
source = { kind = "analytic", why = "one bf16 step is 2^-7 = 7.8e-3" }
"#;

fn gates() -> GateSet {
    GateSet::new([parse_gates("gates/msa_attention.toml", GATES, TODAY).unwrap()]).unwrap()
}

fn terms(index: usize) -> String {
    let (token, head) = (index / 64, index / 16 % 4);
    let (sequence, token, keys) = if token < 66 {
        (0, token, 66)
    } else {
        (1, token - 66, 65)
    };
    let block = token / 64;
    let tail = keys - 64;
    let bracket = if block == 1 {
        format!(" (tail, {tail} of 64 keys)")
    } else {
        String::new()
    };
    format!("sequence {sequence}, token {token}, kv head {head}, key block {block}{bracket}")
}

/// A tensor whose reference is off the bf16 grid, its rounded twin, and a subject equal to the twin.
struct Planted {
    got: Vec<f64>,
    reference: Vec<f64>,
    twin: Vec<f64>,
}

impl Planted {
    fn new() -> Self {
        let elements = SHAPE.iter().product::<usize>();
        let wave = |i: usize| 1.0 + 0.5 * ((i * 37 % 101) as f64 / 101.0);
        let reference: Vec<f64> = (0..elements).map(wave).collect();
        let twin: Vec<f64> = reference.iter().map(|&x| Storage::Bf16.round(x)).collect();
        Planted {
            got: twin.clone(),
            reference,
            twin,
        }
    }

    fn tensor<'a>(&'a self, name: &'a str) -> Tensor<'a> {
        let operand = |source, values| {
            Some(Operand {
                source,
                buffer: None,
                shape: &SHAPE,
                values,
            })
        };
        let operands = Operands {
            got: operand("cuda", &self.got),
            reference: operand("reference", &self.reference),
            twin: operand("twin", &self.twin),
            storage: Storage::Bf16,
        };
        Tensor {
            name,
            operands,
            decoder: Some(&terms),
        }
    }
}

fn record(lse: &Planted, dv: &Planted, dk: &Planted) -> CaseRecord {
    let tensors = [lse.tensor("lse"), dv.tensor("dv"), dk.tensor("dk")];
    CaseRecord {
        case: CASE.name.to_owned(),
        seed: 0x5eed_0017,
        inputs_digest: "9f3c52aa".to_owned(),
        record: "target/m3/run/01J/msa_attention.jsonl".to_owned(),
        device: Device {
            name: "H200".to_owned(),
            arch: "sm_90a".to_owned(),
            driver: Some("580.1".to_owned()),
            cuda: Some("13.0".to_owned()),
        },
        duration_ms: 412,
        skipped: None,
        verdicts: judge_case(&gates(), &CASE, &tensors),
    }
}

/// lse keeps its bound only when it is exact here: its planted twin is 2^-8 off.
fn exact() -> Planted {
    let mut lse = Planted::new();
    lse.got = lse.reference.clone();
    lse
}

#[test]
fn a_green_case_has_no_block() {
    assert_eq!(
        failure_block(&record(&exact(), &Planted::new(), &Planted::new())),
        None
    );
}

#[test]
fn a_fault_in_the_tail_blocks_reads_in_the_models_terms() {
    let mut dk = Planted::new();
    for i in (0..dk.got.len()).filter(|&i| terms(i).contains("tail") && i % 3 == 0) {
        dk.got[i] = Storage::Bf16.round(dk.got[i] * 1.03);
    }
    dk.got[700] = Storage::Bf16.round(dk.got[700] * 1.02);
    let block = failure_block(&record(&exact(), &Planted::new(), &dk)).unwrap();
    assert!(block.lines().count() <= 14);
    insta::assert_snapshot!(block);
}

#[test]
fn nan_reads_as_an_error_with_its_place_and_every_line_there_is_fits() {
    let (mut dv, mut dk) = (Planted::new(), Planted::new());
    for token in 100..108 {
        dv.got[64 * token + 17] = f64::NAN;
    }
    dk.got[5] = f64::INFINITY;
    let block = failure_block(&record(&exact(), &dv, &dk)).unwrap();
    assert_eq!(block.lines().count(), 14);
    insta::assert_snapshot!(block);
}

#[test]
fn a_failure_in_one_line_names_case_gate_and_element() {
    let (mut dv, mut dk) = (Planted::new(), Planted::new());
    dk.got[64 * 2 + 16 + 3] = 3.0;
    let line = failure_line(&record(&exact(), &dv, &dk)).unwrap();
    let start = "FAIL msa_attention::bf16/packed2_t131_b128 dk.err_ratio ";
    assert!(
        line.starts_with(start) && line.ends_with(" > 2.0 at dk[2, 1, 3]"),
        "{line}"
    );
    dv.got[7] = f64::NAN;
    let line = failure_line(&record(&exact(), &dv, &dk)).unwrap();
    let end = "dv.err_ratio: got holds 1 NaN, the first at element 7 at dv[0, 0, 7]";
    assert!(line.starts_with("ERROR ") && line.ends_with(end), "{line}");
    assert_eq!(
        failure_line(&record(&exact(), &Planted::new(), &Planted::new())),
        None
    );
}

#[test]
fn a_block_is_the_same_after_its_record_was_written_and_read() {
    let mut dk = Planted::new();
    dk.got[700] = 3.0;
    let record = record(&exact(), &Planted::new(), &dk);
    let text = serde_json::to_string(&record).unwrap();
    let read: CaseRecord = serde_json::from_str(&text).unwrap();
    assert_eq!(failure_block(&read), failure_block(&record));
}

#[test]
fn the_first_failing_stage_is_first_in_stage_order() {
    let (mut lse, mut dk) = (exact(), Planted::new());
    lse.got[0] += 1.0;
    dk.got[0] += 1.0;
    let block = failure_block(&record(&lse, &Planted::new(), &dk)).unwrap();
    assert!(
        block.contains("stages  lse FAIL (first), dv ok, dk FAIL\n"),
        "{block}"
    );
    assert!(
        block.contains("gate    lse.max_abs = 1, bound <= 1e-3 (block)\n"),
        "{block}"
    );
}

#[test]
fn a_run_gate_reads_without_a_tensor() {
    let gates = parse_gates(
        "gates/e2e/echo.toml",
        "[[gate]]\nid = \"logprob_gap\"\nmetric = \"value\"\nop = \"<=\"\nbound = 5e-3\n\
         cases = \"*\"\nsource = { kind = \"literature\", cite = \"published gap 0.0050\" }\n",
        TODAY,
    );
    let set = GateSet::new([gates.unwrap()]).unwrap();
    let value = Value {
        value: Some(0.0123),
        step: Some(7),
        history: &[],
    };
    let case = Case {
        name: "recipe::echo",
        suite: "e2e",
        arch: "cpu",
        dtype: Storage::F32,
    };
    let mut record = record(&exact(), &Planted::new(), &Planted::new());
    record.case = case.name.to_owned();
    record.device = Device {
        name: "cpu".into(),
        arch: "cpu".into(),
        driver: None,
        cuda: None,
    };
    record.verdicts = judge_value(&set, &set.gates()[0], &case, value);
    insta::assert_snapshot!(failure_block(&record).unwrap());
}
