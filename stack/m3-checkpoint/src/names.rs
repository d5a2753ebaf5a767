//! The one table of names: released name ↔ role, with shape and storage class.
//!
//! Source: tensor list of MiniMaxAI/MiniMax-M3 (revision 50942730), 22,893 text tensors. Reader, writer and everything
//! that maps parameters to files go through this table.

use m3_spec::config::{AttentionKind, MlpKind, TextConfig};
use m3_spec::dtype::DType;

/// What a tensor of the text model is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // each is named and described by its row of `TABLE`
pub enum Kind {
    Embedding,
    InputNorm,
    Q,
    K,
    V,
    O,
    QNorm,
    KNorm,
    IndexQ,
    IndexK,
    IndexQNorm,
    IndexKNorm,
    PostAttentionNorm,
    DenseGate,
    DenseUp,
    DenseDown,
    Router,
    RouterBias,
    ExpertGate,
    ExpertUp,
    ExpertDown,
    SharedGate,
    SharedUp,
    SharedDown,
    FinalNorm,
    LmHead,
}

/// A tensor's place in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Role {
    /// What it is.
    pub kind: Kind,
    /// Its layer; none for embedding, final norm and head.
    pub layer: Option<usize>,
    /// Its expert; only for the three matrices of a routed expert.
    pub expert: Option<usize>,
}

/// Which layers have a tensor. Sparse attention and experts are two independent lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Site {
    Model,
    Layer,
    SparseLayer,
    DenseMlpLayer,
    MoeLayer,
}

/// What a tensor is to storage and to its initial values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Weight `[out, in]` in the storage dtype.
    Matrix,
    /// Zero-centred norm weight (the scale is 1 + w) in the storage dtype.
    Norm,
    /// The router's weight: F32 in every release.
    RouterMatrix,
    /// `e_score_correction_bias`: F32 in every release.
    RouterBias,
}

#[derive(Clone, Copy)]
enum Dim {
    Vocab,
    Hidden,
    QRows,
    KvRows,
    HeadWidth,
    IndexQRows,
    IndexWidth,
    Dense,
    Expert,
    Shared,
    Experts,
}

struct Row {
    kind: Kind,
    site: Site,
    class: Class,
    pattern: &'static str,
    shape: &'static [Dim],
}

const fn row(
    kind: Kind,
    site: Site,
    class: Class,
    shape: &'static [Dim],
    pattern: &'static str,
) -> Row {
    Row {
        kind,
        site,
        class,
        pattern,
        shape,
    }
}

/// What every released name of the text model begins with.
const PREFIX: &str = "language_model.";

/// Names without [`PREFIX`], in the order in which the forward pass needs the tensors.
#[rustfmt::skip]
const TABLE: [Row; 26] = {
    use Class::*;
    use Dim::*;
    use Site::{DenseMlpLayer, Layer, Model, MoeLayer, SparseLayer};
    [
        row(Kind::Embedding, Model, Matrix, &[Vocab, Hidden], "model.embed_tokens.weight"),
        row(Kind::InputNorm, Layer, Norm, &[Hidden], "model.layers.{layer}.input_layernorm.weight"),
        row(Kind::Q, Layer, Matrix, &[QRows, Hidden], "model.layers.{layer}.self_attn.q_proj.weight"),
        row(Kind::K, Layer, Matrix, &[KvRows, Hidden], "model.layers.{layer}.self_attn.k_proj.weight"),
        row(Kind::V, Layer, Matrix, &[KvRows, Hidden], "model.layers.{layer}.self_attn.v_proj.weight"),
        row(Kind::O, Layer, Matrix, &[Hidden, QRows], "model.layers.{layer}.self_attn.o_proj.weight"),
        row(Kind::QNorm, Layer, Norm, &[HeadWidth], "model.layers.{layer}.self_attn.q_norm.weight"),
        row(Kind::KNorm, Layer, Norm, &[HeadWidth], "model.layers.{layer}.self_attn.k_norm.weight"),
        row(Kind::IndexQ, SparseLayer, Matrix, &[IndexQRows, Hidden], "model.layers.{layer}.self_attn.index_q_proj.weight"),
        row(Kind::IndexK, SparseLayer, Matrix, &[IndexWidth, Hidden], "model.layers.{layer}.self_attn.index_k_proj.weight"),
        row(Kind::IndexQNorm, SparseLayer, Norm, &[IndexWidth], "model.layers.{layer}.self_attn.index_q_norm.weight"),
        row(Kind::IndexKNorm, SparseLayer, Norm, &[IndexWidth], "model.layers.{layer}.self_attn.index_k_norm.weight"),
        row(Kind::PostAttentionNorm, Layer, Norm, &[Hidden], "model.layers.{layer}.post_attention_layernorm.weight"),
        row(Kind::DenseGate, DenseMlpLayer, Matrix, &[Dense, Hidden], "model.layers.{layer}.mlp.gate_proj.weight"),
        row(Kind::DenseUp, DenseMlpLayer, Matrix, &[Dense, Hidden], "model.layers.{layer}.mlp.up_proj.weight"),
        row(Kind::DenseDown, DenseMlpLayer, Matrix, &[Hidden, Dense], "model.layers.{layer}.mlp.down_proj.weight"),
        row(Kind::Router, MoeLayer, RouterMatrix, &[Experts, Hidden], "model.layers.{layer}.block_sparse_moe.gate.weight"),
        row(Kind::RouterBias, MoeLayer, RouterBias, &[Experts], "model.layers.{layer}.block_sparse_moe.e_score_correction_bias"),
        row(Kind::ExpertGate, MoeLayer, Matrix, &[Expert, Hidden], "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight"),
        row(Kind::ExpertUp, MoeLayer, Matrix, &[Expert, Hidden], "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight"),
        row(Kind::ExpertDown, MoeLayer, Matrix, &[Hidden, Expert], "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"),
        row(Kind::SharedGate, MoeLayer, Matrix, &[Shared, Hidden], "model.layers.{layer}.block_sparse_moe.shared_experts.gate_proj.weight"),
        row(Kind::SharedUp, MoeLayer, Matrix, &[Shared, Hidden], "model.layers.{layer}.block_sparse_moe.shared_experts.up_proj.weight"),
        row(Kind::SharedDown, MoeLayer, Matrix, &[Hidden, Shared], "model.layers.{layer}.block_sparse_moe.shared_experts.down_proj.weight"),
        row(Kind::FinalNorm, Model, Norm, &[Hidden], "model.norm.weight"),
        row(Kind::LmHead, Model, Matrix, &[Vocab, Hidden], "lm_head.weight"),
    ]
};

/// Names that a released checkpoint may hold beside the text model: vision, projector, merger, and the draft modules that
/// some releases ship. They are kept by converters and passed over by everything else.
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

/// The third class, beside router weight and bias, that every release keeps in F32.
const PATCH_EMBEDDING: &str = "vision_tower.vision_model.embeddings.patch_embedding.weight";

/// Endings of the tensors that only quantised checkpoints have.
const QUANTIZED: [&str; 6] = [
    ".weight_scale_inv",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_packed",
    ".weight_global_scale",
    ".input_scale",
];

impl Kind {
    fn row(self) -> &'static Row {
        &TABLE[self as usize]
    }

    /// What it is to storage and to its initial values.
    pub fn class(self) -> Class {
        self.row().class
    }

    /// Whether the trainer changes it. The indexer and the router's bias stay as released.
    pub fn is_trained(self) -> bool {
        !matches!(
            self,
            Kind::IndexQ | Kind::IndexK | Kind::IndexQNorm | Kind::IndexKNorm | Kind::RouterBias
        )
    }

    fn is_of_expert(self) -> bool {
        matches!(self, Kind::ExpertGate | Kind::ExpertUp | Kind::ExpertDown)
    }
}

impl Role {
    /// A tensor outside the layers.
    pub fn of_model(kind: Kind) -> Self {
        Role {
            kind,
            layer: None,
            expert: None,
        }
    }

    /// A tensor of `layer`.
    pub fn of_layer(kind: Kind, layer: usize) -> Self {
        Role {
            kind,
            layer: Some(layer),
            expert: None,
        }
    }

    /// A tensor of routed expert `expert` of `layer`.
    pub fn of_expert(kind: Kind, layer: usize, expert: usize) -> Self {
        Role {
            kind,
            layer: Some(layer),
            expert: Some(expert),
        }
    }

    /// The released name.
    pub fn name(&self) -> String {
        let number = |n: Option<usize>| n.unwrap_or_default().to_string();
        let name = self.kind.row().pattern;
        let name = name.replace("{layer}", &number(self.layer));
        format!("{PREFIX}{}", name.replace("{expert}", &number(self.expert)))
    }

    /// The role of a released name; none when no tensor of the text model has such a name, whatever the config.
    pub fn of_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix(PREFIX)?;
        TABLE.iter().find_map(|row| role_by(row, name))
    }

    /// The shape that `config` gives it.
    pub fn shape(&self, config: &TextConfig) -> Vec<usize> {
        let dims = self.kind.row().shape.iter();
        dims.map(|&dim| size(dim, config)).collect()
    }

    /// Why `config` has no place for this role; none when it has one.
    fn refusal(&self, config: &TextConfig) -> Option<String> {
        let site = self.kind.row().site;
        let layers = config.num_layers();
        let layer = self.layer?;
        if layer >= layers {
            return Some(format!("config.json has {layers} layers"));
        }
        if !has(site, config, layer) {
            let lacks = match site {
                Site::SparseLayer => "dense attention",
                Site::DenseMlpLayer => "experts and no dense MLP",
                _ => "a dense MLP and no experts",
            };
            return Some(format!("config.json gives layer {layer} {lacks}"));
        }
        let experts = size(Dim::Experts, config);
        self.expert
            .is_some_and(|expert| expert >= experts)
            .then(|| format!("config.json has {experts} experts"))
    }
}

/// The numbers of `name` if it fits the pattern of `row`.
fn role_by(row: &Row, name: &str) -> Option<Role> {
    let mut role = Role::of_model(row.kind);
    let mut parts = name.split('.');
    for expected in row.pattern.split('.') {
        let part = parts.next()?;
        match expected {
            "{layer}" => role.layer = Some(number(part)?),
            "{expert}" => role.expert = Some(number(part)?),
            _ if expected == part => {}
            _ => return None,
        }
    }
    parts.next().is_none().then_some(role)
}

/// A number as releases write it: decimal, without sign or leading zeros.
fn number(text: &str) -> Option<usize> {
    let number: usize = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

fn has(site: Site, config: &TextConfig, layer: usize) -> bool {
    match site {
        Site::Model | Site::Layer => true,
        Site::SparseLayer => config.attention[layer] == AttentionKind::Sparse,
        Site::DenseMlpLayer => config.mlp[layer] == MlpKind::Dense,
        Site::MoeLayer => config.mlp[layer] == MlpKind::Moe,
    }
}

/// Saturating, since the numbers come from a file: an absurd product fits no tensor and is refused there.
fn size(dim: Dim, config: &TextConfig) -> usize {
    let (index, moe) = (config.index.as_ref(), config.moe.as_ref());
    match dim {
        Dim::Vocab => config.vocab_size,
        Dim::Hidden => config.hidden_size,
        Dim::QRows => config.num_q_heads.saturating_mul(config.head_dim),
        Dim::KvRows => config.num_kv_heads.saturating_mul(config.head_dim),
        Dim::HeadWidth => config.head_dim,
        Dim::IndexQRows => index.map_or(0, |i| i.num_heads.saturating_mul(i.head_dim)),
        Dim::IndexWidth => index.map_or(0, |i| i.head_dim),
        Dim::Dense => config.dense_intermediate_size,
        Dim::Expert => moe.map_or(0, |m| m.intermediate_size),
        Dim::Shared => moe.map_or(0, |m| m.shared_intermediate_size),
        Dim::Experts => moe.map_or(0, |m| m.num_experts),
    }
}

/// The roles of all tensors of the text model, in the order in which the forward pass needs them.
pub fn roles(config: &TextConfig) -> impl Iterator<Item = Role> + '_ {
    let layers = (0..config.num_layers()).flat_map(move |layer| roles_of_layer(config, layer));
    std::iter::once(Role::of_model(Kind::Embedding))
        .chain(layers)
        .chain([Kind::FinalNorm, Kind::LmHead].map(Role::of_model))
}

fn roles_of_layer(config: &TextConfig, layer: usize) -> impl Iterator<Item = Role> + '_ {
    let here = move |row: &&Row| row.site != Site::Model && has(row.site, config, layer);
    TABLE.iter().filter(here).flat_map(move |row| {
        let copies = if row.kind.is_of_expert() {
            size(Dim::Experts, config)
        } else {
            1
        };
        (0..copies).map(move |expert| Role {
            kind: row.kind,
            layer: Some(layer),
            expert: row.kind.is_of_expert().then_some(expert),
        })
    })
}

/// How many tensors the text model has, without listing them.
pub fn count(config: &TextConfig) -> usize {
    let of_layer = |layer| {
        let here = TABLE
            .iter()
            .filter(|row| row.site != Site::Model && has(row.site, config, layer));
        here.map(|row| {
            if row.kind.is_of_expert() {
                size(Dim::Experts, config)
            } else {
                1
            }
        })
        .fold(0, usize::saturating_add)
    };
    (0..config.num_layers())
        .map(of_layer)
        .fold(3, usize::saturating_add)
}

/// Whether the text model of `config` has a tensor named `name`.
pub fn is_expected(name: &str, config: &TextConfig) -> bool {
    Role::of_name(name).is_some_and(|role| role.refusal(config).is_none())
}

/// The dtype in which a release keeps `name` when its matrices are in `storage`: F32 for router weight, router bias and
/// patch embedding, else `storage`.
pub fn released_dtype(name: &str, storage: DType) -> DType {
    let class = Role::of_name(name).map(|role| role.kind.class());
    match class {
        Some(Class::RouterMatrix | Class::RouterBias) => DType::F32,
        _ if name == PATCH_EMBEDDING => DType::F32,
        _ => storage,
    }
}

/// Whether `name` belongs to vision, projector, merger or a draft module.
pub fn is_passed_over(name: &str) -> bool {
    PASSED_OVER.iter().any(|prefix| name.starts_with(prefix))
}

/// Why `name` is not among the tensors of `config`, and what was probably meant.
pub(crate) fn hint(name: &str, config: &TextConfig) -> String {
    if QUANTIZED.iter().any(|ending| name.ends_with(ending)) {
        return "it belongs to a quantised checkpoint; write a BF16 copy first: \
                m3 convert dequant SRC DST"
            .to_owned();
    }
    if let Some(refusal) = Role::of_name(name).and_then(|role| role.refusal(config)) {
        return refusal;
    }
    let prefixed = format!("{PREFIX}{name}");
    let meant = is_expected(&prefixed, config).then_some(prefixed);
    match meant.or_else(|| nearest(name, config)) {
        Some(meant) => format!("{meant} is meant?"),
        None => {
            "no part of this model has such a name; remove it or move it to a directory of its own"
                .to_owned()
        }
    }
}

/// Bound of the search for a misspelt name; MiniMax-M3.1-Flash has 22,905.
const SEARCHED_MAX: usize = 100_000;

/// The expected name that is nearest to `name` by edit distance, if that is at most a third of its length.
fn nearest(name: &str, config: &TextConfig) -> Option<String> {
    let names = roles(config).take(SEARCHED_MAX).map(|role| role.name());
    let distances = names.map(|meant| (strsim::levenshtein(name, &meant), meant));
    let (distance, meant) = distances.min_by_key(|(distance, _)| *distance)?;
    (distance * 3 <= meant.len()).then_some(meant)
}

#[cfg(test)]
mod tests {
    use super::*;
    use m3_spec::config::Config;
    use std::collections::HashSet;

    fn text(name: &str) -> TextConfig {
        Config::named(name).unwrap().text
    }

    #[test]
    fn every_kind_has_its_own_row() {
        for (number, row) in TABLE.iter().enumerate() {
            assert_eq!(row.kind as usize, number);
            assert_eq!(row.kind.is_of_expert(), row.pattern.contains("{expert}"));
            assert_eq!(row.site != Site::Model, row.pattern.contains("{layer}"));
        }
    }

    #[test]
    fn the_releases_have_their_published_numbers_of_tensors() {
        // 23,416 tensors less 515 of vision and 8 of projector and merger; M3.1-Flash has 3 x 4 more index tensors.
        for (name, expected) in [("minimax-m3", 22_893), ("minimax-m3.1-flash", 22_905)] {
            let config = text(name);
            assert_eq!(roles(&config).count(), expected);
            assert_eq!(count(&config), expected);
        }
    }

    #[test]
    fn the_release_has_its_published_number_of_bytes() {
        // Text-only BF16 with F32 router, recomputed from the published 854,172,958,720 bytes of MiniMax-M3.
        let config = text("minimax-m3.1-flash");
        let bytes = roles(&config).map(|role| {
            let dtype = released_dtype(&role.name(), DType::BF16);
            role.shape(&config).iter().product::<usize>() * dtype.size()
        });
        assert_eq!(bytes.sum::<usize>(), 852_462_408_192);
    }

    #[test]
    fn name_and_role_are_each_others_inverse() {
        for name in ["minimax-m3", "tiny"] {
            let config = text(name);
            let mut seen = HashSet::new();
            for role in roles(&config) {
                assert_eq!(Role::of_name(&role.name()), Some(role));
                assert!(is_expected(&role.name(), &config));
                assert!(!is_passed_over(&role.name()));
                assert!(seen.insert(role.name()));
            }
        }
    }

    #[test]
    fn a_number_has_one_spelling() {
        for layer in ["00", "+0", "-0", "0x0", "", "18446744073709551616"] {
            let name = format!("language_model.model.layers.{layer}.input_layernorm.weight");
            assert_eq!(Role::of_name(&name), None, "{name}");
        }
    }

    #[test]
    fn three_classes_stay_f32() {
        let role = Role::of_layer(Kind::Router, 3);
        assert_eq!(released_dtype(&role.name(), DType::BF16), DType::F32);
        let role = Role::of_layer(Kind::RouterBias, 3);
        assert_eq!(released_dtype(&role.name(), DType::BF16), DType::F32);
        assert_eq!(released_dtype(PATCH_EMBEDDING, DType::BF16), DType::F32);
        let role = Role::of_expert(Kind::ExpertDown, 3, 127);
        assert_eq!(
            role.name(),
            "language_model.model.layers.3.block_sparse_moe.experts.127.w2.weight"
        );
        assert_eq!(released_dtype(&role.name(), DType::BF16), DType::BF16);
    }

    #[test]
    fn draft_modules_and_vision_are_known() {
        for name in [
            "vision_tower.vision_model.pre_layrnorm.weight",
            "multi_modal_projector.linear_1.bias",
            "patch_merge_mlp.linear_2.weight",
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
