//! Every operation case as a test of its own: `cargo nextest run msa_attention::bf16`.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use m3_gate::record::Device;
use m3_gate::{failure_block, failure_line};
use m3_harness::{cases, gate_pipeline, gates, today};
use m3_kernels::cpu::CpuBackend;
use m3_kernels::{Backend, cpu};

/// Seed of the committed runs; `M3_SEED` takes another one.
const SEED: u64 = 0x5eed;

fn main() -> ExitCode {
    let seed = std::env::var("M3_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(SEED);
    let trials = cases::all::<cpu::CpuBackend>()
        .into_iter()
        .map(|case| Trial::test(case.name.clone(), move || judge(&case, seed)))
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn judge(case: &cases::Case<CpuBackend>, seed: u64) -> Result<(), Failed> {
    let backend = CpuBackend::default();
    let device = Device {
        name: backend.name(),
        arch: "cpu".into(),
        ..Device::default()
    };
    let gates = gates::all(today()).map_err(|error| error.to_string())?;
    let record = gate_pipeline::run(&backend, &device, &gates, case, seed)
        .map_err(|error| error.to_string())?;
    match failure_block(&record) {
        None => Ok(()),
        Some(block) => {
            // The runner lifts the line that begins with "Error:" into its reports.
            eprintln!(
                "{block}\nError: {}",
                failure_line(&record).unwrap_or_default()
            );
            Err(Failed::without_message())
        }
    }
}
