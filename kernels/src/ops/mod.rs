//! Operands of every operation, with the checks that both backends share.
//!
//! Each struct borrows its operands; outputs are named in its documentation and allocated by the caller. `dims()`
//! checks shapes, dtypes, layouts and overlaps, and returns the extents. It reads no buffer.

mod attention;
mod check;
mod elementwise;
mod grouped;
mod linear;
mod loss;
mod norm;
mod optimizer;
mod paged;
mod sample;
mod selection;

pub use attention::*;
pub use elementwise::*;
pub use grouped::*;
pub use linear::*;
pub use loss::*;
pub use norm::*;
pub use optimizer::*;
pub use paged::*;
pub use sample::*;
pub use selection::*;
