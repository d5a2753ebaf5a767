//! Which keys a query sees: dense, causal and block-sparse attention differ in nothing else.

use std::iter;
use std::ops::Range;
use std::slice;

use crate::cpu::access::View;

/// Rows of scores that are worked on at a time: with a key tile of 128, 96 KiB each of queries, scores and results.
const BATCH_ROWS: usize = 192;

/// Consecutive queries of one sequence.
#[derive(Clone, Debug)]
pub(in crate::cpu) struct Queries {
    /// Their rows in q and o.
    pub rows: Range<usize>,
    /// Place of the first one in its sequence.
    pub position: usize,
    /// Keys of the sequence.
    pub keys: usize,
}

/// The rule by which a query sees keys.
#[derive(Clone, Copy)]
pub(in crate::cpu) enum Sight<'a> {
    /// All keys of its sequence.
    Whole,
    /// Those up to its own position.
    Causal,
    /// Those of the selected blocks up to its own position.
    Blocks {
        /// Checked ids `[Hkv, rows, topk]`.
        ids: View<'a, i32>,
        /// Tokens per block.
        block: usize,
    },
}

impl Sight<'_> {
    /// Lists the keys that each of the queries sees.
    pub(super) fn list(&self, kv_head: usize, queries: &Queries, visible: &mut Visible) {
        visible.clear();
        for (position, row) in (queries.position..).zip(queries.rows.clone()) {
            let causal = queries.keys.min(position + 1);
            match *self {
                Sight::Whole => visible.push(iter::once(0..queries.keys)),
                Sight::Causal => visible.push(iter::once(0..causal)),
                Sight::Blocks { ids, block } => {
                    let selected = (0..ids.shape()[2])
                        .map(|slot| ids.at([kv_head, row, slot]))
                        .take_while(|&id| id >= 0)
                        .map(|id| id as usize * block);
                    visible
                        .push(selected.map(|first| first..causal.min(first.saturating_add(block))));
                }
            }
        }
    }
}

/// Keys that every query of a task sees, by position in the sequence.
#[derive(Default)]
pub(super) struct Visible {
    ranges: Vec<Range<usize>>,
    /// End of each query's ranges, and the first of them that is not walked to its end.
    ends: Vec<usize>,
    next: Vec<usize>,
    walked: usize,
}

impl Visible {
    fn clear(&mut self) {
        self.ranges.clear();
        self.ends.clear();
        self.next.clear();
        self.walked = 0;
    }

    /// The next query sees these ascending ranges.
    fn push(&mut self, ranges: impl Iterator<Item = Range<usize>>) {
        let first = self.ranges.len();
        self.next.push(first);
        for range in ranges {
            join(&mut self.ranges, first, range);
        }
        self.ends.push(self.ranges.len());
    }

    /// The first key of the next tile of which any query sees a key, and what of the tile each query sees.
    pub(super) fn next_tile(&mut self, tile: usize, mask: &mut Mask) -> Option<usize> {
        mask.clear();
        let left = self
            .next
            .iter()
            .zip(&self.ends)
            .filter(|(next, end)| next < end);
        let first = left.map(|(&next, _)| self.ranges[next].start).min()?;
        let first = first.max(self.walked) / tile * tile;
        let end = first.saturating_add(tile);
        for (query, (next, &ranges_end)) in self.next.iter_mut().zip(&self.ends).enumerate() {
            while *next < ranges_end && self.ranges[*next].start < end {
                let range = &self.ranges[*next];
                mask.see(
                    query,
                    range.start.max(first) - first..range.end.min(end) - first,
                );
                if range.end > end {
                    break;
                }
                *next += 1;
            }
        }
        self.walked = end;
        Some(first)
    }
}

/// Appends a range behind those from `first` on; one that adjoins the last is joined to it, an empty one dropped.
fn join(ranges: &mut Vec<Range<usize>>, first: usize, range: Range<usize>) {
    if range.is_empty() {
        return;
    }
    match ranges[first..].last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

/// What the queries of a task see of one key tile. Queries that see nothing of it are not in it.
#[derive(Default)]
pub(super) struct Mask {
    queries: Vec<usize>,
    columns: Vec<Range<usize>>,
    /// End of each query's columns.
    ends: Vec<usize>,
}

impl Mask {
    pub(super) fn clear(&mut self) {
        self.queries.clear();
        self.columns.clear();
        self.ends.clear();
    }

    /// Query `query` of the task sees these columns; queries come in ascending order, and so do a query's columns.
    pub(super) fn see(&mut self, query: usize, columns: Range<usize>) {
        if columns.is_empty() {
            return;
        }
        if self.queries.last() != Some(&query) {
            self.queries.push(query);
            self.ends.push(self.columns.len());
        }
        let first = self.first(self.queries.len() - 1);
        join(&mut self.columns, first, columns);
        self.ends[self.queries.len() - 1] = self.columns.len();
    }

    fn first(&self, place: usize) -> usize {
        place.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    fn columns(&self, place: usize) -> &[Range<usize>] {
        &self.columns[self.first(place)..self.ends[place]]
    }

    /// Columns up to the last one that is seen.
    pub(super) fn width(&self) -> usize {
        let last = self.ends.iter().map(|&end| self.columns[end - 1].end);
        last.max().unwrap_or(0)
    }

    /// Whether some query does not see some column of the first `width`.
    pub(super) fn has_gaps(&self, width: usize) -> bool {
        let whole = 0..width;
        (0..self.queries.len()).any(|place| self.columns(place) != slice::from_ref(&whole))
    }

    /// All its queries, `heads` rows each.
    pub(super) fn whole(&self, heads: usize) -> Batch<'_> {
        Batch {
            mask: self,
            places: 0..self.queries.len(),
            heads,
        }
    }

    /// Its queries, `heads` rows each, in parts that stay in a cache.
    pub(super) fn batches(&self, heads: usize) -> impl Iterator<Item = Batch<'_>> {
        let step = (BATCH_ROWS / heads).max(1);
        let firsts = (0..self.queries.len()).step_by(step);
        firsts.map(move |first| Batch {
            mask: self,
            places: first..self.queries.len().min(first + step),
            heads,
        })
    }
}

/// Some queries of a mask and as many rows of scores of each as there are heads.
pub(super) struct Batch<'a> {
    mask: &'a Mask,
    places: Range<usize>,
    heads: usize,
}

impl Batch<'_> {
    /// Its queries, by their place in the task.
    pub(super) fn queries(&self) -> &[usize] {
        &self.mask.queries[self.places.clone()]
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        self.places.len() * self.heads
    }

    /// For every row of the batch: its row among all rows of the task, and the columns it sees.
    #[inline(always)]
    pub(super) fn each(&self) -> impl Iterator<Item = (usize, &[Range<usize>])> {
        let heads = self.heads;
        self.places.clone().flat_map(move |place| {
            let (query, columns) = (self.mask.queries[place], self.mask.columns(place));
            (0..heads).map(move |head| (query * heads + head, columns))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(
        clippy::single_range_in_vec_init,
        reason = "lists of one range are meant"
    )]
    fn tiles_come_in_order_and_cut_what_each_query_sees() {
        let mut visible = Visible::default();
        visible.clear();
        let queries: [&[Range<usize>]; 4] =
            [&[0..24, 24..48, 96..100], &[40..41], &[], &[130..400]];
        for ranges in queries {
            visible.push(ranges.iter().cloned());
        }
        let (mut mask, mut seen) = (Mask::default(), Vec::new());
        while let Some(first) = visible.next_tile(32, &mut mask) {
            let columns = (0..mask.queries.len()).map(|place| mask.columns(place).to_vec());
            seen.push((first, mask.queries.clone(), columns.collect::<Vec<_>>()));
        }
        assert_eq!(seen[0], (0, vec![0], vec![vec![0..32]]));
        assert_eq!(seen[1], (32, vec![0, 1], vec![vec![0..16], vec![8..9]]));
        assert_eq!(seen[2], (96, vec![0], vec![vec![0..4]]));
        assert_eq!(seen[3], (128, vec![3], vec![vec![2..32]]));
        assert_eq!(seen[seen.len() - 1], (384, vec![3], vec![vec![0..16]]));
        assert_eq!(seen.len(), 3 + 9);
    }
}
