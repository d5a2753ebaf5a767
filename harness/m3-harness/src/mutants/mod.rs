//! Planted faults: every gate is shown a subject that is wrong, and has to say so.
//!
//! [`registry`] holds the named faults, each with the cases that must catch it; [`run`] plants one and judges. What is
//! wrong is put between the case and the kernels, so no kernel carries a switch. [`components`] does the same to whole models and runs. [`scaled`] goes gate by gate instead of
//! fault by fault: errors just above and just below each bound, and single elements, rows, blocks and heads off by it.

mod attention;
pub mod components;
mod dense;
mod experts;
mod plant;
pub mod scaled;
mod selection;
mod training;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use m3_gate::record::Device;
use m3_gate::{Gate, GateSet, Patterns};
use m3_kernels::Backend;
use m3_kernels::cpu::CpuBackend;

use crate::cases::{self, Case};
use crate::gate_pipeline;
use plant::Plant;

/// One fault.
pub struct Fault {
    /// What is wrong, in the field's words.
    pub words: &'static str,
    /// Cases that must catch it, each of them, as patterns.
    pub cases: &'static [&'static str],
    plant: Plant,
}

/// What became of a fault.
pub struct Caught {
    /// What is wrong.
    pub words: &'static str,
    /// Gates that were red, by case. A case without any let the fault through.
    pub gates: BTreeMap<String, BTreeSet<String>>,
}

impl Caught {
    /// Cases that let the fault through; one entry saying so when there was no case.
    pub fn survived(&self) -> Vec<String> {
        if self.gates.is_empty() {
            return vec!["no case matches".into()];
        }
        let blind = self.gates.iter().filter(|(_, gates)| gates.is_empty());
        blind.map(|(case, _)| case.clone()).collect()
    }

    /// Every gate that was red.
    pub fn catchers(&self) -> BTreeSet<&str> {
        self.gates.values().flatten().map(String::as_str).collect()
    }
}

impl Caught {
    /// The fault, and the gates that caught it or the cases that did not.
    pub fn line(&self) -> String {
        let survived = self.survived();
        if survived.is_empty() {
            let gates: Vec<&str> = self.catchers().into_iter().collect();
            return format!("caught    {}: {}", self.words, gates.join(", "));
        }
        format!("SURVIVED  {}: {}", self.words, survived.join(", "))
    }
}

/// What a run of planted faults showed.
#[derive(Default)]
pub struct Report {
    /// Named faults.
    pub faults: Vec<Caught>,
    /// Faults at the bound of every gate; none when only some faults were asked for.
    pub scaled: Option<scaled::Scaled>,
}

impl Report {
    /// Gates of the operations that no named fault turned red, by id.
    pub fn idle(&self, gates: &GateSet) -> Vec<String> {
        let caught: BTreeSet<&str> = self.faults.iter().flat_map(Caught::catchers).collect();
        let names: Vec<String> = cases::all::<CpuBackend>()
            .into_iter()
            .map(|case| case.name)
            .collect();
        let judges = |gate: &&Gate| names.iter().any(|name| gate.cases.matches(name));
        let idle = gates.gates().iter().filter(judges);
        idle.filter(|gate| !caught.contains(gate.id.as_str()))
            .map(|gate| gate.id.clone())
            .collect()
    }

    /// Whether every fault was caught, every gate caught one, and every gate flipped at its bound.
    pub fn is_green(&self, gates: &GateSet) -> bool {
        let survived = self
            .faults
            .iter()
            .any(|caught| !caught.survived().is_empty());
        let scaled = self.scaled.as_ref();
        !survived
            && scaled.is_none_or(|scaled| scaled.wrong.is_empty() && self.idle(gates).is_empty())
    }

    /// The counts, and a line for everything that was not caught.
    pub fn summary(&self, gates: &GateSet) -> String {
        let survivors: Vec<String> = self
            .faults
            .iter()
            .filter(|caught| !caught.survived().is_empty())
            .map(Caught::line)
            .collect();
        let mut text = String::new();
        for line in &survivors {
            text += &format!("{line}\n");
        }
        if let Some(scaled) = &self.scaled {
            for line in &scaled.wrong {
                text += &format!("WRONG     {line}\n");
            }
            for gate in self.idle(gates) {
                text += &format!("IDLE      {gate} caught no named fault\n");
            }
            let (trials, wrong) = (scaled.trials, scaled.wrong.len());
            text += &format!(
                "{trials} perturbations at the bounds: {} as they must, {wrong} not\n",
                trials - wrong
            );
        }
        let (faults, survived) = (self.faults.len(), survivors.len());
        text + &format!(
            "{faults} planted faults: {} caught, {survived} survived\n",
            faults - survived
        )
    }
}

fn fault(words: &'static str, cases: &'static [&'static str], plant: Plant) -> Fault {
    Fault {
        words,
        cases,
        plant,
    }
}

/// The repository that this binary was built from: goldens lie there.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Every named fault, in the order of the model.
pub fn registry() -> Vec<Fault> {
    [
        dense::faults(),
        attention::faults(),
        selection::faults(),
        experts::faults(),
        training::faults(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Runs the cases of a fault with the fault planted. A subject that refuses or reports an error is not caught by a gate,
/// so it counts as the gate `runs`.
pub fn run(backend: &CpuBackend, gates: &GateSet, fault: &Fault, seed: u64) -> Caught {
    let faulty = backend.with_fault(fault.plant.clone());
    let patterns = Patterns::new(fault.cases.iter().map(|case| (*case).to_owned()).collect());
    let chosen = cases::all::<CpuBackend>()
        .into_iter()
        .filter(|case| patterns.matches(&case.name));
    Caught {
        words: fault.words,
        gates: chosen
            .map(|case| (case.name.clone(), red(&faulty, gates, &case, seed)))
            .collect(),
    }
}

fn red(
    backend: &CpuBackend,
    gates: &GateSet,
    case: &Case<CpuBackend>,
    seed: u64,
) -> BTreeSet<String> {
    let device = device(backend);
    let record = gate_pipeline::run(backend, &device, gates, case, seed)
        .unwrap_or_else(|error| gate_pipeline::refused(&device, &case.name, seed, &error));
    let red = record
        .verdicts
        .into_iter()
        .filter(|row| !row.verdict.is_green());
    red.map(|row| row.gate).collect()
}

fn device(backend: &CpuBackend) -> Device {
    Device {
        name: backend.name(),
        arch: "cpu".into(),
        ..Device::default()
    }
}
