//! `m3 list`: the operations.

use m3_spec::ops;

use crate::exit::{Code, Failure};
use crate::output::Output;

/// List the operations
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Part of a name
    filter: Option<String>,
}

/// One line per operation, in the order in which a training step meets them.
pub fn run(args: &Args, out: &mut Output) -> Result<Code, Failure> {
    let filter = args.filter.as_deref().unwrap_or_default();
    let selected: Vec<_> = ops::all().filter(|op| op.name.contains(filter)).collect();
    if selected.is_empty() {
        let message = format!("no operation has {filter:?} in its name; m3 list shows all");
        return Err(Failure::new(Code::NothingSelected, message));
    }
    for op in selected {
        out.line(format_args!("{:<14} {}", op.name, op.summary))?;
    }
    Ok(Code::Pass)
}
