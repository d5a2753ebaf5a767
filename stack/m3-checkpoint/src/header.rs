//! The header of a safetensors file, checked against itself and against the length of the file.
//!
//! Format: 8 bytes little-endian header length, the header as JSON, the tensors' bytes without gaps
//! (<https://github.com/huggingface/safetensors#format>). Dtypes and their sizes come from the `safetensors` crate. The
//! parse is our own because that crate keeps the last of two equal names and does not say which tensor or size is wrong.

use crate::error::FileProblem;
use crate::pairs::Pairs;
use safetensors::Dtype;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::HashSet;

/// The longest header that the format allows, in bytes (the limit of the `safetensors` crate).
pub const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes before the header, which hold its length.
pub const PREFIX_BYTES: u64 = 8;

/// Where a tensor lies and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Row-major shape.
    pub shape: Vec<usize>,
    /// Offset of the first byte from the end of the header.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

/// The length of the header from the first bytes of a file of `file_bytes` bytes.
pub fn header_bytes(prefix: [u8; 8], file_bytes: u64) -> Result<u64, FileProblem> {
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > file_bytes.saturating_sub(PREFIX_BYTES) {
        return Err(FileProblem::HeaderBeyondFile {
            header_bytes,
            file_bytes,
        });
    }
    if header_bytes > HEADER_BYTES_MAX {
        return Err(FileProblem::HeaderTooLong { header_bytes });
    }
    Ok(header_bytes)
}

/// The tensors that a header lists, in the order of their bytes, for a file of `file_bytes` bytes.
pub fn parse(header: &[u8], file_bytes: u64) -> Result<Vec<Entry>, FileProblem> {
    let text = std::str::from_utf8(header).map_err(|e| FileProblem::NotUtf8 {
        at: e.valid_up_to(),
    })?;
    let pairs: Pairs<&RawValue> = serde_json::from_str(text).map_err(|e| FileProblem::NotJson {
        reason: e.to_string(),
    })?;
    let mut seen = HashSet::with_capacity(pairs.0.len());
    for (name, _) in &pairs.0 {
        if !seen.insert(name.as_str()) {
            return Err(FileProblem::Duplicate {
                tensor: name.clone(),
            });
        }
    }
    let mut entries = Vec::with_capacity(pairs.0.len());
    for (name, raw) in &pairs.0 {
        if name != "__metadata__" {
            entries.push(entry(name, raw)?);
        }
    }
    entries.sort_by_key(|e| (e.begin, e.end));
    check_layout(&entries, PREFIX_BYTES + header.len() as u64, file_bytes)?;
    Ok(entries)
}

fn entry(name: &str, raw: &RawValue) -> Result<Entry, FileProblem> {
    let bad = |reason| FileProblem::BadEntry {
        tensor: name.to_owned(),
        reason,
    };
    let raw: RawEntry = serde_json::from_str(raw.get()).map_err(|e| bad(e.to_string()))?;
    let dtype = serde_json::from_value(serde_json::Value::from(raw.dtype.as_str()))
        .map_err(|_| bad(format!("dtype {:?} is unknown", raw.dtype)))?;
    let (begin, end) = raw.data_offsets;
    let expected = bytes_of(dtype, &raw.shape);
    if expected.is_none() || end.checked_sub(begin) != expected {
        return Err(FileProblem::WrongSize {
            tensor: name.to_owned(),
            dtype,
            shape: raw.shape,
            expected,
            begin,
            end,
        });
    }
    Ok(Entry {
        name: name.to_owned(),
        dtype,
        shape: raw.shape,
        begin,
        end,
    })
}

/// Bytes of a tensor; none when that is no whole number or overflows.
pub fn bytes_of(dtype: Dtype, shape: &[usize]) -> Option<u64> {
    let elements = shape
        .iter()
        .try_fold(1u64, |n, &dim| n.checked_mul(dim as u64))?;
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// Every byte after the header belongs to exactly one tensor, and all of them are there.
fn check_layout(entries: &[Entry], data_start: u64, file_bytes: u64) -> Result<(), FileProblem> {
    let mut end = 0;
    let mut before = "";
    for entry in entries {
        let (tensor, begin) = (entry.name.clone(), entry.begin);
        if begin < end {
            return Err(FileProblem::Overlap {
                tensor,
                begin,
                before: before.to_owned(),
                end,
            });
        }
        if begin > end {
            return Err(FileProblem::Gap { tensor, begin, end });
        }
        end = entry.end;
        before = &entry.name;
    }
    // Saturation keeps an absurd offset absurd, so it is still refused.
    let declared_bytes = data_start.saturating_add(end);
    if file_bytes < declared_bytes {
        return Err(FileProblem::Truncated {
            declared_bytes,
            file_bytes,
        });
    }
    if file_bytes > declared_bytes {
        return Err(FileProblem::Trailing {
            declared_bytes,
            file_bytes,
        });
    }
    Ok(())
}
