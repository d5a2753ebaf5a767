//! The MiniMax-M3 text model: layers, parameters, forward and backward over any backend.
//!
//! Read [`layer`] first, then [`attention`], [`mlp`] and [`moe`]; [`step`] calls them along a [`schedule`].

pub mod attention;
pub mod context;
pub mod error;
pub mod layer;
mod linear;
pub mod mlp;
pub mod model;
pub mod moe;
pub mod norm;
pub mod parameters;
pub mod schedule;
pub mod step;

pub use context::{Cache, Constants, Context, LayerPages, Pack, Placed, Replay, check_sequence};
pub use error::{Error, Result};
pub use model::Model;
pub use parameters::{Parameter, Sharding, Slice};
pub use step::{Hooks, Scores, Step};
