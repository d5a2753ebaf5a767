//! What a pass over the model runs with: device, memory, the pack of sequences, forced selections.

use std::collections::BTreeMap;

use m3_kernels::launch::{self, AttentionConfig};
use m3_kernels::{Arena, Backend, Result, Tensor};
use m3_spec::config::TextConfig;
use m3_spec::dtype::DType;
use m3_spec::rope::RotaryTable;

use crate::error::Error;

/// Sequences packed one after another (THD), in buffers on the device.
pub struct Pack<B: Backend> {
    /// Token ids, I32 `[T]`.
    pub ids: Tensor<B>,
    /// First token of every sequence, I32 `[B + 1]`.
    pub cu_seqlens: Tensor<B>,
    /// Position of every token in its own sequence, I32 `[T]`.
    pub positions: Tensor<B>,
    /// Next token of every token, I32 `[T]`; −1 at a sequence's last token.
    pub targets: Tensor<B>,
    /// Tokens of the longest sequence.
    pub longest: usize,
    /// Selections that replace the model's own.
    pub replay: Replay<B>,
}

/// Block and expert ids that are forced, by layer. A layer that is absent selects for itself.
///
/// The ids belong to the pack and are looked up by layer, so a recomputed or a pipelined forward pass reads the same
/// ones without a cursor to keep in step.
pub struct Replay<B: Backend> {
    /// I32 `[index_heads, T, topk]`.
    pub blocks: BTreeMap<usize, Tensor<B>>,
    /// I32 `[T, k]`, ascending.
    pub experts: BTreeMap<usize, Tensor<B>>,
}

impl<B: Backend> Default for Replay<B> {
    fn default() -> Self {
        Replay {
            blocks: BTreeMap::new(),
            experts: BTreeMap::new(),
        }
    }
}

impl<B: Backend> Pack<B> {
    /// Packs `sequences` of token ids.
    ///
    /// # Errors
    /// [`Error::Input`] for no or an empty sequence, a token id outside the vocabulary, or a sequence longer than the
    /// model's positions; what the device reports.
    pub fn new(
        backend: &B,
        stream: &B::Stream,
        config: &TextConfig,
        sequences: &[Vec<i64>],
    ) -> std::result::Result<Self, Error> {
        let mut host = HostPack::default();
        if sequences.is_empty() {
            return Err(Error::Input(
                "there is no sequence; give at least one".into(),
            ));
        }
        for (number, sequence) in sequences.iter().enumerate() {
            host.push(config, number, sequence)?;
        }
        let (tokens, entries) = (host.ids.len(), host.cu_seqlens.len());
        let upload = |values: &[i32], extent| Tensor::from_slice(backend, stream, values, [extent]);
        Ok(Pack {
            ids: upload(&host.ids, tokens)?,
            cu_seqlens: upload(&host.cu_seqlens, entries)?,
            positions: upload(&host.positions, tokens)?,
            targets: upload(&host.targets, tokens)?,
            longest: host.longest,
            replay: Replay::default(),
        })
    }

    /// Rows that continue cached sequences: token ids, positions and next tokens (−1 for none).
    ///
    /// # Errors
    /// What the device reports.
    pub fn rows(
        backend: &B,
        stream: &B::Stream,
        [ids, positions, targets]: [&[i32]; 3],
    ) -> std::result::Result<Self, Error> {
        let upload = |values: &[i32]| Tensor::from_slice(backend, stream, values, [values.len()]);
        let longest = positions.iter().max().map_or(0, |&last| last as usize + 1);
        Ok(Pack {
            ids: upload(ids)?,
            cu_seqlens: upload(&[0, ids.len() as i32])?,
            positions: upload(positions)?,
            targets: upload(targets)?,
            longest,
            replay: Replay::default(),
        })
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.ids.elements()
    }
}

/// Keys and values of growing sequences, in pages.
pub struct Cache<B: Backend> {
    /// Pages of every sequence, I32 `[S, max_pages]`.
    pub page_table: Tensor<B>,
    /// Pages of every layer.
    pub layers: Vec<LayerPages<B>>,
}

/// Pages of one layer.
pub struct LayerPages<B: Backend> {
    /// Keys after norm and rotation, `[P, page, Hkv, D]`.
    pub k: Tensor<B>,
    /// Values, `[P, page, Hkv, D]`.
    pub v: Tensor<B>,
    /// Index keys after norm and rotation, `[P, page, 1, Di]`, in sparse layers.
    pub index_k: Option<Tensor<B>>,
}

/// Where the rows of a pass stand in a cache: row r continues the sequence `slots[r]` at the pack's `positions[r]`.
pub struct Placed<'a, B: Backend> {
    /// The cache, which takes in the rows' keys and values.
    pub cache: &'a Cache<B>,
    /// I32 `[R]`.
    pub slots: &'a Tensor<B>,
}

impl<B: Backend> Clone for Placed<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Placed<'_, B> {}

struct HostPack {
    ids: Vec<i32>,
    cu_seqlens: Vec<i32>,
    positions: Vec<i32>,
    targets: Vec<i32>,
    longest: usize,
}

impl Default for HostPack {
    fn default() -> Self {
        let (ids, positions, targets) = (Vec::new(), Vec::new(), Vec::new());
        HostPack {
            ids,
            cu_seqlens: vec![0],
            positions,
            targets,
            longest: 0,
        }
    }
}

impl HostPack {
    fn push(
        &mut self,
        config: &TextConfig,
        number: usize,
        sequence: &[i64],
    ) -> std::result::Result<(), Error> {
        check_sequence(config, number, sequence)?;
        let start = self.ids.len();
        self.ids.extend(sequence.iter().map(|&id| id as i32));
        self.positions.extend(0..sequence.len() as i32);
        self.targets.extend_from_slice(&self.ids[start + 1..]);
        self.targets.push(-1);
        self.longest = self.longest.max(sequence.len());
        let Ok(end) = i32::try_from(self.ids.len()) else {
            let what = format!("sequence {number}: the pack exceeds 2^31 tokens; split it");
            return Err(Error::Input(what));
        };
        self.cu_seqlens.push(end);
        Ok(())
    }
}

/// Whether the model can read a sequence; `number` is its place among those given.
///
/// # Errors
/// [`Error::Input`] for an empty sequence, one longer than the model's positions, or a token id outside the vocabulary.
pub fn check_sequence(
    config: &TextConfig,
    number: usize,
    sequence: &[i64],
) -> std::result::Result<(), Error> {
    let refused = |what: String| Err(Error::Input(format!("sequence {number}: {what}")));
    let (vocab, positions) = (config.vocab_size, config.max_position_embeddings);
    if sequence.is_empty() {
        return refused("it is empty; drop it or give it a token".into());
    }
    if sequence.len() > positions {
        let length = sequence.len();
        return refused(format!(
            "{length} tokens are more than the model's {positions} positions"
        ));
    }
    let stray = |id: &i64| !usize::try_from(*id).is_ok_and(|id| id < vocab);
    match sequence.iter().position(stray) {
        Some(at) => {
            let id = sequence[at];
            refused(format!(
                "token {at} is {id}, outside the vocabulary 0..{vocab}"
            ))
        }
        None => Ok(()),
    }
}

/// Block that tiles are chosen for in a model without sparse layers: that of the released models.
const DENSE_BLOCK: usize = 128;

/// Rotary table and tiles: what every pass over one model shares.
pub struct Constants<B: Backend> {
    /// F32 `[positions, rotary_dim / 2, 2]`.
    pub cos_sin: Tensor<B>,
    /// Tiles of the dense and the sparse layers alike.
    pub tiles: AttentionConfig,
}

impl<B: Backend> Constants<B> {
    /// Tables for sequences of up to `positions` tokens.
    ///
    /// # Errors
    /// What the device reports.
    pub fn new(
        backend: &B,
        stream: &B::Stream,
        config: &TextConfig,
        positions: usize,
    ) -> Result<Self> {
        let table = RotaryTable::new(config.rope_theta, config.rotary_dim, positions);
        let shape = [positions, config.rotary_dim / 2, 2];
        let cos_sin = Tensor::from_slice(backend, stream, &table.cos_sin, shape)?;
        let block = config
            .index
            .as_ref()
            .map_or(DENSE_BLOCK, |index| index.block_size);
        let tiles = launch::attention(block, config.head_dim, config.group_size(), backend.arch());
        Ok(Constants { cos_sin, tiles })
    }
}

/// One pass: where it runs, what it reads, where its activations lie.
pub struct Context<'a, B: Backend> {
    /// Device.
    pub backend: &'a B,
    /// Queue that everything is enqueued on.
    pub stream: &'a B::Stream,
    /// Memory of activations.
    pub arena: &'a mut Arena<B>,
    /// Sequences.
    pub pack: &'a Pack<B>,
    /// Tables and tiles.
    pub constants: &'a Constants<B>,
    /// Where keys and values of earlier tokens are; absent when the pack holds its sequences whole.
    pub placed: Option<Placed<'a, B>>,
    /// Storage dtype of activations.
    pub dtype: DType,
}

impl<B: Backend> Context<'_, B> {
    /// An activation in the storage dtype.
    pub(crate) fn activation<const N: usize>(&mut self, shape: [usize; N]) -> Result<Tensor<B>> {
        self.arena.alloc(self.backend, self.dtype, shape)
    }

    /// A tensor of another dtype.
    pub(crate) fn alloc<const N: usize>(
        &mut self,
        dtype: DType,
        shape: [usize; N],
    ) -> Result<Tensor<B>> {
        self.arena.alloc(self.backend, dtype, shape)
    }

    /// Tokens of the pack.
    pub(crate) fn tokens(&self) -> usize {
        self.pack.tokens()
    }
}
