//! What must hold between the fields of a configuration, each refusal naming the values.

use super::{ConfigError, IndexConfig, MoeConfig, TextConfig, VisionConfig};
use crate::rope;

fn ensure(holds: bool, message: impl FnOnce() -> String) -> Result<(), ConfigError> {
    if holds {
        Ok(())
    } else {
        Err(ConfigError::constraint(message()))
    }
}

/// Largest width, number of heads or number of rows: ids are i32, and the product of two sizes must fit a `usize`.
const SIZE_MAX: usize = i32::MAX as usize;
/// Most routed experts, eight times those of the largest published models: the tensor list names each one.
const EXPERTS_MAX: usize = 4096;
/// Most patches per side of a merged group, whose square times a width must fit a `usize`, and most layers of the vision
/// tower, whose tensors are listed by name.
const VISION_COUNT_MAX: usize = 1024;

fn at_most(bound: usize, sizes: &[(&str, usize)]) -> Result<(), ConfigError> {
    match sizes.iter().find(|(_, size)| *size > bound) {
        None => Ok(()),
        Some((name, size)) => Err(ConfigError::constraint(format!(
            "{name} {size} exceeds {bound}"
        ))),
    }
}

/// Checks a text decoder.
pub(super) fn text(t: &TextConfig) -> Result<(), ConfigError> {
    let layers = t.num_layers();
    ensure(layers > 0, || "num_hidden_layers is 0".into())?;
    let sizes = [
        ("vocab_size", t.vocab_size),
        ("hidden_size", t.hidden_size),
        ("num_attention_heads", t.num_q_heads),
        ("num_key_value_heads", t.num_kv_heads),
        ("head_dim", t.head_dim),
    ];
    for (name, size) in sizes {
        ensure(size > 0, || format!("{name} is 0"))?;
    }
    at_most(SIZE_MAX, &sizes)?;
    at_most(
        SIZE_MAX,
        &[("dense_intermediate_size", t.dense_intermediate_size)],
    )?;
    ensure(t.num_q_heads.is_multiple_of(t.num_kv_heads), || {
        format!(
            "num_attention_heads {} is not divisible by num_key_value_heads {}",
            t.num_q_heads, t.num_kv_heads
        )
    })?;
    ensure(
        t.rotary_dim.is_multiple_of(2) && t.rotary_dim <= t.head_dim,
        || {
            format!(
                "rotary_dim {} must be even and at most head_dim {}",
                t.rotary_dim, t.head_dim
            )
        },
    )?;
    ensure(t.max_position_embeddings <= rope::MAX_POSITIONS, || {
        format!(
            "max_position_embeddings {} exceeds {}, beyond which angles lose their precision",
            t.max_position_embeddings,
            rope::MAX_POSITIONS
        )
    })?;
    for (name, value) in [
        ("rms_norm_eps", t.rms_norm_eps),
        ("rope_theta", t.rope_theta),
        ("swiglu_limit", t.swiglu_limit),
    ] {
        ensure(value > 0.0 && value.is_finite(), || {
            format!("{name} {value} must be above 0")
        })?;
    }
    if t.sparse_layers().next().is_some() {
        index(t.index.as_ref(), t)?;
    }
    if t.moe_layers().next().is_some() {
        moe(t.moe.as_ref())?;
    }
    let has_dense = t.moe_layers().count() < layers;
    ensure(!has_dense || t.dense_intermediate_size > 0, || {
        "dense_intermediate_size is 0 but a layer has a dense mlp".into()
    })
}

fn index(index: Option<&IndexConfig>, t: &TextConfig) -> Result<(), ConfigError> {
    let Some(i) = index else {
        return Err(ConfigError::constraint(
            "a layer is sparse but there is no indexer configuration",
        ));
    };
    at_most(
        SIZE_MAX,
        &[
            ("index head dim", i.head_dim),
            ("block size", i.block_size),
            ("top-k blocks", i.topk_blocks),
            ("init blocks", i.init_blocks),
            ("local blocks", i.local_blocks),
        ],
    )?;
    ensure(i.num_heads == t.num_kv_heads, || {
        format!(
            "index heads {} must equal num_key_value_heads {}: index head h selects for kv head h",
            i.num_heads, t.num_kv_heads
        )
    })?;
    ensure(i.block_size > 0 && i.topk_blocks > 0, || {
        format!(
            "block size {} and top-k blocks {} must be above 0",
            i.block_size, i.topk_blocks
        )
    })?;
    ensure(i.topk_blocks >= i.init_blocks + i.local_blocks, || {
        format!(
            "top-k blocks {} is below init blocks {} + local blocks {}: forced blocks occupy slots of the k",
            i.topk_blocks, i.init_blocks, i.local_blocks
        )
    })?;
    ensure(i.head_dim >= t.rotary_dim, || {
        format!(
            "index head dim {} is below rotary_dim {}",
            i.head_dim, t.rotary_dim
        )
    })
}

fn moe(moe: Option<&MoeConfig>) -> Result<(), ConfigError> {
    let Some(m) = moe else {
        return Err(ConfigError::constraint(
            "a layer is a mixture of experts but there are no experts",
        ));
    };
    at_most(EXPERTS_MAX, &[("num_local_experts", m.num_experts)])?;
    at_most(
        SIZE_MAX,
        &[
            ("intermediate_size", m.intermediate_size),
            ("shared_intermediate_size", m.shared_intermediate_size),
        ],
    )?;
    ensure(
        m.experts_per_token > 0 && m.experts_per_token <= m.num_experts,
        || {
            format!(
                "num_experts_per_tok {} must be between 1 and num_local_experts {}",
                m.experts_per_token, m.num_experts
            )
        },
    )?;
    ensure(
        m.intermediate_size > 0 && m.shared_intermediate_size > 0,
        || {
            format!(
                "intermediate_size {} and shared_intermediate_size {} must be above 0",
                m.intermediate_size, m.shared_intermediate_size
            )
        },
    )?;
    ensure(m.routed_scaling.is_finite(), || {
        format!("routed_scaling_factor {} is not finite", m.routed_scaling)
    })
}

/// Checks a vision tower.
pub(super) fn vision(v: &VisionConfig) -> Result<(), ConfigError> {
    at_most(
        SIZE_MAX,
        &[
            ("vision_config.hidden_size", v.hidden_size),
            ("vision_config.intermediate_size", v.intermediate_size),
            ("vision_config.patch_size", v.patch_size),
        ],
    )?;
    at_most(
        VISION_COUNT_MAX,
        &[
            ("vision_config.spatial_merge_size", v.spatial_merge_size),
            ("vision_config.num_hidden_layers", v.num_layers),
        ],
    )?;
    ensure(
        v.num_heads > 0 && v.hidden_size.is_multiple_of(v.num_heads),
        || {
            format!(
                "vision_config.hidden_size {} is not divisible by vision_config.num_attention_heads {}",
                v.hidden_size, v.num_heads
            )
        },
    )?;
    ensure(
        v.patch_size > 0 && v.temporal_patch_size > 0 && v.spatial_merge_size > 0,
        || {
            format!(
                "vision_config: patch_size {}, temporal_patch_size {} and spatial_merge_size {} must be above 0",
                v.patch_size, v.temporal_patch_size, v.spatial_merge_size
            )
        },
    )
}
