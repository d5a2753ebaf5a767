//! Block-sparse attention: the walk of dense attention over the keys of the selected blocks.

use std::ops::Range;

use super::CpuBackend;
use super::access::{Access, sequences, with_storage};
use super::attention::forward::Forward;
use super::attention::mask::Sight;
use super::attention::{Gradient, Seen, forward_pack, selection};
use super::tile_map::first_rows;
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn msa_attention(
    _: &CpuBackend,
    args: &ops::MsaAttention<'_, CpuBackend>,
) -> Result<()> {
    const OP: &str = "msa_attention";
    let dims = args.dims()?;
    let access = Access::lock(&[
        args.q,
        args.k,
        args.v,
        args.cu_seqlens,
        args.block_ids,
        args.o,
        args.lse,
    ]);
    let cu_seqlens = access.read::<i32>(args.cu_seqlens).as_slice();
    let sequences = sequences(OP, cu_seqlens, dims.tokens)?;
    let (ids, block) = (access.read::<i32>(args.block_ids), args.block);
    selection::check(OP, ids, &sequences, block)?;
    with_storage!(args.q.dtype(), T => {
        let pass = Forward::<T> {
            q: access.read(args.q),
            o: access.write(args.o),
            lse: access.write(args.lse),
            sight: Sight::Blocks { ids, block },
            group: dims.group(),
            scale: args.scale,
            key_tile: args.config.key_tile,
        };
        let (k, v) = (access.read(args.k), access.read(args.v));
        forward_pack(&pass, [k, v], &sequences, args.config.query_tile);
    });
    Ok(())
}

pub(super) fn msa_attention_backward(
    _: &CpuBackend,
    args: &ops::MsaAttentionBackward<'_, CpuBackend>,
) -> Result<()> {
    const OP: &str = "msa_attention_backward";
    let dims = args.dims()?;
    let operands = [
        args.q,
        args.k,
        args.v,
        args.cu_seqlens,
        args.block_ids,
        args.block_offsets,
        args.row_offsets,
        args.queries,
        args.o,
        args.lse,
        args.d_o,
        args.dq,
        args.dk,
        args.dv,
        args.workspace,
    ];
    let access = Access::lock(&operands);
    let cu_seqlens = access.read::<i32>(args.cu_seqlens).as_slice();
    let sequences = sequences(OP, cu_seqlens, dims.tokens)?;
    let (ids, block) = (access.read::<i32>(args.block_ids), args.block);
    selection::check(OP, ids, &sequences, block)?;
    let map = Map {
        first_row: first_rows(&sequences, block),
        offsets: (0..dims.kv_heads)
            .map(|head| access.read::<i32>(args.row_offsets).row([head]))
            .collect(),
        queries: (0..dims.kv_heads)
            .map(|head| access.read::<i32>(args.queries).row([head]))
            .collect(),
        block,
    };
    let block_offsets = access.read::<i32>(args.block_offsets).as_slice();
    map.check(block_offsets, &sequences)?;
    let gradient = Gradient {
        operands: [args.q, args.k, args.v, args.o, args.lse, args.d_o],
        results: [args.dq, args.dk, args.dv],
        workspace: args.workspace,
        sight: Sight::Blocks { ids, block },
        scale: args.scale,
        config: args.config,
        dims,
    };
    let seen = |head: usize, sequence: usize, keys: &Range<usize>| {
        let blocks = keys.start / block..keys.end.div_ceil(block);
        let list = |b: usize| {
            (
                b * block..(b * block).saturating_add(block),
                map.list(head, sequence, b),
            )
        };
        Seen::Listed(blocks.map(list).collect())
    };
    with_storage!(args.q.dtype(), T => gradient.run::<T>(&access, &sequences, seen));
    Ok(())
}

/// The transpose of the selection, as [`ops::TileMap`] writes it.
struct Map<'a> {
    /// Row of every sequence's first block.
    first_row: Vec<usize>,
    /// Of every head.
    offsets: Vec<&'a [i32]>,
    queries: Vec<&'a [i32]>,
    block: usize,
}

impl<'a> Map<'a> {
    /// Queries of a block of a sequence.
    fn list(&self, head: usize, sequence: usize, block: usize) -> &'a [i32] {
        let row = self.first_row[sequence] + block;
        let (offsets, queries) = (self.offsets[head], self.queries[head]);
        &queries[offsets[row] as usize..offsets[row + 1] as usize]
    }

    /// Every list lies in its buffer and ascends within its sequence, from its block on.
    fn check(&self, block_offsets: &[i32], sequences: &[Range<usize>]) -> Result<()> {
        for (index, (&got, &row)) in block_offsets.iter().zip(&self.first_row).enumerate() {
            let row = row as i64;
            within("block_offsets", index, got, row..row + 1)?;
        }
        for (head, (offsets, queries)) in self.offsets.iter().zip(&self.queries).enumerate() {
            let mut lower = 0;
            for (index, &offset) in offsets.iter().enumerate() {
                let accepted = lower..queries.len() as i64 + 1;
                within(
                    "row_offsets",
                    head * offsets.len() + index,
                    offset,
                    accepted,
                )?;
                lower = offset.into();
            }
            for (number, sequence) in sequences.iter().enumerate() {
                for block in 0..sequence.len().div_ceil(self.block) {
                    let list = self.list(head, number, block);
                    let mut lower = (sequence.start + block * self.block) as i64;
                    for (index, &query) in list.iter().enumerate() {
                        let first = offsets[self.first_row[number] + block] as usize;
                        let index = head * queries.len() + first + index;
                        within("queries", index, query, lower..sequence.end as i64)?;
                        lower = i64::from(query) + 1;
                    }
                }
            }
        }
        Ok(())
    }
}

fn within(tensor: &'static str, index: usize, value: i32, accepted: Range<i64>) -> Result<()> {
    let value = i64::from(value);
    if accepted.contains(&value) {
        return Ok(());
    }
    Err(Error::Index {
        op: "msa_attention_backward",
        tensor,
        index,
        value,
        lower: accepted.start,
        upper: accepted.end,
    })
}
