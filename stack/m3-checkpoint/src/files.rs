//! The safetensors files of a directory as one set of named tensors, whatever they mean.
//!
//! This half knows no model: converters read quantised checkpoints through it, [`crate::Checkpoint`] adds the config.

use crate::error::{Error, IndexProblem, Result};
use crate::header::Entry;
use crate::pairs::Pairs;
use crate::shard::Shard;
use safetensors::Dtype;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Component, Path, PathBuf};

/// The one-file layout.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The list of shards of the other layout.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The model's configuration.
pub const CONFIG_FILE: &str = "config.json";

/// All tensors of a directory, mapped; nothing is copied.
pub struct TensorFiles {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Place>,
}

struct Place {
    shard: usize,
    entry: Entry,
}

/// A tensor as it lies in its file.
#[derive(Clone, Copy, Debug)]
pub struct RawTensor<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: &'a [usize],
    /// The elements, little-endian, not necessarily aligned.
    pub bytes: &'a [u8],
    /// The file that holds it.
    pub file: &'a Path,
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: Pairs<String>,
}

impl TensorFiles {
    /// Maps the files of `dir` and checks them against themselves, each other and the index.
    ///
    /// # Errors
    /// Every contradiction of a file or of the index; no tensor is usable before all files have been checked.
    pub fn open(dir: &Path) -> Result<Self> {
        let (single, index) = (dir.join(SINGLE_FILE), dir.join(INDEX_FILE));
        match (single.exists(), index.exists()) {
            (true, true) => Err(Error::TwoLayouts {
                dir: dir.to_owned(),
            }),
            (true, false) => Self::of_shards(dir, &[SINGLE_FILE.to_owned()]),
            (false, true) => Self::of_index(dir, &index),
            (false, false) => Err(Error::NoWeights {
                dir: dir.to_owned(),
            }),
        }
    }

    fn of_index(dir: &Path, index: &Path) -> Result<Self> {
        let refused = |problem| Error::Index {
            index: index.to_owned(),
            problem,
        };
        let weight_map = read_index(index)?;
        let mut shards = BTreeSet::new();
        let mut listed = HashSet::with_capacity(weight_map.len());
        for (tensor, shard) in &weight_map {
            if !listed.insert(tensor.as_str()) {
                let tensor = tensor.clone();
                return Err(refused(IndexProblem::Duplicate { tensor }));
            }
            shards.insert(shard.clone());
        }
        let shards: Vec<String> = shards.into_iter().collect();
        for shard in shards.clone() {
            let inside = |c: Component| matches!(c, Component::Normal(_));
            if shard.is_empty() || !Path::new(&shard).components().all(inside) {
                return Err(refused(IndexProblem::Outside { shard }));
            }
            if !dir.join(&shard).exists() {
                return Err(refused(IndexProblem::AbsentShard { shard }));
            }
        }
        let files = Self::of_shards(dir, &shards)?;
        for (tensor, shard) in &weight_map {
            let place = files.tensors.get(tensor);
            if place.is_none_or(|place| shards[place.shard] != *shard) {
                let (tensor, shard) = (tensor.clone(), shard.clone());
                return Err(refused(IndexProblem::NotInShard { tensor, shard }));
            }
        }
        for (tensor, place) in &files.tensors {
            if !listed.contains(tensor.as_str()) {
                let (tensor, shard) = (tensor.clone(), shards[place.shard].clone());
                return Err(refused(IndexProblem::Unlisted { tensor, shard }));
            }
        }
        Ok(files)
    }

    fn of_shards(dir: &Path, names: &[String]) -> Result<Self> {
        let mut shards = Vec::with_capacity(names.len());
        let mut tensors: BTreeMap<String, Place> = BTreeMap::new();
        for (number, file) in names.iter().enumerate() {
            let (shard, entries) = Shard::open(&dir.join(file))?;
            shards.push(shard);
            for entry in entries {
                let name = entry.name.clone();
                let place = Place {
                    shard: number,
                    entry,
                };
                if let Some(earlier) = tensors.insert(name.clone(), place) {
                    return Err(Error::TwoShards {
                        tensor: name,
                        first: names[earlier.shard].clone(),
                        second: file.clone(),
                    });
                }
            }
        }
        Ok(TensorFiles {
            dir: dir.to_owned(),
            shards,
            tensors,
        })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The tensor `name`, if any file holds it.
    pub fn get(&self, name: &str) -> Option<RawTensor<'_>> {
        self.tensors.get(name).map(|place| self.raw(place))
    }

    /// All tensors in the order of their names.
    pub fn iter(&self) -> impl Iterator<Item = RawTensor<'_>> {
        self.tensors.values().map(|place| self.raw(place))
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    fn raw<'a>(&'a self, place: &'a Place) -> RawTensor<'a> {
        let shard = &self.shards[place.shard];
        RawTensor {
            name: &place.entry.name,
            dtype: place.entry.dtype,
            shape: &place.entry.shape,
            bytes: shard.bytes(&place.entry),
            file: shard.path(),
        }
    }
}

fn read_index(index: &Path) -> Result<Vec<(String, String)>> {
    let text = std::fs::read(index).map_err(|source| Error::Read {
        path: index.to_owned(),
        source,
    })?;
    let raw: RawIndex = serde_json::from_slice(&text).map_err(|e| Error::Index {
        index: index.to_owned(),
        problem: IndexProblem::NotJson {
            reason: e.to_string(),
        },
    })?;
    Ok(raw.weight_map.0)
}
