//! What block ids in a buffer must keep: they address keys, so nothing reads one before it is checked.

use std::ops::Range;

use crate::cpu::access::View;
use crate::error::{Error, Result};

/// Checks ids `[heads, T, topk]`: ascending without repeats, no block that begins after the query, then −1 alone.
/// A token outside every sequence selects nothing.
///
/// # Errors
/// [`Error::Index`] with the first entry that breaks this, and what was accepted there.
pub(in crate::cpu) fn check(
    op: &'static str,
    block_ids: View<'_, i32>,
    sequences: &[Range<usize>],
    block: usize,
) -> Result<()> {
    let [heads, tokens, topk] = [0, 1, 2].map(|axis| block_ids.shape()[axis]);
    let mut own = vec![-1; tokens];
    for sequence in sequences {
        for token in sequence.clone() {
            own[token] = ((token - sequence.start) / block) as i64;
        }
    }
    for head in 0..heads {
        for (token, &own) in own.iter().enumerate() {
            let ids = (0..topk).map(|slot| block_ids.at([head, token, slot]));
            check_row(op, ids, own, (head * tokens + token) * topk)?;
        }
    }
    Ok(())
}

/// Checks the ids of one query whose own block is `own` (−1 if it sees none); `first` is the flat position of its
/// first id.
///
/// # Errors
/// As [`check`].
pub(in crate::cpu) fn check_row(
    op: &'static str,
    ids: impl Iterator<Item = i32>,
    own: i64,
    first: usize,
) -> Result<()> {
    let (mut lower, mut upper) = (0, own + 1);
    for (slot, id) in ids.enumerate() {
        let value = i64::from(id);
        if value == -1 {
            (lower, upper) = (-1, 0);
        } else if value < lower || value >= upper {
            return Err(Error::Index {
                op,
                tensor: "block_ids",
                index: first + slot,
                value,
                lower,
                upper,
            });
        } else {
            lower = value + 1;
        }
    }
    Ok(())
}
