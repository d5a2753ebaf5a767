//! Block scores, the choice of blocks, and what a selection means.

use crate::check::uniform;
use m3_reference::Rounding;
use m3_reference::math::dot;
use m3_reference::ops::block_select::{self, SelectionError, validate};
use m3_reference::ops::{msa_score, tile_map};

const INF: f64 = f64::INFINITY;

/// Choices of the last query of one sequence from the scores of all its blocks, per head.
fn choose(
    scores: &[&[f64]],
    topk: usize,
    init_blocks: usize,
    local_blocks: usize,
) -> Vec<Vec<i32>> {
    let (index_heads, max_blocks, block) = (scores.len(), scores[0].len(), 4);
    let tokens = max_blocks * block;
    let params = block_select::Params {
        tokens,
        index_heads,
        block,
        max_blocks,
        topk,
        init_blocks,
        local_blocks,
    };
    let mut all = vec![-INF; index_heads * tokens * max_blocks];
    for (head, scores) in scores.iter().enumerate() {
        let last = (head * tokens + tokens - 1) * max_blocks;
        all[last..last + max_blocks].copy_from_slice(scores);
    }
    let cu_seqlens = [0, tokens as i32];
    let inputs = block_select::Inputs {
        params,
        scores: &all,
        cu_seqlens: &cu_seqlens,
    };
    let block_ids = block_select::forward(&inputs).block_ids;
    assert_eq!(validate(&params, &block_ids, &cu_seqlens), Ok(()));
    (0..index_heads)
        .map(|head| block_ids[((head + 1) * tokens - 1) * topk..][..topk].to_vec())
        .collect()
}

#[test]
fn each_index_head_chooses_its_own_blocks() {
    let chosen = choose(
        &[&[9., 0., 0., 0., 0., 0.], &[0., 0., 0., 5., 0., 0.]],
        2,
        0,
        1,
    );
    assert_eq!(chosen, [[0, 5], [3, 5]]);
}

#[test]
fn own_block_is_always_kept() {
    assert_eq!(choose(&[&[3., 2., 1., -9., -INF]], 2, 0, 1), [[0, 4]]);
    assert_eq!(choose(&[&[3., 2., 1., -9., f64::NAN]], 2, 0, 1), [[0, 4]]);
}

#[test]
fn forced_blocks_occupy_slots_inside_the_k() {
    assert_eq!(choose(&[&[-1., 0., 7., 8., 9., 0.]], 3, 1, 1), [[0, 4, 5]]);
    assert_eq!(
        choose(&[&[-1., 9., 7., 8., -5., -6.]], 3, 0, 2),
        [[1, 4, 5]]
    );
}

#[test]
fn without_local_blocks_the_own_block_competes_by_score() {
    assert_eq!(choose(&[&[3., 2., 1., 0.]], 2, 0, 0), [[0, 1]]);
}

#[test]
fn the_lower_block_wins_an_exact_tie() {
    for blocks in [40, 1100] {
        let mut scores = vec![0.0; blocks];
        let mut expected: Vec<i32> = (0..15).collect();
        expected.push(blocks as i32 - 1);
        assert_eq!(choose(&[&scores], 16, 0, 1), [expected.clone()]);
        scores[blocks - 3] = INF;
        expected[14] = blocks as i32 - 3;
        assert_eq!(choose(&[&scores], 16, 0, 1), [expected]);
    }
}

#[test]
fn minus_zero_ties_with_zero_and_nan_comes_last() {
    assert_eq!(choose(&[&[-0.0, 0.0, -0.0, -1.0]], 2, 0, 0), [[0, 1]]);
    assert_eq!(
        choose(&[&[f64::NAN, -INF, -5.0, f64::NAN]], 3, 0, 0),
        [[0, 1, 2]]
    );
    assert_eq!(
        choose(&[&[f64::NAN, -INF, -5.0, -7.0]], 3, 0, 0),
        [[1, 2, 3]]
    );
}

#[test]
fn fewer_blocks_than_slots_leave_a_tail_of_minus_one() {
    assert_eq!(choose(&[&[0., 5., 1.]], 5, 0, 1), [[0, 1, 2, -1, -1]]);
}

/// A score is the largest product over the visible keys of a block, so it equals the naive pooling over all pairs.
#[test]
fn block_scores_pool_visible_keys_of_the_own_sequence() {
    let (tokens, index_heads, head_dim, block, max_blocks) = (11, 2, 3, 4, 3);
    let params = msa_score::Params {
        tokens,
        index_heads,
        head_dim,
        block,
        max_blocks,
    };
    let (iq, ik) = (uniform(1, tokens * 6), uniform(2, tokens * 3));
    let cu_seqlens = [0, 5, 5, 11];
    let inputs = msa_score::Inputs {
        params,
        iq: &iq,
        ik: &ik,
        cu_seqlens: &cu_seqlens,
    };
    let scores = msa_score::forward(&inputs, &Rounding::Exact).scores;
    for head in 0..index_heads {
        for query in 0..tokens {
            let start = if query < 5 { 0 } else { 5 };
            for b in 0..max_blocks {
                let keys = start + b * block..(start + (b + 1) * block).min(query + 1);
                let product =
                    |key: usize| dot(&iq[(query * 2 + head) * 3..][..3], &ik[key * 3..][..3]);
                let expected = keys
                    .map(product)
                    .fold(-INF, |m, s| if s > m { s } else { m });
                assert_eq!(scores[(head * tokens + query) * max_blocks + b], expected);
            }
        }
    }
}

#[test]
fn a_nan_key_makes_its_block_score_nan() {
    let params = msa_score::Params {
        tokens: 3,
        index_heads: 1,
        head_dim: 1,
        block: 4,
        max_blocks: 1,
    };
    let inputs = msa_score::Inputs {
        params,
        iq: &[1.0; 3],
        ik: &[1.0, f64::NAN, 2.0],
        cu_seqlens: &[0, 3],
    };
    let scores = msa_score::forward(&inputs, &Rounding::F32).scores;
    assert!(scores[0] == 1.0 && scores[1].is_nan() && scores[2].is_nan());
}

#[test]
fn block_ids_that_break_the_contract_are_refused() {
    let params = block_select::Params {
        tokens: 9,
        index_heads: 1,
        block: 2,
        max_blocks: 5,
        topk: 3,
        init_blocks: 0,
        local_blocks: 1,
    };
    // Token 5 stands at position 5 of a sequence of 8 (4 blocks, own block 2); token 8 is in no sequence.
    let with = |token: usize, row: [i32; 3]| {
        let mut ids = vec![-1; 27];
        ids[token * 3..token * 3 + 3].copy_from_slice(&row);
        validate(&params, &ids, &[0, 8, 8])
    };
    let (head, token) = (0, 5);
    assert_eq!(with(5, [0, 2, -1]), Ok(()));
    assert_eq!(with(5, [-1, -1, -1]), Ok(()));
    let got = 3;
    assert_eq!(
        with(5, [0, 3, -1]),
        Err(SelectionError::NotCausal {
            head,
            token,
            own: 2,
            got
        })
    );
    for got in [4, 77, -2] {
        let expected = SelectionError::OutOfRange {
            head,
            token,
            blocks: 4,
            got,
        };
        assert_eq!(with(5, [0, got, -1]), Err(expected));
    }
    let got = 1;
    assert_eq!(
        with(5, [1, 1, -1]),
        Err(SelectionError::Duplicate { head, token, got })
    );
    for row in [[2, 0, -1], [0, -1, 2]] {
        let expected = SelectionError::Order {
            head,
            token,
            got: row.to_vec(),
        };
        assert_eq!(with(5, row), Err(expected));
    }
    let got = 0;
    let expected = SelectionError::OutOfRange {
        head,
        token: 8,
        blocks: 0,
        got,
    };
    assert_eq!(with(8, [0, -1, -1]), Err(expected));
    let expected = SelectionError::Length {
        expected: 27,
        got: 3,
    };
    assert_eq!(validate(&params, &[0; 3], &[0, 8, 8]), Err(expected));
}

#[test]
fn keys_and_queries_are_two_views_of_the_same_pairs() {
    let params = tile_map::Params {
        tokens: 8,
        index_heads: 1,
        block: 2,
        topk: 2,
    };
    // Sequences of 5 and 3 tokens: blocks {0,1} {2,3} {4} and {5,6} {7}.
    let block_ids = [0, -1, 0, -1, 1, -1, 0, 1, 0, 2, 0, -1, -1, -1, 0, 1];
    let inputs = tile_map::Inputs {
        params,
        block_ids: &block_ids,
        cu_seqlens: &[0, 5, 8, 8],
    };
    let output = tile_map::forward(&inputs);
    let keys: [&[usize]; 8] = [
        &[0],
        &[0, 1],
        &[2],
        &[0, 1, 2, 3],
        &[0, 1, 4],
        &[5],
        &[],
        &[5, 6, 7],
    ];
    assert_eq!(output.keys, keys);
    let queries: [&[usize]; 5] = [&[0, 1, 3, 4], &[2, 3], &[4], &[5, 7], &[7]];
    assert_eq!(output.queries, queries);
}
