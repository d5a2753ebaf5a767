//! The transpose of a selection, and what of a selection is refused.

use m3_kernels::Error;
use m3_kernels::cpu::CpuBackend;
use m3_kernels::ops::map_capacity;
use m3_reference::ops::{block_select, tile_map};
use proptest::prelude::*;

use crate::pack::{Pack, TOKENS_MAX, holds, packs};
use crate::walk::{Map, Operands, Walk};

fn expected(pack: &Pack, block_ids: &[i32]) -> Map {
    let cu_seqlens = pack.cu_seqlens();
    let inputs = tile_map::Inputs {
        params: tile_map::Params {
            tokens: pack.tokens(),
            index_heads: pack.kv_heads,
            block: pack.block,
            topk: pack.topk,
        },
        block_ids,
        cu_seqlens: &cu_seqlens,
    };
    let lists = tile_map::forward(&inputs).queries;
    let mut block_offsets = vec![0];
    for ends in cu_seqlens.windows(2) {
        let blocks = (ends[1] - ends[0]) as usize;
        block_offsets
            .push(block_offsets[block_offsets.len() - 1] + blocks.div_ceil(pack.block) as i32);
    }
    let blocks = block_offsets[block_offsets.len() - 1] as usize;
    let rows = map_capacity(pack.tokens(), cu_seqlens.len() - 1, pack.block);
    let (mut row_offsets, mut queries) = (Vec::new(), Vec::new());
    for head in 0..pack.kv_heads {
        let lists = &lists[head * blocks..][..blocks];
        let mut end = 0;
        row_offsets.push(0);
        for row in 0..rows {
            end += lists.get(row).map_or(0, Vec::len) as i32;
            row_offsets.push(end);
        }
        queries.extend(lists.iter().flatten().map(|&query| query as i32));
        queries.resize((head + 1) * pack.tokens() * pack.topk, -1);
    }
    Map {
        block_offsets,
        row_offsets,
        queries,
    }
}

#[test]
fn the_map_is_the_references_transpose() {
    let backend = CpuBackend::default();
    holds(file!(), [150, 8000], &packs(40, TOKENS_MAX), |pack| {
        let block_ids = pack.selection();
        let map = Walk::new(&backend, &pack, &block_ids).map().unwrap();
        prop_assert_eq!(map, expected(&pack, &block_ids));
        Ok(())
    });
}

#[test]
fn the_transpose_of_the_map_is_the_selection() {
    let backend = CpuBackend::default();
    holds(file!(), [100, 4000], &packs(40, 5000), |pack| {
        let block_ids = pack.selection();
        let map = Walk::new(&backend, &pack, &block_ids).map().unwrap();
        let documents = pack.documents();
        let (tokens, topk) = (pack.tokens(), pack.topk);
        let rows = map.row_offsets.len() / pack.kv_heads;
        let mut selected = vec![Vec::new(); pack.kv_heads * tokens];
        for head in 0..pack.kv_heads {
            let offsets = &map.row_offsets[head * rows..][..rows];
            prop_assert_eq!(offsets[0], 0);
            for (row, ends) in offsets.windows(2).enumerate() {
                prop_assert!(ends[0] <= ends[1], "row {} of head {}", row, head);
                let queries =
                    &map.queries[head * tokens * topk..][ends[0] as usize..ends[1] as usize];
                prop_assert!(queries.is_sorted_by(|a, b| a < b), "{:?}", queries);
                for &query in queries {
                    let (start, _) = documents[query as usize];
                    let sequence = pack
                        .cu_seqlens()
                        .partition_point(|&end| end as usize <= start)
                        - 1;
                    let block = row as i32 - map.block_offsets[sequence];
                    selected[head * tokens + query as usize].push(block);
                }
            }
        }
        // Rows ascend, so a query's blocks come in ascending order.
        for (row, blocks) in selected.iter_mut().enumerate() {
            blocks.resize(topk, -1);
            prop_assert_eq!(&blocks[..], &block_ids[row * topk..][..topk], "row {}", row);
        }
        Ok(())
    });
}

#[test]
fn no_pack_has_more_blocks_than_the_maps_capacity() {
    let lengths = proptest::collection::vec(0..5000_usize, 0..=40);
    let documents = prop_oneof![lengths, (0..=40_usize).prop_map(|count| vec![1; count])];
    holds(
        file!(),
        [1000, 20_000],
        &(documents, 1..=130_usize),
        |(lengths, block)| {
            let blocks: usize = lengths.iter().map(|length| length.div_ceil(block)).sum();
            let capacity = map_capacity(lengths.iter().sum(), lengths.len(), block);
            prop_assert!(blocks <= capacity, "{} > {}", blocks, capacity);
            Ok(())
        },
    );
}

/// A way to break one row of a selection.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Twice,
    Descending,
    PastOwn,
    Negative,
    Largest,
    AfterNone,
}

/// The row with the fault, and the slot that is wrong; none where the row is too short for it.
fn broken(fault: Fault, own: i32, topk: usize) -> Option<(Vec<i32>, usize)> {
    let (row, slot): (Vec<i32>, usize) = match fault {
        Fault::Twice => (vec![own, own], 1),
        Fault::Descending => (vec![own.max(1), own.max(1) - 1], usize::from(own > 0)),
        Fault::PastOwn => (vec![own + 1], 0),
        Fault::Negative => (vec![-2], 0),
        Fault::Largest => (vec![i32::MAX], 0),
        Fault::AfterNone => (vec![-1, own.max(0)], 1),
    };
    let fits =
        row.len() <= topk && (own >= 0 || !matches!(fault, Fault::Twice | Fault::Descending));
    let padded = row.into_iter().chain(std::iter::repeat(-1)).take(topk);
    fits.then(|| (padded.collect(), slot))
}

#[test]
fn a_malformed_row_is_refused_by_every_operation_as_by_the_reference() {
    let backend = CpuBackend::default();
    let faults = prop::sample::select(vec![
        Fault::Twice,
        Fault::Descending,
        Fault::PastOwn,
        Fault::Negative,
        Fault::Largest,
        Fault::AfterNone,
    ]);
    let packs = (
        packs(8, 600),
        faults,
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
    );
    holds(
        file!(),
        [100, 2000],
        &packs,
        |(pack, fault, token, head)| {
            prop_assume!(pack.tokens() > 0);
            let (token, head) = (token.index(pack.tokens()), head.index(pack.kv_heads));
            let own = pack
                .documents()
                .get(token)
                .map_or(-1, |&(start, _)| ((token - start) / pack.block) as i32);
            let mut operands = Operands::normal(&pack);
            prop_assert!(refusal(&pack, &operands.block_ids).is_ok());
            let Some((row, slot)) = broken(fault, own, pack.topk) else {
                return Ok(());
            };
            let at = (head * pack.tokens() + token) * pack.topk;
            operands.block_ids[at..][..pack.topk].copy_from_slice(&row);
            prop_assert!(refusal(&pack, &operands.block_ids).is_err());
            let walk = Walk::new(&backend, &pack, &operands.block_ids);
            for refused in [walk.map().err(), walk.attention(&operands, 1.0).err()] {
                let Some(Error::Index {
                    tensor,
                    index,
                    value,
                    ..
                }) = refused
                else {
                    return Err(TestCaseError::fail(format!(
                        "not refused as an index: {refused:?}"
                    )));
                };
                prop_assert_eq!(
                    (tensor, index, value),
                    ("block_ids", at + slot, i64::from(row[slot]))
                );
            }
            Ok(())
        },
    );
}

fn refusal(pack: &Pack, block_ids: &[i32]) -> Result<(), block_select::SelectionError> {
    let params = block_select::Params {
        tokens: pack.tokens(),
        index_heads: pack.kv_heads,
        block: pack.block,
        max_blocks: 0,
        topk: pack.topk,
        init_blocks: 0,
        local_blocks: 0,
    };
    block_select::validate(&params, block_ids, &pack.cu_seqlens())
}
