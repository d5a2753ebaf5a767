//! One file an op, under the same stem in every room.

pub mod attention;
pub mod linear;
pub mod qk_norm_rope;
pub mod rms_norm;
pub mod swigluoai;
