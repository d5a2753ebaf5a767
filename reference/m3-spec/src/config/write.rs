//! From [`Config`] to `config.json`, in the released and in the native schema.

use super::{AttentionKind, Config, MlpKind, ProjectorConfig, TextConfig, VisionConfig};
use serde_json::{Map, Value, json};

const COMPOSITE_CLASS: &str = "MiniMaxM3SparseForConditionalGeneration";
const TEXT_CLASS: &str = "MiniMaxM3SparseForCausalLM";

/// The released schema: nested `sparse_attention_config`, lists of 0 and 1.
pub(super) fn released(config: &Config) -> Value {
    let text = released_text(&config.text);
    assemble(config, text, "torch_dtype", released_vision)
}

/// The schema that transformers 5.24 writes.
pub(super) fn native(config: &Config) -> Value {
    let mut text = native_text(&config.text);
    text.insert("model_type".into(), "minimax_m3_vl_text".into());
    assemble(config, text, "dtype", native_vision)
}

/// Puts the sections together; a model without vision has the decoder's fields at the top level.
fn assemble(
    config: &Config,
    mut text: Map<String, Value>,
    dtype_key: &str,
    vision: impl Fn(&VisionConfig, &TextConfig) -> Value,
) -> Value {
    text.insert("architectures".into(), json!([TEXT_CLASS]));
    let mut root = match &config.vision {
        None => {
            text.insert("model_type".into(), "minimax_m3_vl_text".into());
            text
        }
        Some((tower, projector)) => {
            let merged = config.text.hidden_size * tower.spatial_merge_size.pow(2);
            let mut root = projector_fields(projector);
            root.insert("architectures".into(), json!([COMPOSITE_CLASS]));
            root.insert("model_type".into(), "minimax_m3_vl".into());
            root.insert("merged_hidden_size".into(), merged.into());
            root.insert("text_config".into(), Value::Object(text));
            root.insert("vision_config".into(), vision(tower, &config.text));
            root
        }
    };
    root.insert(dtype_key.into(), "bfloat16".into());
    root.insert("tie_word_embeddings".into(), false.into());
    if let Some(quantization) = &config.quantization {
        root.insert("quantization_config".into(), quantization.clone());
    }
    Value::Object(root)
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Fields that both schemas name alike.
fn common_text(t: &TextConfig) -> Map<String, Value> {
    let mut map = object(json!({
        "attention_dropout": 0.0,
        "bos_token_id": t.bos_token_id,
        "dense_intermediate_size": t.dense_intermediate_size,
        "eos_token_id": t.eos_token_id,
        "head_dim": t.head_dim,
        "hidden_size": t.hidden_size,
        "initializer_range": t.initializer_range,
        "max_position_embeddings": t.max_position_embeddings,
        "num_attention_heads": t.num_q_heads,
        "num_hidden_layers": t.num_layers(),
        "num_key_value_heads": t.num_kv_heads,
        "rms_norm_eps": t.rms_norm_eps,
        "rotary_dim": t.rotary_dim,
        "swiglu_alpha": t.swiglu_alpha,
        "swiglu_limit": t.swiglu_limit,
        "tie_word_embeddings": false,
        "vocab_size": t.vocab_size,
    }));
    if let Some(m) = &t.moe {
        map.extend(object(json!({
            "intermediate_size": m.intermediate_size,
            "num_experts_per_tok": m.experts_per_token,
            "num_local_experts": m.num_experts,
            "routed_scaling_factor": m.routed_scaling,
            "shared_intermediate_size": m.shared_intermediate_size,
        })));
    }
    map
}

fn rotary_factor(t: &TextConfig) -> f64 {
    t.rotary_dim as f64 / t.head_dim as f64
}

fn released_text(t: &TextConfig) -> Map<String, Value> {
    let is_sparse = flags(&t.attention, AttentionKind::Sparse);
    let mut map = common_text(t);
    map.extend(object(json!({
        "attention_output_gate": false,
        "hidden_act": "swigluoai",
        "moe_layer_freq": flags(&t.mlp, MlpKind::Moe),
        "n_shared_experts": 1,
        "partial_rotary_factor": rotary_factor(t),
        "qk_norm_type": "per_head",
        "rope_theta": t.rope_theta,
        "scoring_func": "sigmoid",
        "use_gemma_norm": true,
        "use_qk_norm": true,
        "use_routing_bias": true,
    })));
    let mut sparse = object(json!({
        "sparse_attention_freq": is_sparse,
        "sparse_disable_index_value": is_sparse,
        "sparse_score_type": "max",
        "use_sparse_attention": is_sparse.contains(&1),
    }));
    if let Some(i) = &t.index {
        sparse.extend(object(json!({
            "sparse_block_size": i.block_size,
            "sparse_index_dim": i.head_dim,
            "sparse_init_block": i.init_blocks,
            "sparse_local_block": i.local_blocks,
            "sparse_num_index_heads": i.num_heads,
            "sparse_topk_blocks": i.topk_blocks,
        })));
    }
    map.insert("sparse_attention_config".into(), Value::Object(sparse));
    map
}

fn native_text(t: &TextConfig) -> Map<String, Value> {
    let mut map = common_text(t);
    let layer_type = |&kind: &AttentionKind| match kind {
        AttentionKind::Full => "full_attention",
        AttentionKind::Sparse => "minimax_m3_sparse",
    };
    let mlp_type = |&kind: &MlpKind| match kind {
        MlpKind::Dense => "dense",
        MlpKind::Moe => "sparse",
    };
    map.extend(object(json!({
        "hidden_act": "silu",
        "layer_types": t.attention.iter().map(layer_type).collect::<Vec<_>>(),
        "mlp_layer_types": t.mlp.iter().map(mlp_type).collect::<Vec<_>>(),
        "rope_parameters": {
            "partial_rotary_factor": rotary_factor(t),
            "rope_theta": t.rope_theta,
            "rope_type": "default",
        },
    })));
    if let Some(i) = &t.index {
        map.extend(object(json!({
            "index_block_size": i.block_size,
            "index_head_dim": i.head_dim,
            "index_local_blocks": i.local_blocks,
            "index_n_heads": i.num_heads,
            "index_topk_blocks": i.topk_blocks,
        })));
        // transformers has no such field and would ignore it; a reader that forces initial blocks must see them.
        if i.init_blocks > 0 {
            map.insert("index_init_blocks".into(), i.init_blocks.into());
        }
    }
    map
}

fn flags<T: PartialEq>(kinds: &[T], one: T) -> Vec<u8> {
    kinds.iter().map(|kind| u8::from(*kind == one)).collect()
}

fn projector_fields(p: &ProjectorConfig) -> Map<String, Value> {
    object(json!({
        "image_token_index": p.image_token_id,
        "multimodal_projector_bias": p.bias,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": p.hidden_size,
        "video_token_index": p.video_token_id,
    }))
}

fn common_vision(v: &VisionConfig) -> Map<String, Value> {
    object(json!({
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": v.hidden_size,
        "image_size": v.image_size,
        "intermediate_size": v.intermediate_size,
        "layer_norm_eps": v.layer_norm_eps,
        "num_attention_heads": v.num_heads,
        "num_channels": v.num_channels,
        "num_hidden_layers": v.num_layers,
        "patch_size": v.patch_size,
        "vision_segment_max_frames": v.segment_max_frames,
    }))
}

fn released_vision(v: &VisionConfig, text: &TextConfig) -> Value {
    let mut map = common_vision(v);
    map.extend(object(json!({
        "img_token_compression_config": {
            "image_token_compression_method": "patch_merge",
            "spatial_merge_size": v.spatial_merge_size,
            "temporal_patch_size": v.temporal_patch_size,
        },
        "model_type": "clip_vision_model",
        "projection_dim": text.hidden_size,
        "rope_theta": v.rope_theta,
    })));
    Value::Object(map)
}

fn native_vision(v: &VisionConfig, _text: &TextConfig) -> Value {
    let mut map = common_vision(v);
    map.extend(object(json!({
        "model_type": "minimax_m3_vl_vision",
        "rope_parameters": { "rope_theta": v.rope_theta, "rope_type": "axial" },
        "spatial_merge_size": v.spatial_merge_size,
        "temporal_patch_size": v.temporal_patch_size,
    })));
    Value::Object(map)
}
