//! `m3 op NAME`: where an operation lives and what holds for it.

use std::path::PathBuf;

use m3_gate::{Gate, Patterns};
use m3_harness::rooms::{self, Place};
use m3_spec::op_spec::OpSpec;
use m3_spec::ops;
use m3_spec::rounding::Rounds;

use crate::exit::{Code, Failure};
use crate::output::Output;

/// Show an operation: its file in every room, rounding points, invariants, gates
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Name, as m3 list prints it
    name: String,
}

/// Paths, rounding points, invariants, gates.
pub fn run(args: &Args, out: &mut Output) -> Result<Code, Failure> {
    let op = ops::named(&args.name).ok_or_else(|| unknown(&args.name))?;
    out.line(format_args!("{}: {}", op.name, op.summary))?;
    paths(op, out)?;
    rounding(op, out)?;
    invariants(op, out)?;
    gates(op, out)?;
    Ok(Code::Pass)
}

fn unknown(name: &str) -> Failure {
    let near = ops::all()
        .map(|op| (strsim::jaro_winkler(name, op.name), op.name))
        .filter(|(nearness, _)| *nearness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0));
    let hint = near.map_or(String::new(), |(_, near)| format!("did you mean {near}? "));
    Failure::usage(format!(
        "no operation is named {name:?}; {hint}m3 list shows all"
    ))
}

fn paths(op: &OpSpec, out: &mut Output) -> Result<(), Failure> {
    let root = checkout();
    out.line("\nfiles")?;
    for Place { what, pattern, .. } in rooms::PLACES {
        let path = rooms::path(pattern, op.name);
        let absent = root.as_ref().is_some_and(|root| !root.join(&path).exists());
        let note = if absent { "   (not there)" } else { "" };
        out.line(format_args!("  {what:<10} {path}{note}"))?;
    }
    Ok(())
}

/// The root of the checkout that the working directory lies in, if it lies in one.
fn checkout() -> Option<PathBuf> {
    let here = std::env::current_dir().ok()?;
    let root = here
        .ancestors()
        .find(|folder| folder.join(rooms::SPEC_OPS).is_dir())?;
    Some(root.to_path_buf())
}

fn rounding(op: &OpSpec, out: &mut Output) -> Result<(), Failure> {
    out.line("\nrounding points")?;
    for point in op.rounding() {
        let rounds = match point.rounds {
            Rounds::Storage => "storage",
            Rounds::Operand => "operand",
            Rounds::Fp32 => "fp32",
            Rounds::Exact => "exact",
        };
        out.line(format_args!(
            "  {:<18} {rounds:<8} {}",
            point.tensor, point.text
        ))?;
    }
    Ok(())
}

fn invariants(op: &OpSpec, out: &mut Output) -> Result<(), Failure> {
    out.line("\ninvariants")?;
    for invariant in op.invariants {
        out.line(format_args!("  {invariant}"))?;
    }
    Ok(())
}

fn gates(op: &OpSpec, out: &mut Output) -> Result<(), Failure> {
    let set = m3_harness::gates::all(m3_harness::today())?;
    let of_op = |gate: &&Gate| gate.id.split('.').next() == Some(op.name);
    out.line("\ngates")?;
    for gate in set.gates().iter().filter(of_op) {
        let tensor = gate.tensor.as_ref().map(Patterns::text).unwrap_or_default();
        let Some(limit) = &gate.limit else {
            out.line(format_args!(
                "  {}   {tensor}: a band round its history",
                gate.id
            ))?;
            continue;
        };
        let (metric, relation) = (gate.metric.name(), limit.op.name());
        let (bound, dtype) = (&limit.literal, gate.dtype.text());
        out.line(format_args!("  {}   {tensor}, storage {dtype}", gate.id))?;
        out.line(format_args!(
            "    {metric} {relation} {bound}   {}",
            limit.source
        ))?;
    }
    Ok(())
}
