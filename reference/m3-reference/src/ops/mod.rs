//! One file an op, under the same stem in every room.

pub mod adamw;
pub mod attention;
pub mod block_select;
pub mod embedding;
pub mod grouped_gemm;
pub mod grpo_loss;
pub mod linear;
pub mod log_prob;
pub mod moe_combine;
pub mod moe_permute;
pub mod msa_attention;
pub mod msa_score;
pub mod qk_norm_rope;
pub mod rms_norm;
pub mod router;
pub mod swigluoai;
pub mod tile_map;
