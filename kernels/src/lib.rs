//! What is fast: the [`backend::Backend`] trait and its two implementations.
//!
//! [`cpu`] is a subject of the gates like [`cuda`]: tiled, threaded, online softmax, the same rounding points. Neither
//! knows the reference. Every operand check that does not depend on the device stands once, in [`ops`].

pub mod backend;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod launch;
pub mod ops;
pub mod tensor;

pub use backend::Backend;
pub use error::{Error, Result};
pub use tensor::{Arena, Shape, Tensor};
