//! The transpose of a selection, by counting sort.

use rayon::prelude::*;

use super::CpuBackend;
use super::access::{Access, View, sequences};
use super::attention::selection;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn tile_map(_: &CpuBackend, args: &ops::TileMap<'_, CpuBackend>) -> Result<()> {
    const OP: &str = "tile_map";
    let dims = args.dims()?;
    let entries = dims.tokens * dims.topk;
    if i32::try_from(entries).is_err() {
        let what = format!("{entries} selected blocks cannot be counted in 32 bits");
        return Err(Error::Argument { op: OP, what });
    }
    let access = Access::lock(&[
        args.block_ids,
        args.cu_seqlens,
        args.block_offsets,
        args.row_offsets,
        args.queries,
    ]);
    let block_ids = access.read::<i32>(args.block_ids);
    let cu_seqlens = access.read::<i32>(args.cu_seqlens).as_slice();
    let sequences = sequences(OP, cu_seqlens, dims.tokens)?;
    selection::check(OP, block_ids, &sequences, args.block)?;

    let first_row = first_rows(&sequences, args.block);
    let block_offsets = access.write::<i32>(args.block_offsets);
    // SAFETY: the only slice of this view.
    let block_offsets = unsafe { block_offsets.as_mut_slice() };
    for (offset, &row) in block_offsets.iter_mut().zip(&first_row) {
        *offset = row as i32;
    }
    let row_offsets = access.write::<i32>(args.row_offsets);
    let queries = access.write::<i32>(args.queries);
    (0..dims.kv_heads).into_par_iter().for_each(|head| {
        // SAFETY: a head's rows belong to its task alone.
        let (offsets, queries) = unsafe { (row_offsets.row_mut([head]), queries.row_mut([head])) };
        let selected = || selected_rows(block_ids, head, &sequences, &first_row);
        transpose(selected, offsets, queries);
    });
    Ok(())
}

/// Row of every sequence's first block, and the number of rows at the end.
pub(super) fn first_rows(sequences: &[std::ops::Range<usize>], block: usize) -> Vec<usize> {
    let mut rows = vec![0];
    for sequence in sequences {
        rows.push(rows[rows.len() - 1] + sequence.len().div_ceil(block));
    }
    rows
}

/// (query, row of the block) of every selected block, queries ascending.
fn selected_rows<'a>(
    block_ids: View<'a, i32>,
    head: usize,
    sequences: &'a [std::ops::Range<usize>],
    first_row: &'a [usize],
) -> impl Iterator<Item = (usize, usize)> + 'a {
    let topk = block_ids.shape()[2];
    sequences
        .iter()
        .zip(first_row)
        .flat_map(|(sequence, &first)| sequence.clone().map(move |query| (query, first)))
        .flat_map(move |(query, first)| {
            (0..topk)
                .map(move |slot| block_ids.at([head, query, slot]))
                .take_while(|&id| id >= 0)
                .map(move |id| (query, first + id as usize))
        })
}

fn transpose<I: Iterator<Item = (usize, usize)>>(
    selected: impl Fn() -> I,
    offsets: &mut [i32],
    queries: &mut [i32],
) {
    // Counts first, then the start of every row; the last entry counts nothing and becomes the total.
    offsets.fill(0);
    for (_, row) in selected() {
        offsets[row] += 1;
    }
    let mut total = 0;
    for offset in offsets.iter_mut() {
        (*offset, total) = (total, total + *offset);
    }
    queries.fill(-1);
    let mut next = offsets.to_vec();
    for (query, row) in selected() {
        queries[next[row] as usize] = query as i32;
        next[row] += 1;
    }
}
