//! A tiny checkpoint, and its files taken apart and put together by other means than the crate's own.
#![allow(dead_code)] // each test binary uses its own part

use m3_checkpoint::{Checkpoint, Synthetic, synthetic};
use m3_spec::config::Config;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub const EMBEDDING: &str = "language_model.model.embed_tokens.weight";
pub const ROUTER_BIAS: &str =
    "language_model.model.layers.1.block_sparse_moe.e_score_correction_bias";
pub const SINGLE: &str = "model.safetensors";
pub const INDEX: &str = "model.safetensors.index.json";

/// Two layers: dense attention with a dense MLP, sparse attention with 8 experts; vocab 64, hidden 32.
pub fn config() -> Config {
    let path = repository("golden/checkpoints/basic-released/config.json");
    Config::from_json(&fs::read_to_string(path).unwrap()).unwrap()
}

pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

pub fn options() -> Synthetic {
    Synthetic {
        norm_std: 0.05,
        router_bias_std: 0.1,
        ..Synthetic::new(7, 0.02)
    }
}

/// The tiny checkpoint in a directory of its own.
pub fn checkpoint() -> TempDir {
    let dir = TempDir::new().unwrap();
    synthetic(&dir, &config(), &options()).unwrap();
    dir
}

/// The same in two shards.
pub fn sharded() -> TempDir {
    let dir = TempDir::new().unwrap();
    let options = Synthetic {
        shard_bytes_max: 50_000,
        ..options()
    };
    synthetic(&dir, &config(), &options).unwrap();
    assert_eq!(shards(&dir).len(), 2);
    dir
}

pub fn shards(dir: impl AsRef<Path>) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let mut shards: Vec<_> = entries
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    shards.sort();
    shards
}

/// A tensor outside any file.
#[derive(Clone, Debug, PartialEq)]
pub struct Raw {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Raw {
    pub fn new(name: &str, dtype: &str, shape: &[usize], bytes: usize) -> Self {
        Raw {
            name: name.to_owned(),
            dtype: dtype.to_owned(),
            shape: shape.to_vec(),
            bytes: vec![0; bytes],
        }
    }
}

pub fn read_raw(path: &Path) -> Vec<Raw> {
    let bytes = fs::read(path).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
    let tensors = header.iter().filter(|(name, _)| *name != "__metadata__");
    tensors
        .map(|(name, entry)| {
            let offset = |i: usize| start + entry["data_offsets"][i].as_u64().unwrap() as usize;
            Raw {
                name: name.clone(),
                dtype: entry["dtype"].as_str().unwrap().to_owned(),
                shape: serde_json::from_value(entry["shape"].clone()).unwrap(),
                bytes: bytes[offset(0)..offset(1)].to_vec(),
            }
        })
        .collect()
}

pub fn write_raw(path: &Path, tensors: &[Raw]) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for tensor in tensors {
        let begin = data.len();
        data.extend(&tensor.bytes);
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()]});
        header.insert(tensor.name.clone(), entry);
    }
    write_file(path, Value::Object(header).to_string(), &data);
}

/// A file with this header, whatever it says.
pub fn write_file(path: &Path, header: impl AsRef<[u8]>, data: &[u8]) {
    let header = header.as_ref();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.extend(data);
    fs::write(path, bytes).unwrap();
}

/// Rewrites the single file of `dir` after `edit`.
pub fn edit(dir: &TempDir, edit: impl FnOnce(&mut Vec<Raw>)) {
    let path = dir.path().join(SINGLE);
    let mut tensors = read_raw(&path);
    edit(&mut tensors);
    write_raw(&path, &tensors);
}

pub fn find<'a>(tensors: &'a mut [Raw], name: &str) -> &'a mut Raw {
    tensors.iter_mut().find(|t| t.name == name).unwrap()
}

/// The message with which `dir` is refused, its path written `DIR`. Bad input is never a write error.
pub fn refusal(dir: &TempDir) -> String {
    match Checkpoint::open(dir) {
        Ok(_) => panic!("the checkpoint was not refused"),
        Err(e) => {
            assert!(!e.is_write(), "{e}");
            let line = e.to_string().replace(dir.path().to_str().unwrap(), "DIR");
            assert!(!line.contains('\n'), "{line}");
            line
        }
    }
}
