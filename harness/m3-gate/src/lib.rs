//! Records, metrics, gates and verdicts: pure functions from tensors to PASS, FAIL or ERROR.
//!
//! The path through the crate is the path of a judgement: [`Operands`] (what the kernel gave, what
//! is right, what the same maths gives when rounded) → [`measure`] (one number per [`Metric`]) →
//! [`Gate`] (a bound, with the reason for it, from a TOML file) → [`judge_case`] (a [`Verdict`] per
//! gate and tensor, with [`Evidence`] where it is red) → [`record`] (what is written) →
//! [`failure_block`] (what is read).
//!
//! **Absent on purpose**: files, clock, environment, random numbers. Gate text, today's date and
//! trusted history come in as arguments, so a judgement can be repeated from its record alone.
//! Nothing here shares code with the reference or the kernels that it judges.

mod band;
mod evidence;
mod failure;
mod gate;
mod glob;
mod judge;
mod metrics;
mod operand;
mod parse;
pub mod record;
mod source;
mod storage;
mod verdict;

pub use band::{Band, BandVerdict, judge_band};
pub use evidence::{Decoder, Evidence, UlpHistogram, Worst};
pub use failure::{failure_block, failure_line, value_text};
pub use gate::{Bound, Floor, Gate, GateFile, GateSet, Limit, Op, Waiver};
pub use glob::Patterns;
pub use judge::{Case, Tensor, Value, judge_case, judge_value};
pub use metrics::{Metric, RATIO_ELEMENTS_MIN, RatioTerms, measure};
pub use operand::{Class, MeasureError, Operand, Operands};
pub use parse::{GateError, GateFault, parse_gates};
pub use source::{Date, Source};
pub use storage::Storage;
pub use verdict::{Severity, Verdict, is_green, series_id, verdicts_json};
