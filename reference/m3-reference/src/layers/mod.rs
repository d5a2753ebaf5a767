//! Compositions of ops, with the rounding of what several of them share: read as the text of a layer.

pub mod attention;
pub mod mlp;
pub mod moe;
