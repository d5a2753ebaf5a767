//! Compiles every CUDA kernel for every target and prints its resources: `compile_kernels [TARGET...]`.
//!
//! Needs NVRTC on the loader's path and no GPU. Exits 1 when a kernel does not compile.

use std::process::ExitCode;

use m3_kernels::cuda::compile::{SOURCES, compile, version};

/// Chips the kernels are for; sm_80 is the oldest that the generic path runs on.
const TARGETS: [&str; 5] = ["sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120"];

fn main() -> ExitCode {
    let (major, minor) = match version() {
        Ok(version) => version,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("NVRTC {major}.{minor}");
    println!(
        "{:<20} {:<8} {:<40} {:>9} {:>8} {:>7} {:>7}",
        "file", "target", "kernel", "registers", "shared B", "stack B", "spill B"
    );
    let named: Vec<String> = std::env::args().skip(1).collect();
    let targets: Vec<&str> = match named.is_empty() {
        true => TARGETS.to_vec(),
        false => named.iter().map(String::as_str).collect(),
    };
    let mut failures = 0;
    for source in SOURCES {
        for target in &targets {
            match compile(*source, target, true) {
                Ok(compiled) => print_resources(source.file, target, &compiled.log),
                Err(error) => {
                    failures += 1;
                    eprintln!("error: {error}");
                }
            }
        }
    }
    ExitCode::from(u8::from(failures > 0))
}

/// Rows of the assembler's report, one a kernel; anything else it said is passed on.
fn print_resources(file: &str, target: &str, log: &str) {
    let (mut kernel, mut stack, mut spill) = ("", 0, 0);
    for line in log.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let before = |word: &str| -> u64 {
            let place = words.iter().position(|&w| w.trim_end_matches(',') == word);
            let number = place
                .and_then(|place| place.checked_sub(1))
                .map(|place| words[place]);
            number.and_then(|number| number.parse().ok()).unwrap_or(0)
        };
        let bytes_of = |what: &str| -> u64 {
            let Some(end) = line.find(what) else { return 0 };
            let head = line[..end].trim_end().trim_end_matches("bytes").trim_end();
            head.rsplit([' ', ','])
                .next()
                .and_then(|n| n.parse().ok())
                .unwrap_or(0)
        };
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            kernel = rest.split('\'').next().unwrap_or("");
        } else if line.contains("stack frame") {
            stack = bytes_of("stack frame");
            spill = bytes_of("spill stores") + bytes_of("spill loads");
        } else if line.contains("Used ") && line.contains("registers") {
            let (registers, shared) = (before("registers"), bytes_of("smem"));
            println!(
                "{file:<20} {target:<8} {kernel:<40} {registers:>9} {shared:>8} {stack:>7} {spill:>7}"
            );
        } else if line.contains("warning") {
            println!("{file} {target}: {line}");
        }
    }
}
