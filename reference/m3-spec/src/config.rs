//! Model configurations: what a `config.json` says, whichever of the two schemas it is written in.
//!
//! - *Released*: nested `sparse_attention_config`, `*_freq` lists of 0 and 1, `rope_theta` beside the other fields.
//! - *Native* (Hugging Face transformers 5.24): flat `index_*`, `layer_types`, `mlp_layer_types`, `rope_parameters`.
//!
//! [`Config::from_json`] reads both, [`Config::to_released_json`] and [`Config::to_native_json`] write them. Whether a
//! layer's attention is sparse and whether its MLP is a mixture of experts are two independent lists.

mod check;
mod error;
mod models;
mod read;
mod section;
mod write;

pub use error::ConfigError;

/// Attention of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// Causal over the whole sequence.
    Full,
    /// Causal over the key blocks that the indexer selects.
    Sparse,
}

/// MLP of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MlpKind {
    /// One gated MLP.
    Dense,
    /// A mixture of experts and one shared expert.
    Moe,
}

/// The indexer of the sparse-attention layers. Its query heads equal the kv heads in number; it has one key head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexConfig {
    /// Index query heads; index head h selects for kv head h.
    pub num_heads: usize,
    /// Dims of an index head.
    pub head_dim: usize,
    /// Keys per block.
    pub block_size: usize,
    /// Blocks that a query attends to, forced ones included.
    pub topk_blocks: usize,
    /// Leading blocks of a sequence that are always selected.
    pub init_blocks: usize,
    /// Last visible blocks that are always selected; 1 is the query's own block.
    pub local_blocks: usize,
}

/// The experts of the mixture-of-experts layers.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts.
    pub num_experts: usize,
    /// Routed experts per token.
    pub experts_per_token: usize,
    /// Hidden size of a routed expert.
    pub intermediate_size: usize,
    /// Hidden size of the one shared expert.
    pub shared_intermediate_size: usize,
    /// Factor of the routed sum; the shared expert is not scaled.
    pub routed_scaling: f64,
}

/// The text decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct TextConfig {
    /// Rows of the embedding table and of the head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub num_q_heads: usize,
    /// Key and value heads; q head h reads kv head h / (num_q_heads / num_kv_heads).
    pub num_kv_heads: usize,
    /// Dims of a q, k or v head.
    pub head_dim: usize,
    /// Leading dims of a head that are rotated, of index heads too.
    pub rotary_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Hidden size of the dense MLPs.
    pub dense_intermediate_size: usize,
    /// Gain inside the sigmoid of swigluoai.
    pub swiglu_alpha: f64,
    /// Clamp of swigluoai.
    pub swiglu_limit: f64,
    /// Standard deviation of initial weights.
    pub initializer_range: f64,
    /// Attention of every layer.
    pub attention: Vec<AttentionKind>,
    /// MLP of every layer.
    pub mlp: Vec<MlpKind>,
    /// The indexer; present if a layer is sparse.
    pub index: Option<IndexConfig>,
    /// The experts; present if a layer is a mixture.
    pub moe: Option<MoeConfig>,
    /// Token that begins a document, if named.
    pub bos_token_id: Option<usize>,
    /// Token that ends a turn, if named.
    pub eos_token_id: Option<usize>,
}

impl TextConfig {
    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.attention.len()
    }

    /// Query heads per kv head.
    pub fn group_size(&self) -> usize {
        self.num_q_heads / self.num_kv_heads
    }

    /// Factor of the attention scores, head_dim^-½.
    pub fn softmax_scale(&self) -> f64 {
        (1.0 / self.head_dim as f64).sqrt()
    }

    /// Layers whose attention is sparse, ascending.
    pub fn sparse_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_layers()).filter(|&l| self.attention[l] == AttentionKind::Sparse)
    }

    /// Layers whose MLP is a mixture of experts, ascending.
    pub fn moe_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_layers()).filter(|&l| self.mlp[l] == MlpKind::Moe)
    }

    /// The model of these source layers, in this order and renumbered from 0.
    ///
    /// # Errors
    /// [`ConfigError::Constraint`] for an empty list or a layer that the source does not have.
    pub fn cut_layers(&self, layers: &[usize]) -> Result<TextConfig, ConfigError> {
        let available = self.num_layers();
        if layers.is_empty() {
            return Err(ConfigError::constraint(
                "a cut needs at least one layer, got none",
            ));
        }
        if let Some(layer) = layers.iter().find(|&&l| l >= available) {
            return Err(ConfigError::constraint(format!(
                "layer {layer} does not exist: the source has layers 0 to {}",
                available - 1
            )));
        }
        Ok(TextConfig {
            attention: layers.iter().map(|&l| self.attention[l]).collect(),
            mlp: layers.iter().map(|&l| self.mlp[l]).collect(),
            ..self.clone()
        })
    }
}

/// The vision tower; absent fields of a file take the values of MiniMax-M3.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionConfig {
    /// Width of the tower.
    pub hidden_size: usize,
    /// Hidden size of its MLPs.
    pub intermediate_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Colour channels.
    pub num_channels: usize,
    /// Largest side of an image in pixels.
    pub image_size: usize,
    /// Side of a patch in pixels.
    pub patch_size: usize,
    /// Frames per patch.
    pub temporal_patch_size: usize,
    /// Patches per side of a merged group.
    pub spatial_merge_size: usize,
    /// Temporal patches per attention segment of a video.
    pub segment_max_frames: usize,
    /// Base of the 3-D rotary frequencies.
    pub rope_theta: f64,
    /// Epsilon of its LayerNorms.
    pub layer_norm_eps: f64,
}

/// What lies between the vision tower and the decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProjectorConfig {
    /// Hidden size of the projector and of the patch merger.
    pub hidden_size: usize,
    /// Whether its linears have biases.
    pub bias: bool,
    /// Token whose embedding an image feature replaces.
    pub image_token_id: usize,
    /// Token whose embedding a video feature replaces.
    pub video_token_id: usize,
}

/// A whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The text decoder.
    pub text: TextConfig,
    /// The vision tower and its projector; absent in a text-only file.
    pub vision: Option<(VisionConfig, ProjectorConfig)>,
    /// `quantization_config` as the file has it, for the converters.
    pub quantization: Option<serde_json::Value>,
}

impl Config {
    /// A text-only model.
    pub fn text_only(text: TextConfig) -> Self {
        Config {
            text,
            vision: None,
            quantization: None,
        }
    }

    /// Reads a `config.json` of either schema.
    ///
    /// # Errors
    /// [`ConfigError`] naming the key and the values that are missing, of a wrong type or not supported.
    pub fn from_json(json: &str) -> Result<Self, ConfigError> {
        let value = serde_json::from_str(json).map_err(|e| ConfigError::Json(e.to_string()))?;
        read::config(&value)
    }

    /// Reads a parsed `config.json`.
    ///
    /// # Errors
    /// As [`Config::from_json`].
    pub fn from_value(value: &serde_json::Value) -> Result<Self, ConfigError> {
        read::config(value)
    }

    /// The `config.json` in the schema of the release.
    pub fn to_released_json(&self) -> serde_json::Value {
        write::released(self)
    }

    /// The `config.json` in the schema of transformers.
    pub fn to_native_json(&self) -> serde_json::Value {
        write::native(self)
    }

    /// The model of these source layers of the decoder; vision stays.
    ///
    /// # Errors
    /// As [`TextConfig::cut_layers`].
    pub fn cut_layers(&self, layers: &[usize]) -> Result<Config, ConfigError> {
        Ok(Config {
            text: self.text.cut_layers(layers)?,
            ..self.clone()
        })
    }
}
