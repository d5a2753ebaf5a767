//! Faults of index scores, block selection and tile map.

use super::plant::{
    STREAM, after, bf16, edit, edited, exchange, ints, moved, plant, scratch, settings, store,
    values,
};
use super::{Fault, fault};
use m3_kernels::cpu::CpuBackend;
use m3_kernels::{Backend, Result, ops};

const SCORE: &[&str] = &["msa_score::*"];
const SELECT: &[&str] = &["block_select::f32/b4_k6"];
const INIT: &[&str] = &["block_select::f32/init1_local*"];
const TIES: &[&str] = &["block_select::f32/ties"];
const MAP: &[&str] = &["tile_map::*"];

pub(super) fn faults() -> Vec<Fault> {
    [score(), select(), map()].into_iter().flatten().collect()
}

/// Blocks a sequence's queries may see, by token: number of the own block and whether it is a partial last one.
fn own_blocks(cu_seqlens: &[i32], block: usize) -> Vec<(usize, bool)> {
    let mut own = Vec::new();
    for pair in cu_seqlens.windows(2) {
        let length = (pair[1] - pair[0]) as usize;
        own.extend((0..length).map(|at| (at / block, at / block >= length / block)));
    }
    own
}

fn score() -> Vec<Fault> {
    vec![
        fault(
            "index scores: heads pooled",
            SCORE,
            plant!(MsaScore, |b, args| {
                b.msa_score(&STREAM, args)?;
                let scores = values(b, args.scores)?;
                let (heads, row) = (
                    args.scores.shape()[0],
                    scores.len() / args.scores.shape()[0],
                );
                let pooled = |at: usize| (0..heads).map(|h| scores[h * row + at]).sum::<f64>();
                edit(b, args.scores, |i, _| pooled(i % row) / heads as f64)
            }),
        ),
        fault(
            "index scores: scaled by the root of the width",
            SCORE,
            after!(MsaScore.scores, |args| |_, x| x
                * (args.index_q.shape()[2] as f64).powf(-0.5)),
        ),
        fault(
            "index scores: negative scores cut to 0",
            SCORE,
            after!(MsaScore.scores, |_args| |_, x| {
                if x.is_finite() { x.max(0.0) } else { x }
            }),
        ),
        fault(
            "index scores: kept in bf16",
            SCORE,
            after!(MsaScore.scores, |_args| |_, x| bf16(x)),
        ),
        fault(
            "index scores: two index heads exchanged",
            SCORE,
            plant!(MsaScore, |b, args| {
                b.msa_score(&STREAM, args)?;
                super::plant::reorder(b, args.scores, {
                    let row = args.scores.elements() / args.scores.shape()[0];
                    move |i| match i / row {
                        0 => i + row,
                        1 => i - row,
                        _ => i,
                    }
                })
            }),
        ),
        fault(
            "index scores: the last partial block dropped",
            SCORE,
            plant!(MsaScore, |b, args| {
                b.msa_score(&STREAM, args)?;
                let own = own_blocks(&ints(b, args.cu_seqlens)?, args.block);
                let (tokens, blocks) = (args.scores.shape()[1], args.scores.shape()[2]);
                edit(b, args.scores, |i, x| {
                    let (number, partial) = own[i / blocks % tokens];
                    if partial && i % blocks == number {
                        f64::NEG_INFINITY
                    } else {
                        x
                    }
                })
            }),
        ),
        fault(
            "index scores: keys after the query seen in its own block",
            SCORE,
            plant!(MsaScore, |b, args| unmasked(b, args)),
        ),
        fault(
            "index scores: blocks anchored at the pack's start",
            SCORE,
            plant!(MsaScore, |b, args| {
                b.msa_score(&STREAM, args)?;
                let correct = values(b, args.scores)?;
                let row = args.scores.shape()[2];
                // From the second document on, every block begins one key early.
                let first = ints(b, args.cu_seqlens)?[1] as usize;
                let early = &moved(b, args.index_k, {
                    let width = args.index_k.shape()[2];
                    move |i| if i / width >= first { i - width } else { i }
                })?;
                b.msa_score(
                    &STREAM,
                    &ops::MsaScore {
                        index_k: early,
                        ..*args
                    },
                )?;
                let tokens = args.scores.shape()[1];
                edit(b, args.scores, |i, x| {
                    if i / row % tokens < first {
                        correct[i]
                    } else {
                        x
                    }
                })
            }),
        ),
    ]
}

fn unmasked(b: &CpuBackend, args: &ops::MsaScore<'_, CpuBackend>) -> Result<()> {
    b.msa_score(&STREAM, args)?;
    let (q, k) = (values(b, args.index_q)?, values(b, args.index_k)?);
    let ends = ints(b, args.cu_seqlens)?;
    let (heads, tokens, blocks) = (
        args.scores.shape()[0],
        args.scores.shape()[1],
        args.scores.shape()[2],
    );
    let width = args.index_q.shape()[2];
    let mut scores = values(b, args.scores)?;
    for pair in ends
        .windows(2)
        .map(|pair| [pair[0] as usize, pair[1] as usize])
    {
        for token in pair[0]..pair[1] {
            let number = (token - pair[0]) / args.block;
            let keys =
                pair[0] + number * args.block..(pair[0] + (number + 1) * args.block).min(pair[1]);
            for head in 0..heads {
                let query = &q[(token * heads + head) * width..][..width];
                let dot = |key: usize| {
                    let key = &k[key * width..][..width];
                    query.iter().zip(key).map(|(a, b)| a * b).sum::<f64>()
                };
                scores[(head * tokens + token) * blocks + number] =
                    keys.clone().map(dot).fold(f64::NEG_INFINITY, f64::max);
            }
        }
    }
    store(b, args.scores, &scores)
}

fn select() -> Vec<Fault> {
    vec![
        fault(
            "selection: own block not forced",
            SELECT,
            settings!(BlockSelect {
                local_blocks: |_args| 0
            }),
        ),
        fault(
            "selection: first block not forced",
            INIT,
            settings!(BlockSelect {
                init_blocks: |_args| 0
            }),
        ),
        fault(
            "selection: one local block too few",
            &["block_select::f32/init1_local2"],
            settings!(BlockSelect {
                local_blocks: |args| args.local_blocks - 1
            }),
        ),
        fault(
            "selection: forced block on top of the k",
            SELECT,
            plant!(BlockSelect, |b, args| on_top(b, args)),
        ),
        fault(
            "selection: ties go to the higher block",
            TIES,
            exchange!(BlockSelect {
                scores: |b, args| {
                    let blocks = args.scores.shape()[2];
                    edited(b, args.scores, |i, x| x + 1e-4 * (i % blocks) as f64)
                }
            }),
        ),
        fault(
            "selection: -0 ranks below +0",
            TIES,
            exchange!(BlockSelect {
                scores: |b, args| edited(b, args.scores, |_, x| {
                    if x == 0.0 && x.is_sign_negative() {
                        -1e-30
                    } else {
                        x
                    }
                })
            }),
        ),
        fault(
            "selection: NaN ranks first",
            TIES,
            exchange!(BlockSelect {
                scores: |b, args| edited(b, args.scores, |_, x| if x.is_nan() { 1e30 } else { x })
            }),
        ),
        fault(
            "selection: the lowest scores chosen",
            SELECT,
            exchange!(BlockSelect {
                scores: |b, args| edited(b, args.scores, |_, x| -x)
            }),
        ),
        fault(
            "selection: blocks after the query may be chosen",
            SELECT,
            exchange!(BlockSelect {
                positions: |b, args| {
                    let last = (args.scores.shape()[2] * args.block) as f64 - 1.0;
                    edited(b, args.positions, |_, x| (x + args.block as f64).min(last))
                }
            }),
        ),
        fault(
            "selection: positions counted from the pack's start",
            SELECT,
            exchange!(BlockSelect {
                positions: |b, args| {
                    let last = args.scores.shape()[2] * args.block - 1;
                    edited(b, args.positions, |i, _| i.min(last) as f64)
                }
            }),
        ),
        fault(
            "selection: one choice for all index heads",
            SELECT,
            plant!(BlockSelect, |b, args| {
                b.block_select(&STREAM, args)?;
                let row = args.block_ids.elements() / args.block_ids.shape()[0];
                super::plant::reorder(b, args.block_ids, |i| i % row)
            }),
        ),
        fault(
            "selection: ids not ascending",
            SELECT,
            plant!(BlockSelect, |b, args| {
                b.block_select(&STREAM, args)?;
                let topk = args.block_ids.shape()[2];
                super::plant::reorder(b, args.block_ids, |i| i - i % topk + topk - 1 - i % topk)
            }),
        ),
        fault(
            "selection: scores compared in bf16",
            SELECT,
            exchange!(BlockSelect {
                scores: |b, args| edited(b, args.scores, |_, x| bf16(x))
            }),
        ),
    ]
}

/// The k best of all blocks and the own one, cut to k.
fn on_top(b: &CpuBackend, args: &ops::BlockSelect<'_, CpuBackend>) -> Result<()> {
    let free = scratch(b, args.block_ids)?;
    let args_free = ops::BlockSelect {
        block_ids: &free,
        local_blocks: 0,
        ..*args
    };
    b.block_select(&STREAM, &args_free)?;
    let (ids, positions) = (ints(b, &free)?, ints(b, args.positions)?);
    let topk = args.block_ids.shape()[2];
    let mut rows = Vec::with_capacity(ids.len());
    for (number, row) in ids.chunks_exact(topk).enumerate() {
        let own = positions[number % positions.len()] / args.block as i32;
        let mut row: Vec<i32> = row.iter().copied().filter(|&id| id >= 0).collect();
        if !row.contains(&own) {
            row.push(own);
        }
        row.sort_unstable();
        row.resize(topk, -1);
        rows.extend(row.into_iter().map(f64::from));
    }
    store(b, args.block_ids, &rows)
}

fn map() -> Vec<Fault> {
    vec![
        fault(
            "tile map: a block taken to meet two query tiles at most",
            MAP,
            plant!(TileMap, |b, args| {
                b.tile_map(&STREAM, args)?;
                let (offsets, queries) = (ints(b, args.row_offsets)?, ints(b, args.queries)?);
                let heads = args.queries.shape()[0];
                let (rows, capacity) = (offsets.len() / heads, queries.len() / heads);
                let mut kept = queries.clone();
                for (head, offsets) in offsets.chunks_exact(rows).enumerate() {
                    for range in offsets.windows(2) {
                        let at = head * capacity;
                        let list = at + range[0] as usize..at + range[1] as usize;
                        let first = queries[list.clone()].first().map_or(0, |query| query / 32);
                        for entry in list {
                            if queries[entry] / 32 > first + 1 {
                                kept[entry] = -1;
                            }
                        }
                    }
                }
                edit(b, args.queries, |i, _| f64::from(kept[i]))
            }),
        ),
        fault(
            "tile map: the last partial block of a sequence not counted",
            MAP,
            plant!(TileMap, |b, args| {
                b.tile_map(&STREAM, args)?;
                let ends = ints(b, args.cu_seqlens)?;
                let mut total = 0;
                let mut offsets = vec![0.0];
                for pair in ends.windows(2) {
                    total += (pair[1] - pair[0]) as usize / args.block;
                    offsets.push(total as f64);
                }
                store(b, args.block_offsets, &offsets)
            }),
        ),
        fault(
            "tile map: the first head's map for all",
            MAP,
            plant!(TileMap, |b, args| {
                b.tile_map(&STREAM, args)?;
                let row = args.queries.elements() / args.queries.shape()[0];
                super::plant::reorder(b, args.queries, |i| i % row)
            }),
        ),
        fault(
            "tile map: queries counted from their sequence's start",
            MAP,
            plant!(TileMap, |b, args| {
                b.tile_map(&STREAM, args)?;
                let ends = ints(b, args.cu_seqlens)?;
                let start = |query: f64| {
                    let before = ends.iter().filter(|&&end| f64::from(end) <= query);
                    before.max().copied().map_or(0.0, f64::from)
                };
                edit(
                    b,
                    args.queries,
                    |_, x| if x < 0.0 { x } else { x - start(x) },
                )
            }),
        ),
        fault(
            "tile map: unused entries are query 0",
            MAP,
            after!(TileMap.queries, |_args| |_, x| x.max(0.0)),
        ),
        fault(
            "tile map: one row's end is one short",
            MAP,
            after!(TileMap.row_offsets, |_args| |i, x| if i == 1 {
                x - 1.0
            } else {
                x
            }),
        ),
    ]
}
