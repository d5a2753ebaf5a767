//! The gate files of the operations, compiled in, so that a binary alone can judge.

use m3_gate::{Date, GateError, GateSet, parse_gates};

/// Name and text of every gate file.
macro_rules! files {
    ($($stem:literal),* $(,)?) => {
        &[$((
            concat!("gates/", $stem, ".toml"),
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../gates/", $stem, ".toml")),
        )),*]
    };
}

/// Gate files by path, with their text.
pub const FILES: &[(&str, &str)] = files![
    "adamw",
    "attention",
    "block_select",
    "embedding",
    "golden",
    "grouped_gemm",
    "grpo_loss",
    "linear",
    "log_prob",
    "moe_combine",
    "moe_permute",
    "msa_attention",
    "msa_score",
    "qk_norm_rope",
    "rms_norm",
    "router",
    "swigluoai",
    "tile_map",
];

/// Every gate, as of `today`.
///
/// # Errors
/// The first fault of a file, with its line.
pub fn all(today: Date) -> Result<GateSet, GateError> {
    let files: Result<Vec<_>, _> = FILES
        .iter()
        .map(|(file, text)| parse_gates(file, text, today))
        .collect();
    GateSet::new(files?)
}
