"""Builds a case's model, fills its weights from a seed, and writes it in the released format."""

import copy
import json
import zlib
from pathlib import Path

import numpy as np
import torch
from transformers import MiniMaxM3VLConfig
from transformers.models.minimax_m3_vl import MiniMaxM3SparseForConditionalGeneration

from cases import Case, Storage

# In-memory names of the three classes that the release keeps in F32.
F32_CLASSES = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "vision_tower.embeddings.proj.weight")

ATTENTION = {"F": "full_attention", "S": "minimax_m3_sparse"}
MLP = {"D": "dense", "M": "sparse"}

VISION_NATIVE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 8,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
PROJECTOR_HIDDEN_SIZE = 24
IMAGE_TOKEN, VIDEO_TOKEN, BOS_TOKEN, EOS_TOKEN = 3, 4, 1, 2


def native_config(case: Case) -> MiniMaxM3VLConfig:
    """The case as transformers' own (flat) configuration."""
    text = {
        "vocab_size": case.vocab,
        "hidden_size": case.hidden_size,
        "intermediate_size": case.expert_width,
        "dense_intermediate_size": case.dense_width,
        "shared_intermediate_size": case.shared_width,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "rotary_dim": case.rotary_dim,
        "max_position_embeddings": case.max_positions,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": case.rope_theta,
            "partial_rotary_factor": case.rotary_dim / case.head_dim,
        },
        "num_local_experts": case.experts,
        "num_experts_per_tok": case.topk_experts,
        "index_n_heads": case.kv_heads,
        "index_head_dim": case.index_head_dim,
        "index_block_size": case.block,
        "index_topk_blocks": case.topk_blocks,
        "index_local_blocks": case.local_blocks,
        "layer_types": [ATTENTION[letter] for letter in case.attention],
        "mlp_layer_types": [MLP[letter] for letter in case.mlp],
        "bos_token_id": BOS_TOKEN,
        "eos_token_id": EOS_TOKEN,
        **case.constants,
    }
    return MiniMaxM3VLConfig(
        text_config=text,
        vision_config=VISION_NATIVE,
        image_token_index=IMAGE_TOKEN,
        video_token_index=VIDEO_TOKEN,
        projector_hidden_size=PROJECTOR_HIDDEN_SIZE,
    )


def released_config(case: Case) -> dict:
    """The case in the schema of the released config.json: nested sparse_attention_config and *_freq lists."""
    sparse = [int(letter == "S") for letter in case.attention]
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "attention_output_gate": False,
        "dense_intermediate_size": case.dense_width,
        "head_dim": case.head_dim,
        "hidden_act": "swigluoai",
        "hidden_size": case.hidden_size,
        "intermediate_size": case.expert_width,
        "max_position_embeddings": case.max_positions,
        "moe_layer_freq": [int(letter == "M") for letter in case.mlp],
        "n_shared_experts": 1,
        "num_attention_heads": case.heads,
        "num_experts_per_tok": case.topk_experts,
        "num_hidden_layers": case.layers,
        "num_key_value_heads": case.kv_heads,
        "num_local_experts": case.experts,
        "num_mtp_modules": 1,
        "partial_rotary_factor": case.rotary_dim / case.head_dim,
        "qk_norm_type": "per_head",
        "rms_norm_eps": 1e-6,
        "rope_theta": case.rope_theta,
        "rotary_dim": case.rotary_dim,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": case.shared_width,
        "sparse_attention_config": {
            "use_sparse_attention": any(sparse),
            "sparse_index_dim": case.index_head_dim,
            "sparse_num_index_heads": case.kv_heads,
            "sparse_topk_blocks": case.topk_blocks,
            "sparse_block_size": case.block,
            "sparse_init_block": 0,
            "sparse_local_block": case.local_blocks,
            "sparse_score_type": "max",
            "sparse_attention_freq": sparse,
            "sparse_disable_index_value": sparse,
        },
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": case.vocab,
        **case.constants,
    }
    vision = {
        "model_type": "clip_vision_model",
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_size": VISION_NATIVE["hidden_size"],
        "image_size": VISION_NATIVE["image_size"],
        "img_token_compression_config": {
            "image_token_compression_method": "patch_merge",
            "spatial_merge_size": VISION_NATIVE["spatial_merge_size"],
            "temporal_patch_size": VISION_NATIVE["temporal_patch_size"],
        },
        "intermediate_size": VISION_NATIVE["intermediate_size"],
        "layer_norm_eps": 1e-5,
        "num_attention_heads": VISION_NATIVE["num_attention_heads"],
        "num_channels": VISION_NATIVE["num_channels"],
        "num_hidden_layers": VISION_NATIVE["num_hidden_layers"],
        "patch_size": VISION_NATIVE["patch_size"],
        "projection_dim": case.hidden_size,
        "vision_segment_max_frames": 4,
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "image_token_index": IMAGE_TOKEN,
        "model_type": "minimax_m3_vl",
        "multimodal_projector_bias": True,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": PROJECTOR_HIDDEN_SIZE,
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "video_token_index": VIDEO_TOKEN,
        "vision_config": vision,
        "vision_feature_layer": -1,
    }


def is_f32_class(name: str) -> bool:
    """Whether the release stores this (in-memory) tensor in F32."""
    return name.endswith(F32_CLASSES)


def fill(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Seeded weights of one tensor: its own stream, so that adding a tensor moves no other.

    Scales are chosen so that every branch is taken: norm weights and router bias are far from zero (a missing +1 or an
    unused bias shows), gates pass the swigluoai limit in a few per cent of the cases. Logits are near one wide: bf16's
    error in a log-prob scales with them, and its bound asks for a model whose logits are of a real model's size.
    """
    stream = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(name.encode())])))
    values = stream.standard_normal(tuple(shape))
    fan_in = shape[-1]
    if "vision_tower" in name or "multi_modal_projector" in name:
        scale = 0.2
    elif name.endswith("e_score_correction_bias"):
        scale = 0.2
    elif "norm.weight" in name:
        scale = 0.3
    elif name.endswith("embed_tokens.weight"):
        scale = 1.0
    elif "gate_up_proj" in name:
        scale = 3.0 / fan_in**0.5
    elif "down_proj" in name:
        scale = 0.15 / fan_in**0.5
    elif name.endswith("lm_head.weight"):
        scale = 0.75 / fan_in**0.5
    else:
        scale = 1.0 / fan_in**0.5
    weights = torch.from_numpy((values * scale).astype(np.float32))
    return weights if is_f32_class(name) else weights.bfloat16().float()


def build(case: Case, seed: int) -> MiniMaxM3SparseForConditionalGeneration:
    """The case's model in fp32; weights outside the F32 classes are exact in bf16."""
    model = MiniMaxM3SparseForConditionalGeneration(native_config(case))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(fill(name, tensor.shape, seed))
    return model


def write(model: MiniMaxM3SparseForConditionalGeneration, case: Case, storage: Storage, root: Path) -> None:
    """Writes one storage of a model through `save_pretrained`; the released schema replaces its config.json."""
    stored = copy.deepcopy(model)
    for name, tensor in [*stored.named_parameters(), *stored.named_buffers()]:
        if storage.dtype == "bfloat16" and not is_f32_class(name) and "inv_freq" not in name:
            tensor.data = tensor.data.bfloat16()
    stored.config.dtype = stored.config.text_config.dtype = stored.config.vision_config.dtype = storage.dtype
    directory = root / storage.directory
    total_bytes = sum(t.numel() * t.element_size() for t in stored.state_dict().values())
    shard_bytes = total_bytes if storage.shards == 1 else int(total_bytes * 0.6)
    stored.save_pretrained(directory, max_shard_size=shard_bytes)
    (directory / "generation_config.json").unlink(missing_ok=True)
    if (found := len(list(directory.glob("*.safetensors")))) != storage.shards:
        raise RuntimeError(f"{storage.directory}: {found} weight files written, expected {storage.shards}")
    if storage.schema == "released":
        config = released_config(case) | {"torch_dtype": storage.dtype}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(directory: Path, dtype: torch.dtype, **kwargs) -> MiniMaxM3SparseForConditionalGeneration:
    """Reads a checkpoint as any user of transformers does. In fp32 the F32 classes keep their bits; in bf16 they are
    rounded, the router with them."""
    model = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", local_files_only=True, **kwargs
    )
    return model.eval()
