//! What a released checkpoint may hold beside the text model, and what is said of a name that is neither.
//!
//! The names of the text model themselves are one table: [`m3_spec::tensors`].

use m3_spec::config::{AttentionKind, MlpKind, TextConfig};
use m3_spec::tensors::{TEXT_PREFIX, TensorSpec};

/// Vision, projector, merger, and the draft modules that some releases ship. Converters keep them, all others pass over
/// them.
const PASSED_OVER: [&str; 9] = [
    "vision_tower.",
    "multi_modal_projector.",
    "patch_merge_mlp.",
    "mtp.",
    "language_model.mtp.",
    "language_model.model.mtp.",
    "dspark/",
    "dspark.",
    "language_model.model.dspark.",
];

/// Endings of the tensors that only quantised checkpoints have.
const QUANTIZED: [&str; 6] = [
    ".weight_scale_inv",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_packed",
    ".weight_global_scale",
    ".input_scale",
];

/// Whether `name` belongs to vision, projector, merger or a draft module.
pub fn is_passed_over(name: &str) -> bool {
    PASSED_OVER.iter().any(|prefix| name.starts_with(prefix))
}

/// Why `name` is not among `expected`, the tensors of `config`, and what was probably meant.
pub(crate) fn hint(name: &str, config: &TextConfig, expected: &[TensorSpec]) -> String {
    if QUANTIZED.iter().any(|ending| name.ends_with(ending)) {
        return "it belongs to a quantised checkpoint; write a BF16 copy first: \
                m3 convert dequant SRC DST"
            .to_owned();
    }
    if let Some(reason) = contradiction(name, config) {
        return reason;
    }
    match nearest(name, expected) {
        Some(meant) => format!("{meant} is meant?"),
        None => {
            "no part of this model has such a name; remove it or move it to a directory of its own"
                .to_owned()
        }
    }
}

/// What `config` says against a tensor of this name.
fn contradiction(name: &str, config: &TextConfig) -> Option<String> {
    let name = name.strip_prefix(TEXT_PREFIX)?;
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer: usize = layer.parse().ok()?;
    let (Some(attention), Some(mlp)) = (config.attention.get(layer), config.mlp.get(layer)) else {
        return Some(format!("config.json has {} layers", config.num_layers()));
    };
    let lacks = |what| Some(format!("config.json gives layer {layer} {what}"));
    if *attention == AttentionKind::Full && part.starts_with("self_attn.index_") {
        return lacks("dense attention");
    }
    if *mlp == MlpKind::Moe && part.starts_with("mlp.") {
        return lacks("experts and no dense MLP");
    }
    if *mlp == MlpKind::Dense && part.starts_with("block_sparse_moe.") {
        return lacks("a dense MLP and no experts");
    }
    let (expert, _) = part
        .strip_prefix("block_sparse_moe.experts.")?
        .split_once('.')?;
    let (expert, experts) = (
        expert.parse::<usize>().ok()?,
        config.moe.as_ref()?.num_experts,
    );
    (expert >= experts).then(|| format!("config.json has {experts} experts"))
}

/// The expected name that lacks only its prefix or is nearest by edit distance, if that is at most a third of its length.
fn nearest<'a>(name: &str, expected: &'a [TensorSpec]) -> Option<&'a str> {
    let names = || expected.iter().map(|tensor| tensor.name.as_str());
    if let Some(meant) = names().find(|meant| meant.strip_prefix(TEXT_PREFIX) == Some(name)) {
        return Some(meant);
    }
    let distances = names().map(|meant| (strsim::levenshtein(name, meant), meant));
    let (distance, meant) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance * 3 <= meant.len()).then_some(meant)
}

#[cfg(test)]
mod tests {
    use super::*;
    use m3_spec::config::Config;
    use m3_spec::tensors::{tensors, vision_tensors};

    #[test]
    fn vision_and_draft_modules_are_passed_over_and_the_text_model_is_not() {
        let config = Config::minimax_m3();
        assert!(
            tensors(&config.text)
                .iter()
                .all(|t| !is_passed_over(&t.name))
        );
        let (vision, projector) = config.vision.unwrap();
        let vision = vision_tensors(&vision, &projector, config.text.hidden_size);
        assert!(vision.iter().all(|t| is_passed_over(&t.name)));
        for name in [
            "mtp.layers.0.enorm.weight",
            "language_model.model.mtp.layers.0.eh_proj.weight",
            "dspark/fc.weight",
            "language_model.model.dspark.fc.weight",
        ] {
            assert!(is_passed_over(name), "{name}");
        }
        assert!(!is_passed_over("language_model.model.layers.0.mtp.weight"));
    }
}
