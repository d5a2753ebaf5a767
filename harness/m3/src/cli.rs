//! Arguments to a verb, and a verb to a code.

use std::ffi::OsString;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};

use crate::commands::{completions, doctor, gate, generate, list, logprobs, op, train};
use crate::exit::{self, Code, Failure};
use crate::output::Output;

/// Trains and samples MiniMax-M3 behind numerical gates.
#[derive(Debug, Parser)]
#[command(name = "m3", version, after_help = exit::table(), disable_help_subcommand = true, arg_required_else_help = false)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Train(train::Args),
    Logprobs(logprobs::Args),
    Generate(generate::Args),
    Gate(gate::Args),
    List(list::Args),
    Op(op::Args),
    Doctor(doctor::Args),
    Completions(completions::Args),
}

/// Runs one command line.
pub fn run(args: impl IntoIterator<Item = OsString>) -> Result<Code, Failure> {
    let mut out = Output::stdout();
    let verb = match Cli::try_parse_from(args) {
        Ok(cli) => cli.verb,
        Err(answer) if is_help(&answer) => {
            out.line(answer.to_string().trim_end())?;
            out.finish()?;
            return Ok(Code::Pass);
        }
        Err(error) => return Err(Failure::usage(in_one_line(&error.to_string()))),
    };
    let code = match verb {
        Verb::Train(args) => train::run(&args, &mut out),
        Verb::Logprobs(args) => logprobs::run(&args, &mut out),
        Verb::Generate(args) => generate::run(&args, &mut out),
        Verb::Gate(args) => gate::run(&args, &mut out),
        Verb::List(args) => list::run(&args, &mut out),
        Verb::Op(args) => op::run(&args, &mut out),
        Verb::Doctor(args) => doctor::run(&args, &mut out),
        Verb::Completions(args) => completions::run(&args, Cli::command(), &mut out),
    }?;
    out.finish()?;
    Ok(code)
}

fn is_help(error: &clap::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
    )
}

/// clap's paragraphs as one line: what is wrong, its tips, where to read more.
fn in_one_line(rendered: &str) -> String {
    let said = rendered
        .lines()
        .map(str::trim)
        .take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"))
        .filter(|line| !line.is_empty());
    let mut text = String::new();
    for line in said {
        let line = line.strip_prefix("error: ").unwrap_or(line);
        if !text.is_empty() {
            text.push_str(if text.ends_with(':') { " " } else { "; " });
        }
        text.push_str(line);
    }
    text + "; --help shows what is taken"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declaration_of_the_arguments_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_usage_error_keeps_what_is_wrong_and_the_tips() {
        let rendered = "error: the following required arguments were not provided:\n  <NAME>\n\nUsage: m3 op <NAME>\n";
        assert_eq!(
            in_one_line(rendered),
            "the following required arguments were not provided: <NAME>; --help shows what is taken"
        );
        let rendered = "error: unexpected argument '--step' found\n\n  tip: a similar argument exists: '--steps'\n\nUsage: m3 train\n";
        assert_eq!(
            in_one_line(rendered),
            "unexpected argument '--step' found; tip: a similar argument exists: '--steps'; --help shows what is taken"
        );
    }
}
