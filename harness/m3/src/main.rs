//! The command line.
//!
//! Every verb is one file of [`commands`] and a thin one: it reads arguments, calls the harness, prints. What a run ends
//! with is one [`exit::Code`]; what went wrong is one [`exit::Failure`], printed as one line.
//!
//! **Absent on purpose**: numerics, tolerances, file formats.

mod cli;
mod commands;
mod device;
mod exit;
mod output;

use std::process::ExitCode;

fn main() -> ExitCode {
    exit::report_panics_in_one_line();
    let ended = std::panic::catch_unwind(|| cli::run(std::env::args_os()));
    ended.map_or(exit::Code::Unexpected, exit::report).into()
}
