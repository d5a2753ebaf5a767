//! What can be wrong with a checkpoint, one line each: the thing, what was expected, what is there, and the way out.

use std::io;
use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a checkpoint was refused or could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that must be there cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The directory holds no weights under either of the two names.
    #[error(
        "{}: neither model.safetensors nor model.safetensors.index.json is here; name the directory of a released checkpoint",
        dir.display()
    )]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory holds a writer's leftovers and no `config.json`, which is written last.
    #[error(
        "{}: writing this checkpoint never finished (config.json is written last); write it again",
        dir.display()
    )]
    Unfinished {
        /// The directory.
        dir: PathBuf,
    },
    /// Both layouts at once: which one counts is anybody's guess.
    #[error(
        "{}: both model.safetensors and model.safetensors.index.json are here; remove the one that is not meant",
        dir.display()
    )]
    TwoLayouts {
        /// The directory.
        dir: PathBuf,
    },
    /// `config.json` is refused.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: m3_spec::config::ConfigError,
    },
    /// The config declares a quantisation, which this reader does not undo.
    #[error(
        "{}: declares quantization_config; write a BF16 copy first: m3 convert dequant SRC DST",
        path.display()
    )]
    Quantized {
        /// The file.
        path: PathBuf,
    },
    /// A safetensors file contradicts itself.
    #[error("{}: {problem}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        problem: FileProblem,
    },
    /// The index is no index.
    #[error("{}: {problem}", index.display())]
    Index {
        /// The index file.
        index: PathBuf,
        /// What is wrong with it.
        problem: IndexProblem,
    },
    /// A tensor is in two shards.
    #[error(
        "tensor {} is in {first} and in {second}; keep one of them",
        shown(tensor)
    )]
    TwoShards {
        /// The tensor.
        tensor: String,
        /// Shard that came first.
        first: String,
        /// The other one.
        second: String,
    },
    /// A tensor that the config calls for is nowhere.
    #[error("{}: tensor {} is missing{}; config.json calls for it", dir.display(), shown(tensor), others(*more))]
    MissingTensor {
        /// The checkpoint's directory.
        dir: PathBuf,
        /// The first missing tensor, in the order of the model.
        tensor: String,
        /// How many others are missing.
        more: usize,
    },
    /// A tensor that the config has no place for.
    #[error("{file}: tensor {} is unexpected: {hint}", shown(tensor))]
    UnexpectedTensor {
        /// The shard that holds it.
        file: String,
        /// The tensor.
        tensor: String,
        /// What was meant, or why the config has no place for it.
        hint: String,
    },
    /// A tensor's shape contradicts the config.
    #[error(
        "{file}: tensor {} has shape {got:?}, config.json calls for {expected:?}",
        shown(tensor)
    )]
    WrongShape {
        /// The shard that holds it.
        file: String,
        /// The tensor.
        tensor: String,
        /// Shape from the config.
        expected: Vec<usize>,
        /// Shape in the file.
        got: Vec<usize>,
    },
    /// A text tensor is stored in a dtype other than F32 and BF16.
    #[error(
        "{file}: tensor {} has dtype {got}, F32 or BF16 is expected; {}",
        shown(tensor),
        dtype_advice(*got)
    )]
    WrongDtype {
        /// The shard that holds it.
        file: String,
        /// The tensor.
        tensor: String,
        /// Dtype in the file.
        got: safetensors::Dtype,
    },
    /// A tensor was asked for that this checkpoint does not have.
    #[error("{}: no text tensor is named {}", dir.display(), shown(tensor))]
    NoSuchTensor {
        /// The checkpoint's directory.
        dir: PathBuf,
        /// The name asked for.
        tensor: String,
    },
    /// A read into a buffer of another length.
    #[error("tensor {} has {expected} elements, the buffer {got}", shown(tensor))]
    BufferLength {
        /// The tensor.
        tensor: String,
        /// Elements of the tensor.
        expected: usize,
        /// Elements of the buffer.
        got: usize,
    },
    /// The place to write to already holds a checkpoint.
    #[error(
        "{}: already here, and a checkpoint is never overwritten; choose another directory or remove it",
        path.display()
    )]
    Exists {
        /// The file in the way.
        path: PathBuf,
    },
    /// Another process is writing to the same place.
    #[error("{}: another process is writing here; wait for it or choose another directory", dir.display())]
    Busy {
        /// The directory.
        dir: PathBuf,
    },
    /// The tensors to be written cannot make up a checkpoint, or one was handed over wrongly.
    #[error("tensor {}: {problem}", shown(tensor))]
    Plan {
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: PlanProblem,
    },
    /// The disk is full.
    #[error(
        "{}: disk full, the checkpoint has {data_bytes} bytes of tensors; free some space or choose another directory (nothing was left there)",
        path.display()
    )]
    DiskFull {
        /// The file whose write failed.
        path: PathBuf,
        /// Bytes of all tensors together.
        data_bytes: u64,
    },
    /// Any other failure to write.
    #[error("{}: cannot be written: {source}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

impl Error {
    /// Whether writing failed (exit code 110), not the input (exit code 2).
    pub fn is_write(&self) -> bool {
        matches!(self, Error::Write { .. } | Error::DiskFull { .. })
    }

    pub(crate) fn file(file: &Path, problem: FileProblem) -> Self {
        Error::File {
            file: file.to_owned(),
            problem,
        }
    }
}

/// How a safetensors file contradicts itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileProblem {
    /// Not a regular file.
    #[error("is not a regular file")]
    NotAFile,
    /// Too short for the length of a header.
    #[error("has {file_bytes} bytes, a safetensors file has at least 8; get the file again")]
    NoHeader {
        /// Length of the file.
        file_bytes: u64,
    },
    /// What Git LFS leaves in the place of a file that was not downloaded.
    #[error("is a Git LFS pointer, not the file itself; get it with: git lfs pull")]
    LfsPointer,
    /// The header would end after the file.
    #[error(
        "its header claims {header_bytes} bytes, the file has {file_bytes}; it is cut off or no safetensors file, get it again"
    )]
    HeaderBeyondFile {
        /// Length that the file claims for its header.
        header_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// Longer than the format allows.
    #[error(
        "its header claims {header_bytes} bytes, the format allows {}",
        crate::header::HEADER_BYTES_MAX
    )]
    HeaderTooLong {
        /// Length that the file claims for its header.
        header_bytes: u64,
    },
    /// The header is not text.
    #[error("its header is not UTF-8 from byte {at} on; get the file again")]
    NotUtf8 {
        /// Offset of the first bad byte in the header.
        at: usize,
    },
    /// The header is not the JSON object that the format asks for.
    #[error("its header is not the JSON that safetensors asks for: {reason}")]
    NotJson {
        /// The parser's answer.
        reason: String,
    },
    /// The description of a tensor is malformed.
    #[error("its header describes tensor {} wrongly: {reason}", shown(tensor))]
    BadEntry {
        /// The tensor.
        tensor: String,
        /// The parser's answer.
        reason: String,
    },
    /// Two descriptions under one name.
    #[error("its header lists tensor {} twice", shown(tensor))]
    Duplicate {
        /// The tensor.
        tensor: String,
    },
    /// The offsets do not hold what dtype and shape need.
    #[error(
        "tensor {} of dtype {dtype} and shape {shape:?} needs {}, its offsets [{begin}, {end}] hold {}",
        shown(tensor),
        bytes(*expected),
        bytes(end.checked_sub(*begin))
    )]
    WrongSize {
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: safetensors::Dtype,
        /// Its shape.
        shape: Vec<usize>,
        /// Bytes that these need; none when the number is no whole one or overflows.
        expected: Option<u64>,
        /// First byte.
        begin: u64,
        /// One past the last byte.
        end: u64,
    },
    /// A tensor begins before the one before it has ended.
    #[error(
        "tensor {} begins at byte {begin}, inside {}, which ends at {end}",
        shown(tensor),
        shown(before)
    )]
    Overlap {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// The tensor before it.
        before: String,
        /// Where that one ends.
        end: u64,
    },
    /// Bytes that belong to no tensor.
    #[error(
        "tensor {} begins at byte {begin}, the data before it ends at {end}",
        shown(tensor)
    )]
    Gap {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        begin: u64,
        /// Where the data before it ends.
        end: u64,
    },
    /// The file is shorter than its own header says.
    #[error(
        "its header declares {declared_bytes} bytes, the file has {file_bytes}; it is cut off, get it again"
    )]
    Truncated {
        /// Length by the header.
        declared_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
    /// The file is longer than its own header says.
    #[error("its header declares {declared_bytes} bytes, the file has {file_bytes}; get it again")]
    Trailing {
        /// Length by the header.
        declared_bytes: u64,
        /// Length of the file.
        file_bytes: u64,
    },
}

/// What is wrong with `model.safetensors.index.json`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexProblem {
    /// Not an index.
    #[error("is not an index of shards: {reason}")]
    NotJson {
        /// The parser's answer.
        reason: String,
    },
    /// A tensor is listed twice.
    #[error("lists tensor {} twice", shown(tensor))]
    Duplicate {
        /// The tensor.
        tensor: String,
    },
    /// A shard outside the checkpoint's directory.
    #[error(
        "names shard {}, which is not a path inside the directory",
        shown(shard)
    )]
    Outside {
        /// The shard.
        shard: String,
    },
    /// A shard that is not on disk.
    #[error(
        "names shard {}, which is absent; get the file or write the checkpoint again",
        shown(shard)
    )]
    AbsentShard {
        /// The shard.
        shard: String,
    },
    /// A tensor is not where the index says.
    #[error(
        "places tensor {} in {}, which does not hold it",
        shown(tensor),
        shown(shard)
    )]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
    /// A shard holds what the index does not list.
    #[error("does not list tensor {}, which {} holds", shown(tensor), shown(shard))]
    Unlisted {
        /// The tensor.
        tensor: String,
        /// The shard.
        shard: String,
    },
}

/// What is wrong with a tensor to be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanProblem {
    /// Planned twice.
    #[error("is planned twice")]
    Duplicate,
    /// A shape whose size is not a number of bytes.
    #[error("shape {shape:?} of dtype {dtype} is no whole number of bytes, or too many")]
    Size {
        /// Its shape.
        shape: Vec<usize>,
        /// Its dtype.
        dtype: safetensors::Dtype,
    },
    /// Handed over without being planned.
    #[error("was not planned when the writer was made")]
    Unplanned,
    /// Handed over twice.
    #[error("is written twice")]
    Again,
    /// Handed over with another length.
    #[error("has {got} {unit}, {expected} were planned")]
    Length {
        /// Planned.
        expected: u64,
        /// Handed over.
        got: u64,
        /// What is counted.
        unit: &'static str,
    },
    /// Values for a dtype that holds none.
    #[error("holds {dtype}, f32 values fit F32 and BF16 alone")]
    NotFloat {
        /// Its dtype.
        dtype: safetensors::Dtype,
    },
    /// Never handed over.
    #[error("was planned and never written{}", others(*more))]
    Unwritten {
        /// How many others were not.
        more: usize,
    },
}

/// A name from a file as one short line, whatever is in it.
fn shown(name: &str) -> String {
    const LONGEST: usize = 200;
    let line: String = name.escape_debug().take(LONGEST).collect();
    if name.escape_debug().nth(LONGEST).is_some() {
        format!("{line}…")
    } else {
        line
    }
}

fn others(more: usize) -> String {
    match more {
        0 => String::new(),
        1 => ", and 1 more".to_owned(),
        _ => format!(", and {more} more"),
    }
}

fn bytes(count: Option<u64>) -> String {
    count.map_or("no whole number of bytes".to_owned(), |n| {
        format!("{n} bytes")
    })
}

fn dtype_advice(got: safetensors::Dtype) -> &'static str {
    use safetensors::Dtype::{F8_E4M3, F8_E8M0, U8};
    match got {
        F8_E4M3 | F8_E8M0 | U8 => {
            "a quantised checkpoint needs a BF16 copy first: m3 convert dequant SRC DST"
        }
        _ => "store it as BF16 or F32",
    }
}
