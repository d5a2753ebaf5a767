//! What a training run is made of besides its path: recipe, task, gates, metrics.

pub mod echo;
pub mod metrics;
pub mod recipe;
pub mod run_gates;
