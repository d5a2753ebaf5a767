//! What is right: every op in f64, forward and backward, and its rounded twin.
//!
//! Each file of [`ops`] holds one op and reads the same way: `Params` (sizes and constants), `Inputs` (borrowed
//! slices, row-major), `forward(&Inputs, &Rounding) -> Output`, and, where the op is differentiable,
//! `backward(&Inputs, &Output, &Grads, &Rounding) -> Gradients`. `Grads` holds what arrives from the consumers of
//! `Output`; `Gradients` what leaves towards the producers of `Inputs`, `dx` for an input `x`.
//!
//! One source serves two readings. Under [`Rounding::Exact`] everything is f64. Under [`Rounding::Twin`] the interiors
//! are still f64, but a value is rounded wherever rounding profile S has a rounding point, so the twin shows the error
//! that the storage types alone cause. Every rounding point is a visible call: `store`, `operand` or `fp32`.
//!
//! [`layers`] composes ops into the parts of a layer, [`model`] those into the text model on weights under their released
//! names.
//!
//! Shapes use T tokens of a packed batch, B sequences with `cu_seqlens` `[B+1]` (unused entries repeat the last
//! value), H hidden, Hq/Hkv query and KV heads, D head dim, Hi index heads, E experts, k choices a token, V
//! vocabulary.
//!
//! Absent on purpose: threads, IO, clocks, and any code shared with a kernel. Sizes that disagree panic: the caller is
//! a test, and a reference that guesses proves nothing.

pub mod layers;
pub mod math;
pub mod model;
pub mod ops;
pub mod rounding;

pub use rounding::{Precision, Rounding};
