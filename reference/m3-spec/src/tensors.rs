//! The tensors of a released checkpoint: name, shape, dtype and whether training moves them.
//!
//! The order is that of the model: embedding, layers from 0, final norm, head, then vision. Experts are never packed.

use crate::config::{
    AttentionKind, Config, IndexConfig, MlpKind, MoeConfig, ProjectorConfig, TextConfig,
    VisionConfig,
};
use crate::dtype::DType;

/// Prefix of every text tensor; vision tensors have none.
pub const TEXT_PREFIX: &str = "language_model.";

/// What a tensor is to the model, apart from the layer it stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Embedding table `[vocab, H]`.
    EmbedTokens,
    /// Language-model head `[vocab, H]`.
    LmHead,
    /// Norm before the head `[H]`.
    FinalNorm,
    /// Norm before attention `[H]`.
    InputNorm,
    /// Norm before the MLP `[H]`.
    PostAttentionNorm,
    /// Query projection `[Hq·D, H]`.
    QProj,
    /// Key projection `[Hkv·D, H]`.
    KProj,
    /// Value projection `[Hkv·D, H]`.
    VProj,
    /// Output projection `[H, Hq·D]`.
    OProj,
    /// Per-head query norm `[D]`, one for all heads.
    QNorm,
    /// Per-head key norm `[D]`.
    KNorm,
    /// Index query projection `[Hi·Di, H]`, frozen.
    IndexQProj,
    /// Index key projection `[Di, H]`, frozen.
    IndexKProj,
    /// Per-head index query norm `[Di]`, frozen.
    IndexQNorm,
    /// Index key norm `[Di]`, frozen.
    IndexKNorm,
    /// Gate rows of a dense MLP `[F, H]`.
    DenseGate,
    /// Up rows of a dense MLP `[F, H]`.
    DenseUp,
    /// Down projection of a dense MLP `[H, F]`.
    DenseDown,
    /// Router `[E, H]`, F32.
    Router,
    /// Selection bias `[E]`, F32; moved by load statistics alone, here frozen.
    RouterBias,
    /// Gate (`w1`) of a routed expert `[F, H]`.
    ExpertGate(usize),
    /// Up (`w3`) of a routed expert `[F, H]`.
    ExpertUp(usize),
    /// Down (`w2`) of a routed expert `[H, F]`.
    ExpertDown(usize),
    /// Gate of the shared expert `[F, H]`.
    SharedGate,
    /// Up of the shared expert `[F, H]`.
    SharedUp,
    /// Down of the shared expert `[H, F]`.
    SharedDown,
    /// Vision tower, projector or patch merger; frozen.
    Vision,
}

/// One tensor of a released checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Released name.
    pub name: String,
    /// Row-major shape; a linear's is `[out, in]`.
    pub shape: Vec<usize>,
    /// dtype in the BF16 release: F32 for router, selection bias and patch convolution, else BF16.
    pub dtype: DType,
    /// Whether training moves it.
    pub trained: bool,
    /// What it is.
    pub role: Role,
    /// Its decoder layer, if it stands in one.
    pub layer: Option<usize>,
}

impl TensorSpec {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes in the release.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }
}

/// All tensors of a release: text, then vision.
pub fn all_tensors(config: &Config) -> Vec<TensorSpec> {
    let mut all = tensors(&config.text);
    if let Some((vision, projector)) = &config.vision {
        all.extend(vision_tensors(vision, projector, config.text.hidden_size));
    }
    all
}

/// The tensors of the text decoder.
pub fn tensors(text: &TextConfig) -> Vec<TensorSpec> {
    let (vocab, h) = (text.vocab_size, text.hidden_size);
    let mut list = Vec::new();
    push(
        &mut list,
        None,
        "model.embed_tokens.weight",
        vec![vocab, h],
        Role::EmbedTokens,
    );
    for layer in 0..text.num_layers() {
        layer_tensors(&mut list, text, layer);
    }
    push(
        &mut list,
        None,
        "model.norm.weight",
        vec![h],
        Role::FinalNorm,
    );
    push(
        &mut list,
        None,
        "lm_head.weight",
        vec![vocab, h],
        Role::LmHead,
    );
    list
}

fn push(
    list: &mut Vec<TensorSpec>,
    layer: Option<usize>,
    suffix: &str,
    shape: Vec<usize>,
    role: Role,
) {
    let name = match layer {
        None => format!("{TEXT_PREFIX}{suffix}"),
        Some(layer) => format!("{TEXT_PREFIX}model.layers.{layer}.{suffix}"),
    };
    let is_f32 = matches!(role, Role::Router | Role::RouterBias);
    let trained = !matches!(
        role,
        Role::IndexQProj
            | Role::IndexKProj
            | Role::IndexQNorm
            | Role::IndexKNorm
            | Role::RouterBias
    );
    let dtype = if is_f32 { DType::F32 } else { DType::BF16 };
    list.push(TensorSpec {
        name,
        shape,
        dtype,
        trained,
        role,
        layer,
    });
}

fn layer_tensors(list: &mut Vec<TensorSpec>, text: &TextConfig, layer: usize) {
    let h = text.hidden_size;
    let (q, kv, d) = (
        text.num_q_heads * text.head_dim,
        text.num_kv_heads * text.head_dim,
        text.head_dim,
    );
    let mut add = |suffix: &str, shape, role| push(list, Some(layer), suffix, shape, role);
    add("input_layernorm.weight", vec![h], Role::InputNorm);
    add("self_attn.q_proj.weight", vec![q, h], Role::QProj);
    add("self_attn.k_proj.weight", vec![kv, h], Role::KProj);
    add("self_attn.v_proj.weight", vec![kv, h], Role::VProj);
    add("self_attn.o_proj.weight", vec![h, q], Role::OProj);
    add("self_attn.q_norm.weight", vec![d], Role::QNorm);
    add("self_attn.k_norm.weight", vec![d], Role::KNorm);
    if let (AttentionKind::Sparse, Some(index)) = (text.attention[layer], &text.index) {
        index_tensors(&mut add, index, h);
    }
    add(
        "post_attention_layernorm.weight",
        vec![h],
        Role::PostAttentionNorm,
    );
    match (text.mlp[layer], &text.moe) {
        (MlpKind::Moe, Some(moe)) => moe_tensors(&mut add, moe, h),
        _ => {
            let f = text.dense_intermediate_size;
            add("mlp.gate_proj.weight", vec![f, h], Role::DenseGate);
            add("mlp.up_proj.weight", vec![f, h], Role::DenseUp);
            add("mlp.down_proj.weight", vec![h, f], Role::DenseDown);
        }
    }
}

fn index_tensors(add: &mut impl FnMut(&str, Vec<usize>, Role), index: &IndexConfig, h: usize) {
    let d = index.head_dim;
    add(
        "self_attn.index_q_proj.weight",
        vec![index.num_heads * d, h],
        Role::IndexQProj,
    );
    add(
        "self_attn.index_k_proj.weight",
        vec![d, h],
        Role::IndexKProj,
    );
    add("self_attn.index_q_norm.weight", vec![d], Role::IndexQNorm);
    add("self_attn.index_k_norm.weight", vec![d], Role::IndexKNorm);
}

fn moe_tensors(add: &mut impl FnMut(&str, Vec<usize>, Role), moe: &MoeConfig, h: usize) {
    let (f, s) = (moe.intermediate_size, moe.shared_intermediate_size);
    add(
        "block_sparse_moe.gate.weight",
        vec![moe.num_experts, h],
        Role::Router,
    );
    add(
        "block_sparse_moe.e_score_correction_bias",
        vec![moe.num_experts],
        Role::RouterBias,
    );
    for expert in 0..moe.num_experts {
        let name = |w: &str| format!("block_sparse_moe.experts.{expert}.{w}.weight");
        add(&name("w1"), vec![f, h], Role::ExpertGate(expert));
        add(&name("w2"), vec![h, f], Role::ExpertDown(expert));
        add(&name("w3"), vec![f, h], Role::ExpertUp(expert));
    }
    add(
        "block_sparse_moe.shared_experts.gate_proj.weight",
        vec![s, h],
        Role::SharedGate,
    );
    add(
        "block_sparse_moe.shared_experts.up_proj.weight",
        vec![s, h],
        Role::SharedUp,
    );
    add(
        "block_sparse_moe.shared_experts.down_proj.weight",
        vec![h, s],
        Role::SharedDown,
    );
}

/// The tensors of vision tower, projector and patch merger; `text_hidden_size` is the decoder's width.
pub fn vision_tensors(
    v: &VisionConfig,
    projector: &ProjectorConfig,
    text_hidden_size: usize,
) -> Vec<TensorSpec> {
    let mut list = Vec::new();
    let mut add = |name: String, shape: Vec<usize>, dtype| {
        list.push(TensorSpec {
            name,
            shape,
            dtype,
            trained: false,
            role: Role::Vision,
            layer: None,
        });
    };
    let tower = "vision_tower.vision_model";
    let patch = vec![
        v.hidden_size,
        v.num_channels,
        v.temporal_patch_size,
        v.patch_size,
        v.patch_size,
    ];
    add(
        format!("{tower}.embeddings.patch_embedding.weight"),
        patch,
        DType::F32,
    );
    let mut pair = |name: &str, shape: Vec<usize>, has_bias: bool| {
        let out = shape[0];
        add(format!("{name}.weight"), shape, DType::BF16);
        if has_bias {
            add(format!("{name}.bias"), vec![out], DType::BF16);
        }
    };
    let (h, f) = (v.hidden_size, v.intermediate_size);
    // The spelling is the release's.
    pair(&format!("{tower}.pre_layrnorm"), vec![h], true);
    for layer in 0..v.num_layers {
        let prefix = format!("{tower}.encoder.layers.{layer}");
        pair(&format!("{prefix}.layer_norm1"), vec![h], true);
        pair(&format!("{prefix}.layer_norm2"), vec![h], true);
        for proj in ["q_proj", "k_proj", "v_proj", "out_proj"] {
            pair(&format!("{prefix}.self_attn.{proj}"), vec![h, h], true);
        }
        pair(&format!("{prefix}.mlp.fc1"), vec![f, h], true);
        pair(&format!("{prefix}.mlp.fc2"), vec![h, f], true);
    }
    let (p, merged) = (
        projector.hidden_size,
        text_hidden_size * v.spatial_merge_size * v.spatial_merge_size,
    );
    pair("multi_modal_projector.linear_1", vec![p, h], projector.bias);
    pair(
        "multi_modal_projector.linear_2",
        vec![text_hidden_size, p],
        projector.bias,
    );
    pair("patch_merge_mlp.linear_1", vec![p, merged], projector.bias);
    pair(
        "patch_merge_mlp.linear_2",
        vec![text_hidden_size, p],
        projector.bias,
    );
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn is_index(t: &TensorSpec) -> bool {
        t.name.contains(".index_")
    }

    /// Counts and bytes published for MiniMaxAI/MiniMax-M3, revision 50942730.
    #[test]
    fn minimax_m3_has_the_published_tensors_and_bytes() {
        let config = Config::minimax_m3();
        let text = tensors(&config.text);
        let all = all_tensors(&config);
        assert_eq!(text.len(), 22_893);
        assert_eq!(text.iter().filter(|t| is_index(t)).count(), 228);
        assert_eq!(all.len(), 23_416);
        assert_eq!(
            all.iter().map(TensorSpec::bytes).sum::<usize>(),
            854_172_958_720
        );
        assert_eq!(
            all.iter().map(TensorSpec::elements).sum::<usize>(),
            427_040_140_160
        );
    }

    /// 12 more index tensors than M3; bytes computed from the published shapes.
    #[test]
    fn flash_has_index_tensors_in_every_layer() {
        let text = tensors(&Config::minimax_m3_1_flash().text);
        assert_eq!(text.len(), 22_905);
        assert_eq!(text.iter().filter(|t| is_index(t)).count(), 240);
        assert_eq!(
            text.iter().map(TensorSpec::bytes).sum::<usize>(),
            852_462_408_192
        );
    }

    #[test]
    fn names_are_unique_and_frozen_tensors_are_index_bias_and_vision() {
        let all = all_tensors(&Config::minimax_m3());
        assert_eq!(
            all.iter().map(|t| &t.name).collect::<BTreeSet<_>>().len(),
            all.len()
        );
        for t in &all {
            let frozen = is_index(t)
                || t.name.ends_with("e_score_correction_bias")
                || !t.name.starts_with(TEXT_PREFIX);
            assert_eq!(t.trained, !frozen, "{}", t.name);
        }
    }

    #[test]
    fn f32_tensors_are_router_bias_and_patch_convolution() {
        let f32s: Vec<_> = all_tensors(&Config::minimax_m3())
            .into_iter()
            .filter(|t| t.dtype == DType::F32)
            .collect();
        assert_eq!(f32s.len(), 57 + 57 + 1);
    }

    #[test]
    fn roles_and_layers_follow_the_dispatch_lists() {
        let list = tensors(&Config::tiny().text);
        let find = |name: &str| {
            list.iter()
                .find(|t| t.name == format!("{TEXT_PREFIX}{name}"))
        };
        let expert = find("model.layers.2.block_sparse_moe.experts.7.w2.weight").unwrap();
        assert_eq!((expert.role, expert.layer), (Role::ExpertDown(7), Some(2)));
        assert_eq!(expert.shape, [128, 64]);
        assert!(
            find("model.layers.1.self_attn.index_q_proj.weight").is_some(),
            "sparse with a dense mlp"
        );
        assert!(find("model.layers.1.mlp.gate_proj.weight").is_some());
        assert!(
            find("model.layers.2.self_attn.index_q_proj.weight").is_none(),
            "a mixture with full attention"
        );
    }
}
