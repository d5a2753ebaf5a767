//! What MiniMax-M3 is: configurations, rounding points, op specifications, seeded inputs, Philox and digests.
//!
//! Everything here is data or a pure function of its arguments: no file, no clock, no thread, no platform libm.
//! The reference, the kernels and the harness all read it; it reads none of them.

pub mod axes;
pub mod config;
pub mod decode;
pub mod digest;
pub mod dtype;
pub mod inputs;
pub mod math;
pub mod op_spec;
pub mod ops;
pub mod philox;
pub mod rope;
pub mod round;
pub mod rounding;
pub mod tensors;
