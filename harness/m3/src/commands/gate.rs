//! `m3 gate`: run operation cases and judge them.

use clap::ValueEnum;
use m3_gate::record::{CaseRecord, Device as RecordDevice, Run};
use m3_harness::{cases, gate_pipeline, gates, today};
use m3_kernels::Backend;
use m3_report::GateRun;

use crate::commands::{seed, threads};
use crate::device::{Device, with_backend};
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Run operation cases and judge their gates
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Part of the case names, such as `msa_attention::bf16`; all cases without it
    #[arg(default_value = "")]
    filter: String,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, env = "M3_DEVICE", default_value_t)]
    device: Device,
    /// Worker threads of the CPU; one per core by default
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// Seed of the inputs, decimal or 0x…
    #[arg(long, env = "M3_SEED", default_value = "0x5eed", value_parser = seed)]
    seed: u64,
    /// Form of the report
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Plant every known fault instead, and fail when a gate lets one through; FILTER is a part of a fault's words
    #[cfg(debug_assertions)]
    #[arg(long, conflicts_with = "format")]
    mutants: bool,
}

/// Form of the report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A line a case, a block a failure.
    #[default]
    Human,
    /// One record a line.
    Json,
    /// JUnit XML.
    Junit,
}

/// Exit code 100 when a gate fails, 4 when nothing matches.
pub fn run(args: &Args, out: &mut Output) -> Result<Code, Failure> {
    #[cfg(debug_assertions)]
    if args.mutants {
        return mutants(args, out);
    }
    let records = with_backend!(args.device, args.threads, backend => judge(&backend, args)?);
    if records.is_empty() {
        let filter = &args.filter;
        return Err(Failure::new(
            Code::NothingSelected,
            format!("no case matches {filter:?}; m3 list --cases names them"),
        ));
    }
    let green = records.iter().all(|record| record.verdict().is_green());
    let report = GateRun {
        run: described(args, &records),
        cases: records,
    };
    let text = match args.format {
        Format::Human => m3_report::terminal(&report),
        Format::Json => m3_report::json_lines(&report),
        Format::Junit => m3_report::junit(&report)
            .map_err(|error| Failure::new(Code::Unexpected, format!("JUnit report: {error}")))?,
    };
    out.line(text.trim_end())?;
    Ok(if green { Code::Pass } else { Code::GateFailed })
}

/// One line a fault, then what the gates were shown beside the named faults.
#[cfg(debug_assertions)]
fn mutants(args: &Args, out: &mut Output) -> Result<Code, Failure> {
    use m3_harness::mutants;
    if args.device != Device::Cpu {
        let words = "planted faults run on the CPU; leave --device out";
        return Err(Failure::new(Code::Usage, words));
    }
    let backend = m3_kernels::cpu::CpuBackend::default();
    let gates = gates::all(today())?;
    let mut report = mutants::Report::default();
    for fault in mutants::registry() {
        if fault.words.contains(&args.filter) {
            let caught = mutants::run(&backend, &gates, &fault, args.seed);
            out.line(caught.line())?;
            report.faults.push(caught);
        }
    }
    let root = mutants::root();
    for fault in mutants::components::registry() {
        if fault.words.contains(&args.filter) {
            let caught = mutants::components::run(&backend, &gates, &fault, root)?;
            out.line(caught.line())?;
            report.faults.push(caught);
        }
    }
    if report.faults.is_empty() {
        let words = format!("no planted fault says {:?}", args.filter);
        return Err(Failure::new(Code::NothingSelected, words));
    }
    if args.filter.is_empty() {
        report.scaled = Some(mutants::scaled::run(&backend, &gates, args.seed)?);
    }
    out.line(report.summary(&gates).trim_end())?;
    Ok(if report.is_green(&gates) {
        Code::Pass
    } else {
        Code::GateFailed
    })
}

fn described(args: &Args, records: &[CaseRecord]) -> Run {
    let started = m3_harness::now_utc();
    Run {
        id: format!("gate-{started}"),
        commit: "unknown".into(),
        started_utc: started,
        seed: args.seed,
        tier: "ci".into(),
        device: records
            .first()
            .map(|record| record.device.clone())
            .unwrap_or_default(),
    }
}

fn judge<B: Backend>(backend: &B, args: &Args) -> Result<Vec<CaseRecord>, Failure> {
    let gates = gates::all(today())?;
    let device = record_device(backend);
    let chosen = cases::all::<B>()
        .into_iter()
        .filter(|case| case.name.contains(&args.filter));
    let record = |case: cases::Case<B>| {
        let judged = gate_pipeline::run(backend, &device, &gates, &case, args.seed);
        judged
            .unwrap_or_else(|error| gate_pipeline::refused(&device, &case.name, args.seed, &error))
    };
    Ok(chosen.map(record).collect())
}

fn record_device<B: Backend>(backend: &B) -> RecordDevice {
    let arch = match backend.arch() {
        m3_kernels::launch::Arch::Cpu => "cpu".into(),
        m3_kernels::launch::Arch::Sm(number) => format!("sm_{number}"),
    };
    RecordDevice {
        name: backend.name(),
        arch,
        ..RecordDevice::default()
    }
}
