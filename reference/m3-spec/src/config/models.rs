//! The configurations that the project names.

use super::{
    AttentionKind, Config, IndexConfig, MlpKind, MoeConfig, ProjectorConfig, TextConfig,
    VisionConfig,
};

/// Source layers of the 4-layer cut: two with dense attention and MLP, two sparse mixtures.
pub const FOUR_LAYER_CUT: [usize; 4] = [0, 1, 3, 4];

/// M3 layers 0 to 2 have a dense MLP, and dense attention too.
const M3_DENSE_LAYERS: usize = 3;
const M3_LAYERS: usize = 60;

impl Config {
    /// MiniMax-M3: 60 layers, 57 of them sparse mixtures, θ = 5e6, vision.
    pub fn minimax_m3() -> Self {
        Config {
            text: TextConfig::minimax_m3(),
            vision: Some((VisionConfig::default(), ProjectorConfig::default())),
            quantization: None,
        }
    }

    /// MiniMax-M3.1-Flash: as M3, but sparse attention on all 60 layers and θ = 1e7.
    pub fn minimax_m3_1_flash() -> Self {
        let mut config = Config::minimax_m3();
        config.text.attention = vec![AttentionKind::Sparse; M3_LAYERS];
        config.text.rope_theta = 1e7;
        config
    }

    /// MiniMax-M3-4layer: layers 0, 1, 3 and 4 of M3.
    pub fn minimax_m3_4layer() -> Self {
        let mut config = Config::minimax_m3();
        config.text.attention = FOUR_LAYER_CUT.map(|l| config.text.attention[l]).to_vec();
        config.text.mlp = FOUR_LAYER_CUT.map(|l| config.text.mlp[l]).to_vec();
        config
    }

    /// The shape of tests and of sharding: TP4 × PP4 × EP8 divides it.
    pub fn tiny() -> Self {
        use AttentionKind::{Full, Sparse};
        use MlpKind::{Dense, Moe};
        Config::text_only(TextConfig {
            vocab_size: 512,
            hidden_size: 128,
            num_q_heads: 16,
            num_kv_heads: 4,
            head_dim: 32,
            rotary_dim: 16,
            max_position_embeddings: 16_384,
            dense_intermediate_size: 256,
            attention: vec![Full, Sparse, Full, Sparse],
            mlp: vec![Dense, Dense, Moe, Moe],
            index: Some(IndexConfig {
                num_heads: 4,
                head_dim: 32,
                block_size: 16,
                topk_blocks: 4,
                init_blocks: 0,
                local_blocks: 1,
            }),
            moe: Some(MoeConfig {
                num_experts: 8,
                experts_per_token: 2,
                intermediate_size: 64,
                shared_intermediate_size: 64,
                routed_scaling: 2.0,
            }),
            bos_token_id: None,
            eos_token_id: None,
            ..TextConfig::minimax_m3()
        })
    }

    /// The model that `m3 train` teaches to echo a token. Initial weights have std 0.1, about 1/√hidden: with 0.02 it
    /// did not learn within 60 steps.
    pub fn echo() -> Self {
        use AttentionKind::{Full, Sparse};
        use MlpKind::{Dense, Moe};
        Config::text_only(TextConfig {
            vocab_size: 16,
            hidden_size: 64,
            num_q_heads: 4,
            num_kv_heads: 2,
            max_position_embeddings: 1024,
            dense_intermediate_size: 128,
            initializer_range: 0.1,
            attention: vec![Full, Full, Sparse, Sparse],
            mlp: vec![Dense, Dense, Moe, Moe],
            index: Some(IndexConfig {
                num_heads: 2,
                head_dim: 32,
                block_size: 4,
                topk_blocks: 2,
                init_blocks: 0,
                local_blocks: 1,
            }),
            ..Config::tiny().text
        })
    }

    /// The configuration of that name, if there is one: `minimax-m3`, `minimax-m3.1-flash`, `minimax-m3-4layer`,
    /// `tiny` or `echo`.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "minimax-m3" => Some(Config::minimax_m3()),
            "minimax-m3.1-flash" => Some(Config::minimax_m3_1_flash()),
            "minimax-m3-4layer" => Some(Config::minimax_m3_4layer()),
            "tiny" => Some(Config::tiny()),
            "echo" => Some(Config::echo()),
            _ => None,
        }
    }
}

impl TextConfig {
    /// The text decoder of MiniMax-M3.
    fn minimax_m3() -> Self {
        let is_dense = |layer: usize| layer < M3_DENSE_LAYERS;
        TextConfig {
            vocab_size: 200_064,
            hidden_size: 6144,
            num_q_heads: 64,
            num_kv_heads: 4,
            head_dim: 128,
            rotary_dim: 64,
            rope_theta: 5e6,
            max_position_embeddings: 1_048_576,
            rms_norm_eps: 1e-6,
            dense_intermediate_size: 12_288,
            swiglu_alpha: 1.702,
            swiglu_limit: 7.0,
            initializer_range: 0.02,
            attention: (0..M3_LAYERS)
                .map(|l| {
                    if is_dense(l) {
                        AttentionKind::Full
                    } else {
                        AttentionKind::Sparse
                    }
                })
                .collect(),
            mlp: (0..M3_LAYERS)
                .map(|l| {
                    if is_dense(l) {
                        MlpKind::Dense
                    } else {
                        MlpKind::Moe
                    }
                })
                .collect(),
            index: Some(IndexConfig {
                num_heads: 4,
                head_dim: 128,
                block_size: 128,
                topk_blocks: 16,
                init_blocks: 0,
                local_blocks: 1,
            }),
            moe: Some(MoeConfig {
                num_experts: 128,
                experts_per_token: 4,
                intermediate_size: 3072,
                shared_intermediate_size: 3072,
                routed_scaling: 2.0,
            }),
            bos_token_id: Some(200_034),
            eos_token_id: Some(200_020),
        }
    }
}

impl Default for VisionConfig {
    /// The tower of MiniMax-M3.
    fn default() -> Self {
        VisionConfig {
            hidden_size: 1280,
            intermediate_size: 5120,
            num_layers: 32,
            num_heads: 16,
            num_channels: 3,
            image_size: 2016,
            patch_size: 14,
            temporal_patch_size: 2,
            spatial_merge_size: 2,
            segment_max_frames: 4,
            rope_theta: 1e4,
            layer_norm_eps: 1e-5,
        }
    }
}

impl Default for ProjectorConfig {
    /// The projector of MiniMax-M3.
    fn default() -> Self {
        ProjectorConfig {
            hidden_size: 6144,
            bias: true,
            image_token_id: 200_025,
            video_token_id: 200_026,
        }
    }
}
