//! Attention and scoring over a paged cache: the walks of [`super::attention`] and [`super::msa_score`], with keys found
//! through a page table.

use std::ops::Range;

use rayon::prelude::*;

use super::CpuBackend;
use super::access::{Access, Storage, View, with_storage};
use super::attention::forward::Forward;
use super::attention::mask::{Queries, Sight};
use super::attention::rows::Rows;
use super::attention::selection;
use super::msa_score::{self, Score};
use crate::error::{Error, Result};
use crate::ops::{self, PagedDims};

/// Where every row stands: its sequence, its position, and the page of any key of its sequence.
struct Places<'a> {
    table: View<'a, i32>,
    slots: &'a [i32],
    positions: &'a [i32],
    dims: PagedDims,
}

impl<'a> Places<'a> {
    /// Checks every row: its slot, and a page for each of its keys.
    ///
    /// # Errors
    /// [`Error::Index`] naming the buffer that points nowhere.
    fn new(
        op: &'static str,
        dims: PagedDims,
        [table, slots, positions]: [View<'a, i32>; 3],
    ) -> Result<Self> {
        let (slots, positions) = (slots.as_slice(), positions.as_slice());
        let places = Places {
            table,
            slots,
            positions,
            dims,
        };
        (0..dims.rows).try_for_each(|row| places.check(op, row))?;
        Ok(places)
    }

    fn check(&self, op: &'static str, row: usize) -> Result<()> {
        let PagedDims {
            slots,
            max_pages,
            pages,
            page,
            ..
        } = self.dims;
        let refused = |tensor, index, value: i32, upper: usize| {
            let (value, upper) = (i64::from(value), upper as i64);
            Err(Error::Index {
                op,
                tensor,
                index,
                value,
                lower: 0,
                upper,
            })
        };
        let Some(position) = self.position(row) else {
            return Ok(());
        };
        let slot = self.slots[row];
        if !usize::try_from(slot).is_ok_and(|slot| slot < slots) {
            return refused("slots", row, slot, slots);
        }
        if position >= max_pages * page {
            return refused("positions", row, self.positions[row], max_pages * page);
        }
        for number in 0..=position / page {
            let entry = self.table.at([slot as usize, number]);
            if !usize::try_from(entry).is_ok_and(|entry| entry < pages) {
                return refused(
                    "page_table",
                    slot as usize * max_pages + number,
                    entry,
                    pages,
                );
            }
        }
        Ok(())
    }

    /// Position of a row in its sequence; none for a row that is skipped.
    fn position(&self, row: usize) -> Option<usize> {
        usize::try_from(self.positions[row]).ok()
    }

    /// Page and row within it of a key of a sequence.
    fn key(&self, slot: usize, position: usize) -> [usize; 2] {
        let page = self.table.at([slot, position / self.dims.page]);
        [page as usize, position % self.dims.page]
    }

    /// Runs of at most `longest` rows that follow one another in one sequence, with its slot.
    fn runs(&self, longest: usize) -> Vec<(usize, Queries)> {
        let mut runs: Vec<(usize, Queries)> = Vec::new();
        for row in 0..self.dims.rows {
            let Some(position) = self.position(row) else {
                continue;
            };
            let slot = self.slots[row] as usize;
            if let Some((last_slot, last)) = runs.last_mut() {
                let follows = *last_slot == slot && last.rows.end == row && last.keys == position;
                if follows && last.rows.len() < longest {
                    last.rows.end += 1;
                    last.keys += 1;
                    continue;
                }
            }
            runs.push((
                slot,
                Queries {
                    rows: row..row + 1,
                    position,
                    keys: position + 1,
                },
            ));
        }
        runs
    }

    /// Rows that are skipped.
    fn skipped(&self) -> impl Iterator<Item = usize> {
        (0..self.dims.rows).filter(|&row| self.position(row).is_none())
    }
}

/// One head of one cached sequence.
struct Cached<'a, T> {
    places: &'a Places<'a>,
    pages: View<'a, T>,
    slot: usize,
    head: usize,
}

impl<T: Storage> Rows<T> for Cached<'_, T> {
    fn row(&self, position: usize) -> &[T] {
        let [page, at] = self.places.key(self.slot, position);
        self.pages.row([page, at, self.head])
    }
}

pub(super) fn page_write(_: &CpuBackend, args: &ops::PageWrite<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[
        args.rows,
        args.page_table,
        args.slots,
        args.positions,
        args.pages,
    ]);
    let places = [args.page_table, args.slots, args.positions].map(|tensor| held.read(tensor));
    let places = Places::new("page_write", dims, places)?;
    with_storage!(args.rows.dtype(), T => {
        let (rows, pages) = (held.read::<T>(args.rows), held.write::<T>(args.pages));
        for row in 0..dims.rows {
            let Some(position) = places.position(row) else { continue };
            let [page, at] = places.key(places.slots[row] as usize, position);
            for head in 0..dims.heads {
                // SAFETY: one task writes.
                unsafe { pages.row_mut([page, at, head]) }.copy_from_slice(rows.row([row, head]));
            }
        }
    });
    Ok(())
}

pub(super) fn paged_attention(
    _: &CpuBackend,
    args: &ops::PagedAttention<'_, CpuBackend>,
) -> Result<()> {
    const OP: &str = "paged_attention";
    let (dims, cache) = args.dims()?;
    let operands = [
        args.q,
        args.k_pages,
        args.v_pages,
        args.page_table,
        args.slots,
        args.positions,
        args.o,
        args.lse,
    ];
    let held = Access::lock(
        &operands
            .into_iter()
            .chain(args.block_ids)
            .collect::<Vec<_>>(),
    );
    let places = [args.page_table, args.slots, args.positions].map(|tensor| held.read(tensor));
    let places = Places::new(OP, cache, places)?;
    let sight = match args.block_ids {
        None => Sight::Causal,
        Some(block_ids) => {
            let ids = held.read::<i32>(block_ids);
            check_ids(OP, ids, &places, args.block)?;
            Sight::Blocks {
                ids,
                block: args.block,
            }
        }
    };
    with_storage!(args.q.dtype(), T => {
        let pass = Forward::<T> {
            q: held.read(args.q),
            o: held.write(args.o),
            lse: held.write(args.lse),
            sight,
            group: dims.group(),
            scale: args.scale,
            key_tile: args.config.key_tile,
        };
        for row in places.skipped() {
            // SAFETY: no task runs yet.
            unsafe {
                pass.lse.row_mut([row]).fill(f32::NEG_INFINITY);
                (0..dims.q_heads).for_each(|head| pass.o.row_mut([row, head]).fill(T::default()));
            }
        }
        let (k, v) = (held.read::<T>(args.k_pages), held.read::<T>(args.v_pages));
        let tasks: Vec<_> = places
            .runs(args.config.query_tile)
            .into_iter()
            .flat_map(|run| (0..dims.kv_heads).map(move |head| (head, run.clone())))
            .collect();
        tasks.into_par_iter().for_each(|(head, (slot, queries))| {
            let rows = |pages| Cached { places: &places, pages, slot, head };
            pass.run(head, &queries, &rows(k), &rows(v));
        });
    });
    Ok(())
}

fn check_ids(
    op: &'static str,
    ids: View<'_, i32>,
    places: &Places<'_>,
    block: usize,
) -> Result<()> {
    let [heads, rows, topk] = [0, 1, 2].map(|axis| ids.shape()[axis]);
    for head in 0..heads {
        for row in 0..rows {
            let own = places
                .position(row)
                .map_or(-1, |position| (position / block) as i64);
            let list = (0..topk).map(|slot| ids.at([head, row, slot]));
            selection::check_row(op, list, own, (head * rows + row) * topk)?;
        }
    }
    Ok(())
}

pub(super) fn paged_score(_: &CpuBackend, args: &ops::PagedScore<'_, CpuBackend>) -> Result<()> {
    const OP: &str = "paged_score";
    let (cache, index_heads, max_blocks) = args.dims()?;
    let operands = [
        args.index_q,
        args.index_k_pages,
        args.page_table,
        args.slots,
        args.positions,
        args.scores,
    ];
    let held = Access::lock(&operands);
    let places = [args.page_table, args.slots, args.positions].map(|tensor| held.read(tensor));
    let places = Places::new(OP, cache, places)?;
    let last = (0..cache.rows).filter_map(|row| places.position(row)).max();
    let needed = last.map_or(0, |position| position / args.block + 1);
    if needed > max_blocks {
        let what = format!("a row needs {needed} blocks of scores, there is room for {max_blocks}");
        return Err(Error::Argument { op: OP, what });
    }
    with_storage!(args.index_q.dtype(), T => {
        let op = Score::<T> {
            index_q: held.read(args.index_q),
            scores: held.write(args.scores),
            block: args.block,
        };
        for row in places.skipped() {
            for head in 0..index_heads {
                // SAFETY: no task runs yet.
                unsafe { op.scores.row_mut([head, row]) }.fill(f32::NEG_INFINITY);
            }
        }
        let pages = held.read::<T>(args.index_k_pages);
        places.runs(msa_score::TASK_QUERIES).into_par_iter().for_each(|(slot, queries)| {
            let keys = Cached { places: &places, pages, slot, head: 0 };
            op.run(&queries, |range: Range<usize>, packed| {
                let mut rows = Vec::with_capacity(range.len() * cache.head_dim);
                for position in range.clone() {
                    rows.extend(keys.row(position).iter().map(|x| x.to_f32()));
                }
                let matrix = super::gemm::Matrix::row_major(&rows, range.len(), cache.head_dim);
                packed.pack(matrix.transposed());
            });
        });
    });
    Ok(())
}
