//! `m3 doctor`: what this machine offers.

use std::fs;

use m3_kernels::cpu::CpuBackend;
use m3_kernels::cpu::simd::Isa;
use m3_kernels::cuda::CudaBackend;

use crate::exit::{Code, Failure};
use crate::output::Output;

/// Show what this machine offers: CPU, threads, memory, GPU
#[derive(clap::Args, Debug)]
pub struct Args {}

/// One line per fact. A machine without a GPU is in order: exit 0.
pub fn run(_: &Args, out: &mut Output) -> Result<Code, Failure> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let backend = CpuBackend::new(threads)?;
    let cuda = match CudaBackend::open(0) {
        Ok(device) => m3_kernels::Backend::name(&device),
        Err(error) => error.to_string(),
    };
    let facts = [
        ("m3", format!("{} ({})", env!("CARGO_PKG_VERSION"), build())),
        (
            "system",
            format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        ),
        ("cpu", described("/proc/cpuinfo", "model name")),
        ("features", features()),
        ("kernels", format!("{:?}", Isa::current()).to_lowercase()),
        ("threads", backend.threads().to_string()),
        ("memory", described("/proc/meminfo", "MemTotal")),
        ("cuda", cuda),
    ];
    for (name, value) in facts {
        out.line(format_args!("{name:<9} {value}"))?;
    }
    Ok(Code::Pass)
}

fn build() -> &'static str {
    if cfg!(debug_assertions) {
        "debug assertions on"
    } else {
        "release"
    }
}

/// The value of a `key : value` line of a file, where the system has such a file.
fn described(file: &str, key: &str) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(key)?.split_once(':'));
    value.map_or("unknown".into(), |(_, value)| value.trim().into())
}

/// Instruction sets that a kernel body may be compiled for, as far as this machine has them.
fn features() -> String {
    macro_rules! present {
        ($($name:tt)*) => {
            [$(($name, is_x86_feature_detected!($name))),*]
        };
    }
    #[cfg(target_arch = "x86_64")]
    let features =
        present!("avx2" "fma" "avx512f" "avx512bw" "avx512dq" "avx512vl" "avx512bf16").to_vec();
    #[cfg(not(target_arch = "x86_64"))]
    let features: Vec<(&str, bool)> = Vec::new();
    let present: Vec<_> = features
        .iter()
        .filter(|(_, here)| *here)
        .map(|(name, _)| *name)
        .collect();
    if present.is_empty() {
        "none beyond the baseline".into()
    } else {
        present.join(" ")
    }
}
