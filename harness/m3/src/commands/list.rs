//! `m3 list`: the operations, or their cases.

use m3_harness::cases;
use m3_kernels::cpu::CpuBackend;
use m3_spec::ops;

use crate::exit::{Code, Failure};
use crate::output::Output;

/// List the operations, or the cases that gates judge
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Part of a name
    #[arg(default_value = "")]
    filter: String,
    /// List cases, as m3 gate and ci/test name them
    #[arg(long)]
    cases: bool,
}

/// One line per operation, in the order in which a training step meets them, or per case.
pub fn run(args: &Args, out: &mut Output) -> Result<Code, Failure> {
    let lines: Vec<String> = if args.cases {
        let cases = cases::all::<CpuBackend>();
        cases
            .into_iter()
            .map(|case| case.name)
            .filter(|name| name.contains(&args.filter))
            .collect()
    } else {
        let selected = ops::all().filter(|op| op.name.contains(&args.filter));
        selected
            .map(|op| format!("{:<14} {}", op.name, op.summary))
            .collect()
    };
    if lines.is_empty() {
        let message = format!(
            "nothing has {:?} in its name; m3 list shows all",
            args.filter
        );
        return Err(Failure::new(Code::NothingSelected, message));
    }
    lines.into_iter().try_for_each(|line| out.line(line))?;
    Ok(Code::Pass)
}
