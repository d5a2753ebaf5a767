//! Writes a checkpoint in the released layout, a tensor at a time, crash-safe.

use crate::error::{Error, PlanProblem, Result};
use crate::files::{CONFIG_FILE, INDEX_FILE};
use crate::header::{PREFIX_BYTES, bytes_of};
use crate::staging::{Staging, shard_name};
use half::bf16;
use m3_spec::config::TextConfig;
use m3_spec::dtype::DType;
use m3_spec::tensors::{TensorSpec, tensors};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPlan {
    /// Released name.
    pub name: String,
    /// Dtype in the file.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
}

/// The tensors of the text model of `config`, in the order of the model: what a release keeps in F32 in F32, all others in
/// `storage`.
pub fn plan(config: &TextConfig, storage: DType) -> Vec<TensorPlan> {
    let plan = |tensor: TensorSpec| TensorPlan {
        name: tensor.name,
        dtype: match (tensor.dtype, storage) {
            (DType::F32, _) | (_, DType::F32) => Dtype::F32,
            _ => Dtype::BF16,
        },
        shape: tensor.shape,
    };
    tensors(config).into_iter().map(plan).collect()
}

/// A checkpoint in the making. Dropped before [`Writer::finish`], it leaves nothing behind.
pub struct Writer {
    staging: Staging,
    config_json: String,
    shards: Vec<ShardFile>,
    slots: BTreeMap<String, Slot>,
    data_bytes: u64,
}

struct ShardFile {
    name: String,
    path: PathBuf,
    file: File,
}

/// Where a tensor goes: its shard and the offset in that file.
struct Slot {
    shard: usize,
    offset: u64,
    bytes: u64,
    dtype: Dtype,
    written: bool,
}

impl Writer {
    /// Begins a checkpoint in `dir`, which need not exist, with this `config.json` and these tensors. A shard holds at most
    /// `shard_bytes_max` bytes of tensors, or one larger tensor.
    ///
    /// # Errors
    /// [`Error::Exists`] when `dir` holds a checkpoint, [`Error::Busy`] when it is being written, [`Error::Plan`] for a
    /// tensor planned twice or of an impossible size, and write errors.
    pub fn create(
        dir: impl AsRef<Path>,
        config_json: &str,
        tensors: &[TensorPlan],
        shard_bytes_max: u64,
    ) -> Result<Self> {
        let (layout, data_bytes) = lay_out(tensors, shard_bytes_max)?;
        let mut writer = Writer {
            staging: Staging::new(dir.as_ref(), data_bytes)?,
            config_json: config_json.to_owned(),
            shards: Vec::new(),
            slots: BTreeMap::new(),
            data_bytes,
        };
        for (number, tensors) in layout.iter().enumerate() {
            writer.add_shard(shard_name(number, layout.len()), tensors)?;
        }
        Ok(writer)
    }

    fn add_shard(&mut self, name: String, tensors: &[(&TensorPlan, u64)]) -> Result<()> {
        let header = header(tensors);
        let mut offset = header.len() as u64;
        for &(tensor, bytes) in tensors {
            let slot = Slot {
                shard: self.shards.len(),
                offset,
                bytes,
                dtype: tensor.dtype,
                written: false,
            };
            offset += bytes;
            if self.slots.insert(tensor.name.clone(), slot).is_some() {
                return Err(plan_error(&tensor.name, PlanProblem::Duplicate));
            }
        }
        let path = self.staging.final_path(&name);
        let file = File::create_new(self.staging.path(&name))
            .and_then(|file| file.write_all_at(&header, 0).map(|()| file))
            .map_err(|e| self.staging.write_error(&path, e))?;
        self.shards.push(ShardFile { name, path, file });
        Ok(())
    }

    /// Writes the bytes of `name` as they are, little-endian.
    ///
    /// # Errors
    /// [`Error::Plan`] when it was not planned, has another length or was written before; write errors.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let slot = self.unwritten(name)?;
        check_length(name, slot.bytes, bytes.len() as u64, "bytes")?;
        self.write_at(slot.shard, bytes, slot.offset)?;
        self.mark_written(name);
        Ok(())
    }

    /// Writes `name` from f32 values; where it was planned as BF16, each is rounded once to nearest even.
    ///
    /// # Errors
    /// As [`Writer::write`].
    pub fn write_f32(&mut self, name: &str, values: impl IntoIterator<Item = f32>) -> Result<()> {
        const CHUNK: usize = 1 << 16;
        let slot = self.unwritten(name)?;
        let (shard, mut offset) = (slot.shard, slot.offset);
        let (dtype, elements) = match slot.dtype {
            Dtype::F32 => (DType::F32, slot.bytes / 4),
            Dtype::BF16 => (DType::BF16, slot.bytes / 2),
            dtype => return Err(plan_error(name, PlanProblem::NotFloat { dtype })),
        };
        let mut values = values.into_iter();
        let mut chunk = Vec::with_capacity(CHUNK * dtype.size());
        let mut count = 0;
        while count < elements {
            chunk.clear();
            let wanted = (elements - count).min(CHUNK as u64) as usize;
            encode(values.by_ref().take(wanted), dtype, &mut chunk);
            if chunk.is_empty() {
                break;
            }
            self.write_at(shard, &chunk, offset)?;
            offset += chunk.len() as u64;
            count += (chunk.len() / dtype.size()) as u64;
        }
        let surplus = values.count() as u64;
        check_length(name, elements, count + surplus, "values")?;
        self.mark_written(name);
        Ok(())
    }

    /// Ends the checkpoint: everything on disk, renamed, `config.json` last.
    ///
    /// # Errors
    /// [`Error::Plan`] when a planned tensor was not written, and write errors; nothing is left in either case.
    pub fn finish(self) -> Result<()> {
        let mut unwritten = self.slots.iter().filter(|(_, slot)| !slot.written);
        if let Some((name, _)) = unwritten.next() {
            let more = unwritten.count();
            return Err(plan_error(name, PlanProblem::Unwritten { more }));
        }
        for shard in &self.shards {
            let synced = shard.file.sync_all();
            synced.map_err(|e| self.staging.write_error(&shard.path, e))?;
        }
        let mut names: Vec<&str> = self.shards.iter().map(|s| s.name.as_str()).collect();
        if self.shards.len() > 1 {
            self.write_text(INDEX_FILE, &self.index())?;
            names.push(INDEX_FILE);
        }
        self.write_text(CONFIG_FILE, &self.config_json)?;
        self.staging.finish(&names, CONFIG_FILE)
    }

    fn index(&self) -> String {
        let place = |(name, slot): (&String, &Slot)| {
            let shard = self.shards[slot.shard].name.as_str();
            (name.clone(), Value::from(shard))
        };
        let weight_map: serde_json::Map<_, _> = self.slots.iter().map(place).collect();
        let index = json!({
            "metadata": {"total_size": self.data_bytes},
            "weight_map": weight_map,
        });
        format!("{index:#}\n")
    }

    fn write_text(&self, name: &str, text: &str) -> Result<()> {
        let written = File::create_new(self.staging.path(name))
            .and_then(|file| file.write_all_at(text.as_bytes(), 0).map(|()| file))
            .and_then(|file| file.sync_all());
        written.map_err(|e| self.staging.write_error(&self.staging.final_path(name), e))
    }

    fn unwritten(&self, name: &str) -> Result<&Slot> {
        match self.slots.get(name) {
            None => Err(plan_error(name, PlanProblem::Unplanned)),
            Some(slot) if slot.written => Err(plan_error(name, PlanProblem::Again)),
            Some(slot) => Ok(slot),
        }
    }

    fn mark_written(&mut self, name: &str) {
        if let Some(slot) = self.slots.get_mut(name) {
            slot.written = true;
        }
    }

    fn write_at(&self, shard: usize, bytes: &[u8], offset: u64) -> Result<()> {
        let shard = &self.shards[shard];
        let written = shard.file.write_all_at(bytes, offset);
        written.map_err(|e| self.staging.write_error(&shard.path, e))
    }
}

type Layout<'a> = Vec<Vec<(&'a TensorPlan, u64)>>;

/// Tensors by shard, in the order given until the next would not fit, and the bytes of all.
fn lay_out(tensors: &[TensorPlan], shard_bytes_max: u64) -> Result<(Layout<'_>, u64)> {
    let mut shards: Layout = vec![Vec::new()];
    let (mut total, mut filled) = (0u64, 0u64);
    for tensor in tensors {
        let too_large = || {
            let (shape, dtype) = (tensor.shape.clone(), tensor.dtype);
            plan_error(&tensor.name, PlanProblem::Size { shape, dtype })
        };
        let bytes = bytes_of(tensor.dtype, &tensor.shape).ok_or_else(too_large)?;
        total = total.checked_add(bytes).ok_or_else(too_large)?;
        if filled > 0 && filled.saturating_add(bytes) > shard_bytes_max {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push((tensor, bytes));
        }
    }
    for shard in &mut shards {
        // Wide elements first: with the header's padding every tensor is aligned to its element.
        shard.sort_by_key(|(tensor, _)| std::cmp::Reverse(tensor.dtype.bitsize()));
    }
    Ok((shards, total))
}

/// The first bytes of a file: header length, header, spaces up to a multiple of 8.
fn header(tensors: &[(&TensorPlan, u64)]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    // transformers refuses files that do not name their framework.
    entries.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut begin = 0;
    for (tensor, bytes) in tensors {
        let end = begin + bytes;
        entries.insert(
            tensor.name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}),
        );
        begin = end;
    }
    let mut json = Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(PREFIX_BYTES as usize), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json);
    header
}

fn encode(values: impl Iterator<Item = f32>, dtype: DType, out: &mut Vec<u8>) {
    match dtype {
        DType::F32 => values.for_each(|v| out.extend(v.to_le_bytes())),
        _ => values.for_each(|v| out.extend(bf16::from_f32(v).to_le_bytes())),
    }
}

fn check_length(name: &str, expected: u64, got: u64, unit: &'static str) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    Err(plan_error(
        name,
        PlanProblem::Length {
            expected,
            got,
            unit,
        },
    ))
}

fn plan_error(name: &str, problem: PlanProblem) -> Error {
    Error::Plan {
        tensor: name.to_owned(),
        problem,
    }
}
