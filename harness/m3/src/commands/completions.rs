//! `m3 completions SHELL`: completion script of a shell.

use crate::exit::{Code, Failure};
use crate::output::Output;

/// Print the completion script of a shell
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Shell that reads it
    #[arg(value_enum)]
    shell: clap_complete::Shell,
}

/// The script of `command`, for the shell's completion folder.
pub fn run(args: &Args, mut command: clap::Command, out: &mut Output) -> Result<Code, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "m3", &mut script);
    out.line(String::from_utf8_lossy(&script).trim_end())?;
    Ok(Code::Pass)
}
