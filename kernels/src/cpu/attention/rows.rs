//! Rows of K and V, wherever they lie.

use std::ops::Range;

use crate::cpu::access::{Storage, View};

/// K or V of one sequence and kv head, by position in the sequence.
pub(in crate::cpu) trait Rows<T>: Sync {
    /// The row of a position below the sequence's length.
    fn row(&self, position: usize) -> &[T];
}

/// Rows of a packed batch.
pub(in crate::cpu) struct Packed<'a, T> {
    /// `[T, heads, D]`
    pub rows: View<'a, T>,
    /// First token of the sequence.
    pub first: usize,
    /// Head.
    pub head: usize,
}

impl<T: Storage> Rows<T> for Packed<'_, T> {
    #[inline]
    fn row(&self, position: usize) -> &[T] {
        self.rows.row([self.first + position, self.head])
    }
}

/// Widens the rows of a key tile, one below the other.
pub(super) fn widen_tile<T: Storage>(
    rows: &impl Rows<T>,
    positions: Range<usize>,
    to: &mut Vec<f32>,
) {
    to.clear();
    for position in positions {
        to.extend(rows.row(position).iter().map(|x| x.to_f32()));
    }
}

/// Widens the rows of some queries and of `heads` of each, one below the other.
pub(super) fn widen_heads<T: Storage>(
    x: View<'_, T>,
    tokens: impl Iterator<Item = usize>,
    heads: Range<usize>,
    to: &mut Vec<f32>,
) {
    to.clear();
    for token in tokens {
        for head in heads.clone() {
            to.extend(x.row([token, head]).iter().map(|x| x.to_f32()));
        }
    }
}
