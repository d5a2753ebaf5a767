//! From a case to its record: inputs → reference ∥ rounded twin ∥ subject → compare → gates → record.

use std::time::Instant;

use m3_gate::record::{CaseRecord, Device, VerdictRecord};
use m3_gate::{GateSet, Metric, Operand, Operands, Severity, Storage, Verdict, judge_case};
use m3_kernels::Backend;
use m3_spec::decode::{Layout, describe};
use m3_spec::dtype::DType;

use crate::cases::Case;
use crate::lab::{Judged, Lab, Outcome};

/// Suite that operation cases belong to.
const SUITE: &str = "ops";

/// Runs one case on a device and judges every tensor it produced.
///
/// # Errors
/// What the subject refuses or its device reports; a case that cannot run has no verdict to hide behind.
pub fn run<B: Backend>(
    backend: &B,
    device: &Device,
    gates: &GateSet,
    case: &Case<B>,
    seed: u64,
) -> m3_kernels::Result<CaseRecord> {
    let started = Instant::now();
    let mut lab = Lab::new(backend, case.storage, seed, &case.name);
    case.run(&mut lab)?;
    let subject = Subject {
        op: case.op,
        suite: SUITE,
        storage: storage(case.storage),
        device,
    };
    let mut record = judge(&subject, gates, &case.name, &lab.finish(), seed);
    record.duration_ms = started.elapsed().as_millis() as u64;
    Ok(record)
}

/// The record of a case that could not run: one ERROR, with what the subject said.
pub fn refused(device: &Device, case: &str, seed: u64, error: &m3_kernels::Error) -> CaseRecord {
    let verdict = VerdictRecord {
        gate: "runs".into(),
        case: case.to_owned(),
        step: None,
        tensor: None,
        metric: Metric::Value,
        value: None,
        op: None,
        bound: None,
        bound_text: "the case runs".into(),
        verdict: Verdict::Error,
        severity: Severity::Block,
        source: "analytic, what does not run has not been judged".into(),
        at: String::new(),
        series: String::new(),
        note: Some(error.to_string()),
        evidence: None,
    };
    CaseRecord {
        case: case.to_owned(),
        seed,
        inputs_digest: String::new(),
        record: String::new(),
        skipped: None,
        device: device.clone(),
        duration_ms: 0,
        verdicts: vec![verdict],
    }
}

/// What is judged, besides its tensors.
pub struct Subject<'a> {
    /// Operation whose spec names the elements; any other word leaves them without names.
    pub op: &'a str,
    /// Suite that asked.
    pub suite: &'a str,
    /// Storage type of the case.
    pub storage: Storage,
    /// Machine.
    pub device: &'a Device,
}

/// Judges what a case put up.
pub fn judge(
    subject: &Subject<'_>,
    gates: &GateSet,
    case: &str,
    lab: &Judged,
    seed: u64,
) -> CaseRecord {
    let Subject {
        op,
        suite,
        storage,
        device,
    } = *subject;
    let judged = m3_gate::Case {
        name: case,
        suite,
        arch: &device.arch,
        dtype: storage,
    };
    let decoders: Vec<_> = lab
        .outcomes
        .iter()
        .map(|outcome| move |index| element_name(op, lab, outcome, index))
        .collect();
    let tensors: Vec<m3_gate::Tensor<'_>> = lab
        .outcomes
        .iter()
        .zip(&decoders)
        .map(|(outcome, decoder)| m3_gate::Tensor {
            name: &outcome.tensor,
            operands: operands(outcome, &device.name),
            decoder: Some(decoder),
        })
        .collect();
    CaseRecord {
        case: case.to_owned(),
        seed,
        inputs_digest: format!("{:016x}", lab.digest.0[0]),
        record: String::new(),
        skipped: None,
        device: device.clone(),
        duration_ms: 0,
        verdicts: judge_case(gates, &judged, &tensors),
    }
}

fn operands<'a>(outcome: &'a Outcome, subject: &'a str) -> Operands<'a> {
    let side = |source: &'a str, values: &'a [f64]| {
        Some(Operand {
            source,
            buffer: None,
            shape: &outcome.shape,
            values,
        })
    };
    Operands {
        got: side(subject, &outcome.got),
        reference: side("reference", &outcome.reference),
        twin: side("rounded twin", &outcome.twin),
        storage: storage(outcome.storage),
    }
}

/// An element in the words of the op's spec: `sequence 1, token 4097, kv head 2, key block 32`.
fn element_name(op: &str, lab: &Judged, outcome: &Outcome, index: usize) -> String {
    let layout = Layout {
        cu_seqlens: lab.cu_seqlens.as_deref(),
        block_size: lab.block_size,
        expert_offsets: lab.expert_offsets.as_deref(),
    };
    let spec = m3_spec::ops::named(op).and_then(|spec| spec.tensor(&outcome.tensor));
    let described = spec.and_then(|spec| describe(spec, &outcome.shape, index, &layout));
    let words = described.as_deref().and_then(|text| text.split_once(" = "));
    words.map_or_else(String::new, |(_, words)| words.to_owned())
}

fn storage(dtype: DType) -> Storage {
    match dtype {
        DType::BF16 => Storage::Bf16,
        DType::F32 => Storage::F32,
        DType::I32 => Storage::I32,
        DType::U32 | DType::U64 => Storage::U32,
        DType::U8 => Storage::U8,
    }
}
