//! Selections to force, from a file like the dump's: any of its `blocks.*` and `experts.*`.

use std::path::Path;

use m3_kernels::{Backend, Tensor};
use m3_model::Replay;
use m3_spec::config::{AttentionKind, MlpKind, TextConfig};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::error::{Error, Result};

/// Reads and checks the forced ids.
///
/// # Errors
/// [`Error::Input`] naming tensor, place and value of an id that is out of range, duplicated or not causal, a layer that
/// does not select, or another shape.
pub(super) fn read<B: Backend>(
    backend: &B,
    stream: &B::Stream,
    path: &Path,
    config: &TextConfig,
    lengths: &[usize],
) -> Result<Replay<B>> {
    let refused = |what: String| Error::file(path, what);
    let bytes = std::fs::read(path).map_err(|error| refused(format!("cannot be read: {error}")))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| refused(error.to_string()))?;
    let mut replay = Replay::default();
    for (name, view) in file.tensors() {
        let Some((kind, layer)) = selection(&name) else {
            continue;
        };
        let layer = layer.map_err(refused)?;
        let check = Check {
            name: &name,
            config,
            lengths,
        };
        let ids = check.ids(kind, layer, &view).map_err(refused)?;
        let tensor = match *view.shape() {
            [a, b] => Tensor::from_slice(backend, stream, &ids, [a, b])?,
            [a, b, c] => Tensor::from_slice(backend, stream, &ids, [a, b, c])?,
            _ => continue,
        };
        match kind {
            Kind::Blocks => replay.blocks.insert(layer, tensor),
            Kind::Experts => replay.experts.insert(layer, tensor),
        };
    }
    if replay.blocks.is_empty() && replay.experts.is_empty() {
        return Err(refused("holds neither blocks.* nor experts.*".into()));
    }
    Ok(replay)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Blocks,
    Experts,
}

/// What a tensor's name selects; other tensors of a dump are passed over.
fn selection(name: &str) -> Option<(Kind, std::result::Result<usize, String>)> {
    let (kind, layer) = match name.split_once('.')? {
        ("blocks", layer) => (Kind::Blocks, layer),
        ("experts", layer) => (Kind::Experts, layer),
        _ => return None,
    };
    Some((
        kind,
        layer
            .parse()
            .map_err(|_| format!("{name}: {layer:?} is no layer number")),
    ))
}

struct Check<'a> {
    name: &'a str,
    config: &'a TextConfig,
    lengths: &'a [usize],
}

impl Check<'_> {
    /// The ids, each row ascending with its −1 tail.
    fn ids(
        &self,
        kind: Kind,
        layer: usize,
        view: &TensorView<'_>,
    ) -> std::result::Result<Vec<i32>, String> {
        let name = self.name;
        let expected = self.shape(kind, layer)?;
        if view.dtype() != Dtype::I32 {
            return Err(format!("{name}: must be I32, is {:?}", view.dtype()));
        }
        if view.shape() != expected {
            return Err(format!(
                "{name}: must have shape {expected:?}, has {:?}",
                view.shape()
            ));
        }
        let mut ids: Vec<i32> = view
            .data()
            .chunks_exact(4)
            .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        let width = expected.last().copied().unwrap_or(1).max(1);
        for (number, row) in ids.chunks_exact_mut(width).enumerate() {
            self.row(kind, number, row)?;
        }
        Ok(ids)
    }

    fn shape(&self, kind: Kind, layer: usize) -> std::result::Result<Vec<usize>, String> {
        let (name, config, tokens) = (self.name, self.config, self.lengths.iter().sum());
        let none = || format!("{name}: layer {layer} of this model selects nothing of the kind");
        match kind {
            Kind::Blocks => {
                let sparse = config.attention.get(layer) == Some(&AttentionKind::Sparse);
                let index = config.index.as_ref().filter(|_| sparse).ok_or_else(none)?;
                Ok(vec![index.num_heads, tokens, index.topk_blocks])
            }
            Kind::Experts => {
                let routed = config.mlp.get(layer) == Some(&MlpKind::Moe);
                let moe = config.moe.as_ref().filter(|_| routed).ok_or_else(none)?;
                Ok(vec![tokens, moe.experts_per_token])
            }
        }
    }

    fn row(&self, kind: Kind, number: usize, row: &mut [i32]) -> std::result::Result<(), String> {
        let (name, tokens) = (self.name, self.lengths.iter().sum::<usize>());
        let token = number % tokens.max(1);
        let limit = match kind {
            Kind::Experts => self.config.moe.as_ref().map_or(0, |moe| moe.num_experts),
            Kind::Blocks => self.visible_blocks(token),
        };
        for &id in row.iter() {
            let absent = kind == Kind::Blocks && id == -1;
            if !absent && !usize::try_from(id).is_ok_and(|id| id < limit) {
                let what = if kind == Kind::Blocks {
                    "causal blocks"
                } else {
                    "experts"
                };
                return Err(format!(
                    "{name}: row {number} (token {token}) holds {id}, outside the {limit} {what}"
                ));
            }
        }
        // The tail of −1 sorts behind every id.
        row.sort_unstable_by_key(|&id| id as u32);
        match row
            .windows(2)
            .find(|pair| pair[0] == pair[1] && pair[0] >= 0)
        {
            Some(pair) => Err(format!(
                "{name}: row {number} (token {token}) holds {} twice",
                pair[0]
            )),
            None => Ok(()),
        }
    }

    /// Blocks at or before a token of the pack, counted from its own sequence's start.
    fn visible_blocks(&self, token: usize) -> usize {
        let block = self
            .config
            .index
            .as_ref()
            .map_or(1, |index| index.block_size);
        let mut start = 0;
        for length in self.lengths {
            if token < start + length {
                return (token - start) / block + 1;
            }
            start += length;
        }
        0
    }
}
