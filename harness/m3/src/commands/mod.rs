//! The verbs, one file each: `Args` and `run`.

pub mod doctor;
pub mod list;
pub mod op;
pub mod train;
