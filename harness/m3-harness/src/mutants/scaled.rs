//! Every gate at its bound: the subject's own error scaled to just above and just below, and single elements, rows,
//! blocks and heads off by so much that the gate's metric reaches four bounds.

use std::collections::BTreeSet;
use std::ops::Range;

use m3_gate::{Case as Judged, Gate, GateSet, Op, Operand, Operands, Storage, Tensor, judge_case};
use m3_kernels::cpu::CpuBackend;
use m3_spec::dtype::DType;

use crate::cases::{self, Case};
use crate::lab::{Lab, Outcome};

/// Rows of a perturbed block where the case has no key blocks.
const BLOCK: usize = 16;

/// What the recorded outcomes of the cases showed.
#[derive(Default)]
pub struct Scaled {
    /// Perturbations judged.
    pub trials: usize,
    /// Gates that flipped where they had to, by id.
    pub gates: BTreeSet<String>,
    /// Perturbations whose verdict was wrong: gate, case, tensor and what was done.
    pub wrong: Vec<String>,
}

/// Judges every perturbation of every tensor of every case under every gate of its own.
///
/// # Errors
/// What the subject refuses or its device reports.
pub fn run(backend: &CpuBackend, gates: &GateSet, seed: u64) -> m3_kernels::Result<Scaled> {
    let mut scaled = Scaled::default();
    for case in cases::all::<CpuBackend>() {
        let mut lab = Lab::new(backend, case.storage, seed, &case.name);
        case.run(&mut lab)?;
        let judged = lab.finish();
        let block = judged.block_size.unwrap_or(BLOCK);
        for outcome in &judged.outcomes {
            for gate in gates.gates() {
                if let Some(bench) = Bench::new(gates, gate, &case, outcome) {
                    bench.run(block, &mut scaled);
                }
            }
        }
    }
    Ok(scaled)
}

/// One gate and one tensor.
struct Bench<'a> {
    gates: &'a GateSet,
    gate: &'a Gate,
    bound: f64,
    case: Judged<'a>,
    outcome: &'a Outcome,
}

impl<'a> Bench<'a> {
    fn new(
        gates: &'a GateSet,
        gate: &'a Gate,
        case: &'a Case<CpuBackend>,
        outcome: &'a Outcome,
    ) -> Option<Self> {
        let limit = gate.limit.as_ref().filter(|limit| limit.op != Op::Ge)?;
        let (arch, dtype) = ("cpu", storage(case.storage));
        let named = gate.tensor.as_ref()?.matches(&outcome.tensor);
        let case = Judged {
            name: &case.name,
            suite: "ops",
            arch,
            dtype,
        };
        (named && gate.applies(case.name, arch, dtype)).then_some(Bench {
            gates,
            gate,
            bound: limit.bound,
            case,
            outcome,
        })
    }

    fn run(&self, block: usize, scaled: &mut Scaled) {
        if self.bound > 0.0 {
            for (factor, passes) in [(1.25, false), (0.8, true)] {
                let got = self.error_scaled(factor * self.bound);
                self.expect(
                    &format!("error at {factor} of the bound"),
                    &got,
                    passes,
                    scaled,
                );
            }
        }
        for (what, range) in self.regions(block) {
            let got = self.perturbed(range);
            self.expect(&format!("{what} off"), &got, false, scaled);
        }
        let mut got = self.outcome.got.clone();
        got[self.outcome.got.len() / 2] = f64::NAN;
        self.expect("one NaN", &got, false, scaled);
    }

    fn expect(&self, what: &str, got: &[f64], passes: bool, scaled: &mut Scaled) {
        scaled.trials += 1;
        let verdict = self.verdict(got);
        if verdict.0 == passes {
            if !passes {
                scaled.gates.insert(self.gate.id.clone());
            }
            return;
        }
        let (gate, case, tensor) = (&self.gate.id, self.case.name, &self.outcome.tensor);
        let said = if verdict.0 { "passes" } else { "is red" };
        let value = verdict
            .1
            .map_or("no value".into(), |value| format!("{value:.3e}"));
        scaled.wrong.push(format!(
            "{gate} on {case} {tensor}: {what} {said} ({value})"
        ));
    }

    /// Whether this gate is green on these values of the subject, and what it measured.
    fn verdict(&self, got: &[f64]) -> (bool, Option<f64>) {
        let outcome = self.outcome;
        let side = |source, values| {
            Some(Operand {
                source,
                buffer: None,
                shape: &outcome.shape,
                values,
            })
        };
        let operands = Operands {
            got: side("perturbed", got),
            reference: side("reference", &outcome.reference),
            twin: side("rounded twin", &outcome.twin),
            storage: storage(outcome.storage),
        };
        let tensor = Tensor {
            name: &outcome.tensor,
            operands,
            decoder: None,
        };
        let rows = judge_case(self.gates, &self.case, &[tensor]);
        let own = rows
            .iter()
            .find(|row| row.gate == self.gate.id && row.tensor.as_deref() == Some(&outcome.tensor));
        own.map_or((false, None), |row| (row.verdict.is_green(), row.value))
    }

    /// The subject's error, or where there is none alternating signs, at this value of the metric. Every metric with a
    /// bound above 0 grows in proportion to the error.
    fn error_scaled(&self, value: f64) -> Vec<f64> {
        let outcome = self.outcome;
        let errors: Vec<f64> = (0..outcome.got.len())
            .map(|i| outcome.got[i] - outcome.reference[i])
            .collect();
        let own = self.verdict(&outcome.got).1.unwrap_or(0.0);
        if own > 0.0 {
            return self.offset(|i| errors[i] * value / own);
        }
        let sign = |i: usize| if i.is_multiple_of(2) { 1.0 } else { -1.0 };
        let unit = self.verdict(&self.offset(sign)).1.unwrap_or(f64::NAN);
        self.offset(|i| sign(i) * value / unit)
    }

    /// The subject's values with a region so far off that the metric alone reaches four bounds.
    fn perturbed(&self, region: Range<usize>) -> Vec<f64> {
        let inside = |i: usize| if region.contains(&i) { 1.0 } else { 0.0 };
        let unit = self.verdict(&self.offset(inside)).1.unwrap_or(f64::NAN);
        let size = if self.bound > 0.0 {
            4.0 * self.bound / unit
        } else {
            1.0
        };
        let mut got = self.outcome.got.clone();
        for i in region {
            got[i] = self.outcome.reference[i] + size;
        }
        got
    }

    /// The reference with something added to its finite elements.
    fn offset(&self, by: impl Fn(usize) -> f64) -> Vec<f64> {
        let values = self.outcome.reference.iter().enumerate();
        values
            .map(|(i, &x)| if x.is_finite() { x + by(i) } else { x })
            .collect()
    }

    /// An element, a row, a block of rows and a head, each where the reference is finite.
    fn regions(&self, block: usize) -> Vec<(&'static str, Range<usize>)> {
        let shape = &self.outcome.shape;
        let len = self.outcome.got.len();
        let row = shape.last().copied().unwrap_or(1).max(1);
        let token = (len / shape.first().copied().unwrap_or(1).max(1)).max(1);
        let finite = |at: &usize| self.outcome.reference[*at].is_finite();
        let at = (len / 2..len).find(finite).unwrap_or(0);
        let last = (0..len).rev().find(finite).unwrap_or(0);
        let mut regions = vec![
            ("one element", at..at + 1),
            ("the last element", last..last + 1),
        ];
        if shape.len() >= 2 {
            regions.push(("one row", at / row * row..at / row * row + row));
            let start = at / token * token;
            regions.push(("one block", start..(start + block * token).min(len)));
        }
        if shape.len() == 3 {
            // A head of one token; a head of all tokens is no range, and is stronger.
            let start = at / token * token;
            regions.push(("one head", start..start + row));
        }
        regions
    }
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
