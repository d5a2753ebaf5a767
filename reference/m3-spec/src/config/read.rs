//! From `config.json` to [`Config`], whichever schema each section is written in.
//!
//! A quantity that both schemas name is read from both places, and the values must agree. Keys that nobody reads are
//! passed over: released files hold many.

use super::section::{Place, Result, Section, agree, any, need, need_any, only};
use super::{
    AttentionKind, Config, ConfigError, IndexConfig, MlpKind, MoeConfig, ProjectorConfig,
    TextConfig, VisionConfig, check,
};
use serde_json::Value;

const COMPOSITE_MODEL_TYPES: &[&str] = &["minimax_m3_vl", "minimax_m3"];
const TEXT_MODEL_TYPES: &[&str] = &[
    "minimax_m3_vl_text",
    "minimax_m3_text",
    "minimax_m3_vl",
    "minimax_m3",
];
const VISION_MODEL_TYPES: &[&str] = &["clip_vision_model", "minimax_m3_vl_vision"];
/// Class names that stand for the model where `model_type` is absent.
const ARCHITECTURE_PREFIX: &str = "MiniMaxM3";

/// Reads the top level: composite (with `text_config`) or text-only.
pub(super) fn config(value: &Value) -> Result<Config> {
    let root = Section::root(value)?;
    let text_section = root.section("text_config")?;
    let known = if text_section.is_some() {
        COMPOSITE_MODEL_TYPES
    } else {
        TEXT_MODEL_TYPES
    };
    match root.text("model_type")? {
        Some(got) => known_type(&root, got, known)?,
        None => known_architecture(&root, known)?,
    }
    let quantization = root.get("quantization_config").cloned();
    let Some(text_section) = text_section else {
        return Ok(Config {
            text: text(&root)?,
            vision: None,
            quantization,
        });
    };
    if let Some(got) = text_section.text("model_type")? {
        known_type(&text_section, got, TEXT_MODEL_TYPES)?;
    }
    only(&root, "tie_word_embeddings", Section::boolean, false)?;
    let vision = match root.section("vision_config")? {
        Some(section) => Some((vision(&section)?, projector(&root)?)),
        None => None,
    };
    Ok(Config {
        text: text(&text_section)?,
        vision,
        quantization,
    })
}

fn known_type(section: &Section, got: &str, known: &[&str]) -> Result<()> {
    if known.contains(&got) {
        return Ok(());
    }
    Err(ConfigError::UnknownModelType {
        key: section.path("model_type"),
        got: got.into(),
        known: known.join(", "),
    })
}

fn known_architecture(root: &Section, known: &[&str]) -> Result<()> {
    let names = root.get("architectures").and_then(Value::as_array);
    let first = names
        .and_then(|names| names.first())
        .and_then(Value::as_str);
    match first {
        Some(name) if name.starts_with(ARCHITECTURE_PREFIX) => Ok(()),
        Some(name) => Err(ConfigError::UnknownModelType {
            key: "architectures".into(),
            got: name.into(),
            known: "MiniMaxM3SparseForConditionalGeneration, MiniMaxM3SparseForCausalLM".into(),
        }),
        None => Err(ConfigError::UnknownModelType {
            key: "model_type".into(),
            got: "(missing)".into(),
            known: known.join(", "),
        }),
    }
}

/// Reads the decoder from `text_config`, or from the top level of a text-only file.
fn text(s: &Section) -> Result<TextConfig> {
    refuse_variants(s)?;
    let sparse = s.section("sparse_attention_config")?;
    let rope = s.section("rope_parameters")?;
    let num_layers = need(s, "num_hidden_layers", Section::uint)?;
    let head_dim = need(s, "head_dim", Section::uint)?;
    let attention = attention_kinds(s, sparse.as_ref(), num_layers)?;
    let mlp = mlp_kinds(s, num_layers)?;
    let theta_places: &[Place] = &[(Some(s), "rope_theta"), (rope.as_ref(), "rope_theta")];
    let text = TextConfig {
        vocab_size: need(s, "vocab_size", Section::uint)?,
        hidden_size: need(s, "hidden_size", Section::uint)?,
        num_q_heads: need(s, "num_attention_heads", Section::uint)?,
        num_kv_heads: need(s, "num_key_value_heads", Section::uint)?,
        head_dim,
        rotary_dim: rotary_dim(s, rope.as_ref(), head_dim)?,
        rope_theta: need_any(theta_places, Section::float)?,
        max_position_embeddings: need(s, "max_position_embeddings", Section::uint)?,
        rms_norm_eps: need(s, "rms_norm_eps", Section::float)?,
        dense_intermediate_size: if mlp.contains(&MlpKind::Dense) {
            need(s, "dense_intermediate_size", Section::uint)?
        } else {
            s.uint("dense_intermediate_size")?.unwrap_or(0)
        },
        swiglu_alpha: need(s, "swiglu_alpha", Section::float)?,
        swiglu_limit: need(s, "swiglu_limit", Section::float)?,
        initializer_range: s.float("initializer_range")?.unwrap_or(0.02),
        index: index(
            s,
            sparse.as_ref(),
            attention.contains(&AttentionKind::Sparse),
        )?,
        moe: moe(s, mlp.contains(&MlpKind::Moe))?,
        attention,
        mlp,
        bos_token_id: s.token("bos_token_id")?,
        eos_token_id: s.token("eos_token_id")?,
    };
    check::text(&text)?;
    Ok(text)
}

/// Refuses every variant of the architecture that this project does not implement; an absent key means the usual one.
fn refuse_variants(s: &Section) -> Result<()> {
    for (key, supported) in [
        ("use_gemma_norm", true),
        ("use_qk_norm", true),
        ("use_routing_bias", true),
        ("attention_output_gate", false),
        ("attention_bias", false),
        ("tie_word_embeddings", false),
    ] {
        only(s, key, Section::boolean, supported)?;
    }
    only(s, "qk_norm_type", Section::text, "per_head")?;
    only(s, "scoring_func", Section::text, "sigmoid")?;
    only(s, "n_shared_experts", Section::uint, 1)?;
    only(s, "swiglu_beta", Section::float, 1.0)?;
    only(s, "attention_dropout", Section::float, 0.0)?;
    only(s, "router_jitter_noise", Section::float, 0.0)?;
    if let Some(rope) = s.section("rope_parameters")? {
        only(&rope, "rope_type", Section::text, "default")?;
    }
    if let Some(scaling) = s.section("rope_scaling")? {
        only(&scaling, "rope_type", Section::text, "default")?;
        only(&scaling, "type", Section::text, "default")?;
    }
    match s.text("hidden_act")? {
        // transformers writes "silu" whatever it read, and computes swigluoai.
        None | Some("swigluoai" | "silu") => Ok(()),
        Some(got) => Err(ConfigError::Unsupported {
            key: s.path("hidden_act"),
            got: got.into(),
            supported: "swigluoai".into(),
        }),
    }
}

fn attention_kinds(
    s: &Section,
    sparse: Option<&Section>,
    num_layers: usize,
) -> Result<Vec<AttentionKind>> {
    let enabled = match sparse {
        Some(sparse) => sparse.boolean("use_sparse_attention")?.unwrap_or(true),
        None => true,
    };
    if !enabled {
        return Ok(vec![AttentionKind::Full; num_layers]);
    }
    let named = s.kinds(
        "layer_types",
        &[("full_attention", false), ("minimax_m3_sparse", true)],
    )?;
    let flags = match sparse {
        Some(sparse) => sparse.flags("sparse_attention_freq")?,
        None => None,
    };
    let flags_path = || s.path("sparse_attention_config.sparse_attention_freq");
    let kinds = agree([(s.path("layer_types"), named), (flags_path(), flags)])?;
    let Some((key, kinds)) = kinds else {
        return Err(ConfigError::Missing {
            key: format!("{} or {}", s.path("layer_types"), flags_path()),
            hint: "which layers are sparse is never guessed; if none is, set sparse_attention_config.use_sparse_attention to false",
        });
    };
    per_layer(&key, kinds.len(), num_layers)?;
    Ok(kinds
        .into_iter()
        .map(|f| {
            if f {
                AttentionKind::Sparse
            } else {
                AttentionKind::Full
            }
        })
        .collect())
}

fn mlp_kinds(s: &Section, num_layers: usize) -> Result<Vec<MlpKind>> {
    let named = s.kinds("mlp_layer_types", &[("dense", false), ("sparse", true)])?;
    let flags = s.flags("moe_layer_freq")?;
    let kinds = agree([
        (s.path("mlp_layer_types"), named),
        (s.path("moe_layer_freq"), flags),
    ])?;
    let Some((key, kinds)) = kinds else {
        if num_experts(s)?.unwrap_or(0) == 0 {
            return Ok(vec![MlpKind::Dense; num_layers]);
        }
        return Err(ConfigError::Missing {
            key: format!(
                "{} or {}",
                s.path("mlp_layer_types"),
                s.path("moe_layer_freq")
            ),
            hint: "which layers are mixtures is never guessed; without experts set num_local_experts to 0",
        });
    };
    per_layer(&key, kinds.len(), num_layers)?;
    Ok(kinds
        .into_iter()
        .map(|f| if f { MlpKind::Moe } else { MlpKind::Dense })
        .collect())
}

fn per_layer(key: &str, got: usize, num_layers: usize) -> Result<()> {
    if got == num_layers {
        return Ok(());
    }
    Err(ConfigError::constraint(format!(
        "{key} has {got} entries, num_hidden_layers is {num_layers}"
    )))
}

/// `rotary_dim` and `partial_rotary_factor · head_dim` are one quantity.
fn rotary_dim(s: &Section, rope: Option<&Section>, head_dim: usize) -> Result<usize> {
    let dim = s.uint("rotary_dim")?;
    let factor_places: &[Place] = &[
        (Some(s), "partial_rotary_factor"),
        (rope, "partial_rotary_factor"),
    ];
    let (factor, origin) = match (any(factor_places, Section::float)?, rope) {
        (Some(factor), _) => (Some(factor), ""),
        (None, Some(_)) => (
            Some(1.0),
            " (absent beside rope_parameters, where transformers takes 1)",
        ),
        (None, None) => (None, ""),
    };
    let Some(factor) = factor else {
        return dim.ok_or_else(|| ConfigError::Missing {
            key: format!(
                "{} or {}",
                s.path("rotary_dim"),
                s.path("partial_rotary_factor")
            ),
            hint: "how many dims of a head are rotated is never guessed",
        });
    };
    let product = factor * head_dim as f64;
    let rounded = product.round();
    // Factors such as 2/3 are written in decimal, so the product need not be exact.
    let is_integer = (product - rounded).abs() <= 1e-6 * rounded;
    if is_integer && dim.is_none_or(|dim| dim as f64 == rounded) {
        return Ok(rounded as usize);
    }
    let dim = dim.map_or("a whole rotary_dim".into(), |dim| {
        format!("rotary_dim {dim}")
    });
    Err(ConfigError::constraint(format!(
        "{dim} is not partial_rotary_factor {factor}{origin} · head_dim {head_dim} = {product}"
    )))
}

fn index(s: &Section, sparse: Option<&Section>, required: bool) -> Result<Option<IndexConfig>> {
    if required && let Some(sparse) = sparse {
        only(sparse, "sparse_score_type", Section::text, "max")?;
        index_value_is_disabled(s, sparse)?;
    }
    let read = |native, released| any(&[(Some(s), native), (sparse, released)], Section::uint);
    let num_heads = read("index_n_heads", "sparse_num_index_heads")?;
    let head_dim = read("index_head_dim", "sparse_index_dim")?;
    let block_size = read("index_block_size", "sparse_block_size")?;
    let topk_blocks = read("index_topk_blocks", "sparse_topk_blocks")?;
    let local_blocks = read("index_local_blocks", "sparse_local_block")?;
    // The native schema has no initial blocks.
    let init_blocks = read("index_init_blocks", "sparse_init_block")?.unwrap_or(0);
    let missing = [
        ("index_n_heads", num_heads),
        ("index_head_dim", head_dim),
        ("index_block_size", block_size),
        ("index_topk_blocks", topk_blocks),
        ("index_local_blocks", local_blocks),
    ];
    match (num_heads, head_dim, block_size, topk_blocks, local_blocks) {
        (
            Some(num_heads),
            Some(head_dim),
            Some(block_size),
            Some(topk_blocks),
            Some(local_blocks),
        ) => Ok(Some(IndexConfig {
            num_heads,
            head_dim,
            block_size,
            topk_blocks,
            init_blocks,
            local_blocks,
        })),
        _ if !required => Ok(None),
        _ => {
            let absent = missing.iter().find(|(_, value)| value.is_none());
            Err(ConfigError::Missing {
                key: s.path(absent.map_or("index_n_heads", |(key, _)| key)),
                hint: "a layer is sparse, so the indexer's sizes are needed (index_* or sparse_attention_config)",
            })
        }
    }
}

/// In a sparse layer the list must be 1: an index value would change the attention output.
fn index_value_is_disabled(s: &Section, sparse: &Section) -> Result<()> {
    let Some(disabled) = sparse.flags("sparse_disable_index_value")? else {
        return Ok(());
    };
    let kinds = s.kinds(
        "layer_types",
        &[("full_attention", false), ("minimax_m3_sparse", true)],
    )?;
    let is_sparse = sparse
        .flags("sparse_attention_freq")?
        .or(kinds)
        .unwrap_or_default();
    match (0..is_sparse.len()).find(|&l| is_sparse[l] && !disabled.get(l).copied().unwrap_or(false))
    {
        None => Ok(()),
        Some(layer) => Err(ConfigError::Unsupported {
            key: sparse.path(&format!("sparse_disable_index_value[{layer}]")),
            got: disabled
                .get(layer)
                .map_or("missing".into(), |&v| u8::from(v).to_string()),
            supported: "1 (no index value) in a sparse layer".into(),
        }),
    }
}

fn num_experts(s: &Section) -> Result<Option<usize>> {
    any(
        &[(Some(s), "num_local_experts"), (Some(s), "num_experts")],
        Section::uint,
    )
}

fn moe(s: &Section, required: bool) -> Result<Option<MoeConfig>> {
    if !required {
        return Ok(None);
    }
    Ok(Some(MoeConfig {
        num_experts: num_experts(s)?.ok_or_else(|| s.missing("num_local_experts"))?,
        experts_per_token: need(s, "num_experts_per_tok", Section::uint)?,
        intermediate_size: need(s, "intermediate_size", Section::uint)?,
        shared_intermediate_size: need(s, "shared_intermediate_size", Section::uint)?,
        routed_scaling: need(s, "routed_scaling_factor", Section::float)?,
    }))
}

fn vision(s: &Section) -> Result<VisionConfig> {
    if let Some(got) = s.text("model_type")? {
        known_type(s, got, VISION_MODEL_TYPES)?;
    }
    only(s, "hidden_act", Section::text, "gelu")?;
    only(s, "attention_dropout", Section::float, 0.0)?;
    let compression = s.section("img_token_compression_config")?;
    let rope = s.section("rope_parameters")?;
    let default = VisionConfig::default();
    let uint = |key, default: usize| Ok::<_, ConfigError>(s.uint(key)?.unwrap_or(default));
    let compressed = |key, default: usize| {
        let places: &[Place] = &[(Some(s), key), (compression.as_ref(), key)];
        Ok::<_, ConfigError>(any(places, Section::uint)?.unwrap_or(default))
    };
    let theta_places: &[Place] = &[(Some(s), "rope_theta"), (rope.as_ref(), "rope_theta")];
    let vision = VisionConfig {
        hidden_size: uint("hidden_size", default.hidden_size)?,
        intermediate_size: uint("intermediate_size", default.intermediate_size)?,
        num_layers: uint("num_hidden_layers", default.num_layers)?,
        num_heads: uint("num_attention_heads", default.num_heads)?,
        num_channels: uint("num_channels", default.num_channels)?,
        image_size: uint("image_size", default.image_size)?,
        patch_size: uint("patch_size", default.patch_size)?,
        temporal_patch_size: compressed("temporal_patch_size", default.temporal_patch_size)?,
        spatial_merge_size: compressed("spatial_merge_size", default.spatial_merge_size)?,
        segment_max_frames: uint("vision_segment_max_frames", default.segment_max_frames)?,
        rope_theta: any(theta_places, Section::float)?.unwrap_or(default.rope_theta),
        layer_norm_eps: s.float("layer_norm_eps")?.unwrap_or(default.layer_norm_eps),
    };
    check::vision(&vision)?;
    Ok(vision)
}

fn projector(root: &Section) -> Result<ProjectorConfig> {
    only(root, "projector_hidden_act", Section::text, "gelu")?;
    let default = ProjectorConfig::default();
    let token = |index_key, id_key| {
        any(
            &[(Some(root), index_key), (Some(root), id_key)],
            Section::uint,
        )
    };
    Ok(ProjectorConfig {
        hidden_size: root
            .uint("projector_hidden_size")?
            .unwrap_or(default.hidden_size),
        bias: root
            .boolean("multimodal_projector_bias")?
            .unwrap_or(default.bias),
        image_token_id: token("image_token_index", "image_token_id")?
            .unwrap_or(default.image_token_id),
        video_token_id: token("video_token_index", "video_token_id")?
            .unwrap_or(default.video_token_id),
    })
}
