//! One safetensors file, mapped.

use crate::error::{Error, FileProblem, Result};
use crate::header::{self, Entry, PREFIX_BYTES};
use memmap2::Mmap;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A mapped file whose header has been read and checked.
pub struct Shard {
    path: PathBuf,
    map: Mmap,
    data_start: usize,
}

impl Shard {
    /// Maps `path` and returns it with the tensors that it holds, in the order of their bytes.
    pub fn open(path: &Path) -> Result<(Self, Vec<Entry>)> {
        let read = |source| Error::Read {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(read)?;
        let metadata = file.metadata().map_err(read)?;
        if !metadata.is_file() {
            return Err(Error::file(path, FileProblem::NotAFile));
        }
        if metadata.len() < PREFIX_BYTES {
            return Err(Error::file(
                path,
                FileProblem::NoHeader {
                    file_bytes: metadata.len(),
                },
            ));
        }
        let map = map(&file).map_err(read)?;
        let (entries, data_start) = entries(&map).map_err(|problem| Error::file(path, problem))?;
        let shard = Shard {
            path: path.to_owned(),
            map,
            data_start,
        };
        Ok((shard, entries))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of one of this file's own tensors.
    pub fn bytes(&self, entry: &Entry) -> &[u8] {
        let data = &self.map[self.data_start..];
        &data[entry.begin as usize..entry.end as usize]
    }
}

#[allow(unsafe_code)]
fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is read-only and never leaves this type but as `&[u8]`. Released checkpoints are not modified in
    // place: the writer beside this reader renames whole files and never reopens one, so the mapped inode keeps its bytes.
    // A foreign program that truncates the file while it is read ends this process with SIGBUS; it cannot make it read
    // memory that is not the file's.
    unsafe { Mmap::map(file) }
}

fn entries(map: &[u8]) -> Result<(Vec<Entry>, usize), FileProblem> {
    let file_bytes = map.len() as u64;
    if map.starts_with(b"version https://git-lfs") {
        return Err(FileProblem::LfsPointer);
    }
    let (prefix, rest) = map
        .split_first_chunk()
        .ok_or(FileProblem::NoHeader { file_bytes })?;
    let header_bytes = header::header_bytes(*prefix, file_bytes)? as usize;
    let entries = header::parse(&rest[..header_bytes], file_bytes)?;
    Ok((entries, prefix.len() + header_bytes))
}
