//! Scores, selection, and its transpose.

use m3_kernels::backend::Backend;
use m3_kernels::cpu::CpuBackend;
use m3_kernels::cpu::simd::{Isa, with_isa};
use m3_kernels::ops::{self, map_capacity};
use m3_kernels::{Error, Result};
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};

use crate::lab::{Document, Heads, Lab, Rule, bits};

/// Ids of one row of scores, for the last position of its last block.
fn select(scores: &[f32], block: usize, topk: usize, [init, local]: [usize; 2]) -> Vec<i32> {
    let position = (scores.len() * block) as i32 - 1;
    try_select(scores, position, block, topk, [init, local]).unwrap()
}

fn try_select(
    scores: &[f32],
    position: i32,
    block: usize,
    topk: usize,
    [init_blocks, local_blocks]: [usize; 2],
) -> Result<Vec<i32>> {
    let lab = lab(DType::F32);
    let stream = lab.backend.stream();
    let row = lab.tensor(DType::F32, [1, 1, scores.len()]);
    lab.put(&row, scores);
    let block_ids = lab.tensor(DType::I32, [1, 1, topk]);
    let args = ops::BlockSelect {
        scores: &row,
        positions: &lab.ints(&[position], [1]),
        block_ids: &block_ids,
        block,
        init_blocks,
        local_blocks,
    };
    lab.backend.block_select(&stream, &args)?;
    block_ids.to_vec(&lab.backend, &stream)
}

fn lab(dtype: DType) -> Lab {
    let heads = Heads {
        q: 1,
        kv: 1,
        dim: 8,
        block: 4,
        topk: 1,
    };
    Lab::new(dtype, heads, Rule::Blocks)
}

#[test]
fn many_equal_scores_fill_every_slot_with_the_lowest_ids_and_the_own_block() {
    for blocks in [40, 1100] {
        let scores = vec![0.0; blocks];
        let own = blocks as i32 - 1;
        let expected: Vec<i32> = (0..15).chain([own]).collect();
        for _ in 0..100 {
            assert_eq!(select(&scores, 128, 16, [0, 1]), expected);
        }
        let mut with_infinity = scores;
        with_infinity[33] = f32::INFINITY;
        let expected: Vec<i32> = (0..14).chain([33, own]).collect();
        assert_eq!(select(&with_infinity, 128, 16, [0, 1]), expected);
    }
}

#[test]
fn own_block_is_always_kept_and_each_head_picks_its_own() {
    let head_0 = [9.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let head_1 = [0.0, 0.0, 0.0, 5.0, 0.0, 0.0];
    assert_eq!(select(&head_0, 4, 2, [0, 1]), [0, 5]);
    assert_eq!(select(&head_1, 4, 2, [0, 1]), [3, 5]);
}

#[test]
fn forced_blocks_take_slots_inside_the_k() {
    let scores = [-9.0, -8.0, 3.0, 2.0, -7.0, -6.0];
    assert_eq!(select(&scores, 4, 3, [1, 1]), [0, 2, 5]);
    assert_eq!(select(&scores, 4, 3, [1, 2]), [0, 4, 5]);
    assert_eq!(select(&scores, 4, 3, [0, 0]), [2, 3, 5]);
    // Init and local blocks that are the same ones are counted once.
    assert_eq!(select(&scores[..2], 4, 3, [1, 2]), [0, 1, -1]);
    assert_eq!(select(&scores, 4, 4, [2, 2]), [0, 1, 4, 5]);
}

#[test]
fn nan_sorts_last_and_zeros_of_both_signs_are_equal() {
    let (nan, minus) = (f32::NAN, f32::NEG_INFINITY);
    assert_eq!(select(&[nan, minus, -1.0, nan], 4, 1, [0, 0]), [2]);
    assert_eq!(select(&[nan, minus, -1.0, nan], 4, 2, [0, 0]), [1, 2]);
    assert_eq!(select(&[nan, minus, -nan, 1.0], 4, 3, [0, 0]), [0, 1, 3]);
    assert_eq!(select(&[-0.0, 0.0, -0.0], 4, 1, [0, 0]), [0]);
    assert_eq!(select(&[-1.0, 0.0, -0.0], 4, 1, [0, 0]), [1]);
    assert_eq!(select(&[-1.0, -0.0, 0.0], 4, 1, [0, 0]), [1]);
    assert_eq!(select(&[nan, nan, nan], 4, 2, [0, 1]), [0, 2]);
}

#[test]
fn blocks_past_the_query_are_never_selected() {
    let scores = [1.0, 2.0, 3.0, 9.0, 9.0];
    let at = |position| try_select(&scores, position, 4, 3, [0, 1]).unwrap();
    assert_eq!(at(-1), [-1, -1, -1]);
    assert_eq!(at(0), [0, -1, -1]);
    assert_eq!(at(3), [0, -1, -1]);
    assert_eq!(at(4), [0, 1, -1]);
    assert_eq!(at(11), [0, 1, 2]);
    assert_eq!(at(12), [1, 2, 3]);
    let refused = try_select(&scores, 20, 4, 3, [0, 1]).unwrap_err();
    let expected = Error::Index {
        op: "block_select",
        tensor: "positions",
        index: 0,
        value: 20,
        lower: -1,
        upper: 20,
    };
    assert_eq!(refused, expected);
}

/// Index queries `[T, heads, 32]` and keys `[T, 32]` of one document.
struct Index {
    length: usize,
    q: Vec<f32>,
    k: Vec<f32>,
}

const INDEX_HEADS: usize = 3;
const INDEX_DIM: usize = 32;

impl Index {
    fn new(length: usize) -> Self {
        let inputs = Inputs::new(3, "index");
        let normal = |label, len| {
            let drawn = inputs.bf16s(label, Distribution::Normal { std: 1.0 }, len);
            drawn.into_iter().map(f32::from).collect()
        };
        Index {
            length,
            q: normal("q", length * INDEX_HEADS * INDEX_DIM),
            k: normal("k", length * INDEX_DIM),
        }
    }
}

/// Scores `[heads, T, max_blocks]` of a pack; `fused` makes queries and keys slices of one row.
fn scores(
    lab: &Lab,
    documents: &[&Index],
    block: usize,
    max_blocks: usize,
    fused: bool,
) -> Vec<f32> {
    let tokens = documents.iter().map(|d| d.length).sum::<usize>();
    let width = INDEX_HEADS * INDEX_DIM;
    let row = lab.tensor(lab.dtype, [tokens, width + INDEX_DIM + 5]);
    let (index_q, index_k) = match fused {
        true => (
            row.slice(1, 2..2 + width),
            row.slice(1, 4 + width..4 + width + INDEX_DIM),
        ),
        false => (
            lab.tensor(lab.dtype, [tokens, width]),
            lab.tensor(lab.dtype, [tokens, INDEX_DIM]),
        ),
    };
    let gather = |rows: fn(&Index) -> &[f32]| -> Vec<f32> {
        documents.iter().flat_map(|d| rows(d)).copied().collect()
    };
    lab.put(&index_q, &gather(|d| &d.q));
    lab.put(&index_k, &gather(|d| &d.k));
    let mut ends = vec![0];
    for document in documents {
        ends.push(ends[ends.len() - 1] + document.length as i32);
    }
    let scores = lab.tensor(DType::F32, [INDEX_HEADS, tokens, max_blocks]);
    let args = ops::MsaScore {
        index_q: &index_q.split_last(INDEX_DIM),
        index_k: &index_k.split_last(INDEX_DIM),
        cu_seqlens: &lab.ints(&ends, [ends.len()]),
        scores: &scores,
        block,
    };
    lab.backend.msa_score(&lab.backend.stream(), &args).unwrap();
    lab.get(&scores)
}

#[test]
fn a_score_is_the_largest_product_with_a_key_at_or_before_the_query() {
    for (block, length) in [(4, 70), (24, 129), (128, 300), (300, 301)] {
        let (index, max_blocks) = (Index::new(length), length.div_ceil(block) + 1);
        let got = scores(&lab(DType::F32), &[&index], block, max_blocks, false);
        for (i, &got) in got.iter().enumerate() {
            let (head, token, b) = (
                i / max_blocks / length,
                i / max_blocks % length,
                i % max_blocks,
            );
            let q = &index.q[(token * INDEX_HEADS + head) * INDEX_DIM..][..INDEX_DIM];
            let products = (b * block..(token + 1).min((b + 1) * block)).map(|key| {
                let k = &index.k[key * INDEX_DIM..][..INDEX_DIM];
                q.iter()
                    .zip(k)
                    .map(|(q, k)| f64::from(*q) * f64::from(*k))
                    .sum::<f64>()
            });
            let exact = products.fold(f64::NEG_INFINITY, f64::max);
            let near = (f64::from(got) - exact).abs() <= 1e-5;
            assert!(
                near || f64::from(got) == exact,
                "{head} {token} {b}: {got} {exact}"
            );
        }
    }
}

#[test]
fn scores_of_a_document_have_the_same_bits_alone_in_a_pack_strided_and_on_any_machine() {
    let (index, block, max_blocks) = (Index::new(200), 8, 40);
    let mut poison = Index::new(45);
    poison.q.fill(f32::NAN);
    poison.k.fill(f32::INFINITY);
    for dtype in [DType::F32, DType::BF16] {
        let mut lab = lab(dtype);
        let alone = bits(&scores(&lab, &[&index], block, max_blocks, false));
        let pack = scores(&lab, &[&poison, &index, &poison], block, max_blocks, true);
        for (head, alone) in alone.chunks_exact(200 * max_blocks).enumerate() {
            let first = (head * 290 + 45) * max_blocks;
            assert!(
                alone == bits(&pack[first..first + alone.len()]),
                "head {head}"
            );
        }
        lab.backend = CpuBackend::new(1).unwrap();
        for isa in Isa::available() {
            let on = with_isa(isa, || scores(&lab, &[&index], block, max_blocks, false));
            assert!(alone == bits(&on), "{isa:?}");
        }
    }
}

#[test]
fn a_nan_key_spoils_its_block_for_the_queries_that_see_it() {
    let mut index = Index::new(40);
    index.k[17 * INDEX_DIM] = f32::NAN;
    let clean = Index::new(40);
    let lab = lab(DType::F32);
    let got = scores(&lab, &[&index], 8, 5, false);
    let clean = scores(&lab, &[&clean], 8, 5, false);
    for (i, (got, clean)) in got.iter().zip(&clean).enumerate() {
        let (token, block) = (i / 5 % 40, i % 5);
        match token >= 17 && block == 2 {
            true => assert!(got.is_nan()),
            false => assert_eq!(
                got.to_bits(),
                clean.to_bits(),
                "token {token}, block {block}"
            ),
        }
    }
}

#[test]
fn the_transpose_of_a_selection_lists_every_query_once_and_in_order() {
    let heads = Heads {
        q: 2,
        kv: 2,
        dim: 8,
        block: 4,
        topk: 3,
    };
    let lab = Lab::new(DType::F32, heads, Rule::Blocks);
    let documents = [21, 0, 4, 65].map(|length| Document::new(&length.to_string(), heads, length));
    let outside = 6;
    let tokens = documents.iter().map(|d| d.length).sum::<usize>() + outside;
    let mut ids = Vec::new();
    for head in 0..2 {
        ids.extend(documents.iter().flat_map(|d| &d.ids[head]));
        ids.resize((head + 1) * tokens * 3, -1);
    }
    let mut ends = vec![0];
    for document in &documents {
        ends.push(ends[ends.len() - 1] + document.length as i32);
    }
    let rows = map_capacity(tokens, documents.len(), heads.block);
    let [block_offsets, row_offsets, queries] = [vec![5], vec![2, rows + 1], vec![2, tokens * 3]]
        .map(|shape| match shape[..] {
            [n] => lab.tensor(DType::I32, [n]),
            _ => lab.tensor(DType::I32, [shape[0], shape[1]]),
        });
    let args = ops::TileMap {
        block_ids: &lab.ints(&ids, [2, tokens, 3]),
        cu_seqlens: &lab.ints(&ends, [5]),
        block_offsets: &block_offsets,
        row_offsets: &row_offsets,
        queries: &queries,
        block: heads.block,
    };
    let stream = lab.backend.stream();
    lab.backend.tile_map(&stream, &args).unwrap();
    let read =
        |tensor: &crate::lab::CpuTensor| tensor.to_vec::<i32>(&lab.backend, &stream).unwrap();
    assert_eq!(read(&block_offsets), [0, 6, 6, 7, 24]);
    let (row_offsets, queries) = (read(&row_offsets), read(&queries));
    for head in 0..2 {
        let offsets = &row_offsets[head * (rows + 1)..][..rows + 1];
        let queries = &queries[head * tokens * 3..][..tokens * 3];
        let mut row = 0;
        for (document, first) in documents.iter().zip(&ends) {
            for block in 0..document.length.div_ceil(heads.block) {
                let expected = (0..document.length)
                    .filter(|&token| document.blocks(heads, head, token).contains(&block))
                    .map(|token| first + token as i32);
                let list = &queries[offsets[row] as usize..offsets[row + 1] as usize];
                assert!(expected.eq(list.iter().copied()), "head {head}, row {row}");
                row += 1;
            }
        }
        let total = offsets[row];
        assert!(offsets[row..].iter().all(|&offset| offset == total));
        assert!(queries[total as usize..].iter().all(|&query| query == -1));
    }
}
