//! Every operation case as a test of its own: `cargo nextest run msa_attention::bf16`, and on a GPU, where there is one,
//! as `cuda::msa_attention::bf16/…`.

use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Failed, Trial};
use m3_gate::record::Device;
use m3_gate::{failure_block, failure_line};
use m3_harness::{cases, gate_pipeline, gates, today};
use m3_kernels::Backend;
use m3_kernels::cpu::CpuBackend;
use m3_kernels::cuda::CudaBackend;
use m3_kernels::launch::Arch;

/// Seed of the committed runs; `M3_SEED` takes another one.
const SEED: u64 = 0x5eed;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let seed = std::env::var("M3_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(SEED);
    let mut trials = cpu_trials(seed);
    trials.extend(cuda_trials(seed, !arguments.list));
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn cpu_trials(seed: u64) -> Vec<Trial> {
    let trial = |case: cases::Case<CpuBackend>| {
        Trial::test(case.name.clone(), move || {
            judge(&CpuBackend::default(), &case, seed)
        })
    };
    cases::all().into_iter().map(trial).collect()
}

/// The same cases on GPU 0; ignored where there is none, and `say` then prints why.
fn cuda_trials(seed: u64, say: bool) -> Vec<Trial> {
    let absent = CudaBackend::probe(0).err();
    if let Some(reason) = absent.as_ref().filter(|_| say) {
        eprintln!("cuda:: cases are ignored: {reason}");
    }
    let opened: Arc<OnceLock<m3_kernels::Result<CudaBackend>>> = Arc::default();
    let trial = |case: cases::Case<CudaBackend>| {
        let (name, opened) = (format!("cuda::{}", case.name), opened.clone());
        let run = move || match opened.get_or_init(|| CudaBackend::open(0)) {
            Ok(backend) => judge(backend, &case, seed),
            Err(error) => Err(error.to_string().into()),
        };
        (name, run)
    };
    let trials = cases::all().into_iter().map(trial);
    trials
        .map(|(name, run)| Trial::test(name, run).with_ignored_flag(absent.is_some()))
        .collect()
}
fn judge<B: Backend>(backend: &B, case: &cases::Case<B>, seed: u64) -> Result<(), Failed> {
    let device = Device {
        name: backend.name(),
        arch: match backend.arch() {
            Arch::Cpu => "cpu".into(),
            Arch::Sm(capability) => format!("sm_{capability}"),
        },
        ..Device::default()
    };
    let gates = gates::all(today()).map_err(|error| error.to_string())?;
    let record = gate_pipeline::run(backend, &device, &gates, case, seed)
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
