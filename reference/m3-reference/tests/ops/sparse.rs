//! Block-sparse attention.

use crate::check::{assert_derivative, uniform};
use m3_reference::Rounding;
use m3_reference::math::dot;
use m3_reference::ops::msa_attention::{Grads, Inputs, Output, Params, backward, forward};
use m3_reference::ops::{attention, block_select, msa_score};

const EXACT: Rounding = Rounding::Exact;
const BLOCK: usize = 4;
const TOPK: usize = 2;

fn params(tokens: usize) -> Params {
    let (q_heads, kv_heads, head_dim) = (4, 2, 6);
    Params {
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        scale: 0.4,
        block: BLOCK,
        topk: TOPK,
    }
}

fn qkv(tokens: usize) -> [Vec<f64>; 3] {
    [
        uniform(1, tokens * 24),
        uniform(2, tokens * 12),
        uniform(3, tokens * 12),
    ]
}

/// Blocks that a random indexer chooses for `qkv`.
fn block_ids(tokens: usize, cu_seqlens: &[i32]) -> Vec<i32> {
    let max_blocks = tokens.div_ceil(BLOCK);
    let params = msa_score::Params {
        tokens,
        index_heads: 2,
        head_dim: 3,
        block: BLOCK,
        max_blocks,
    };
    let (iq, ik) = (uniform(4, tokens * 6), uniform(5, tokens * 3));
    let inputs = msa_score::Inputs {
        params,
        iq: &iq,
        ik: &ik,
        cu_seqlens,
    };
    let scores = msa_score::forward(&inputs, &EXACT).scores;
    let params = block_select::Params {
        tokens,
        index_heads: 2,
        block: BLOCK,
        max_blocks,
        topk: TOPK,
        init_blocks: 0,
        local_blocks: 1,
    };
    block_select::forward(&block_select::Inputs {
        params,
        scores: &scores,
        cu_seqlens,
    })
    .block_ids
}

fn run(x: &[Vec<f64>], block_ids: &[i32], cu_seqlens: &[i32]) -> Output {
    let params = params(x[0].len() / 24);
    forward(
        &Inputs {
            params,
            q: &x[0],
            k: &x[1],
            v: &x[2],
            block_ids,
            cu_seqlens,
        },
        &EXACT,
    )
}

#[test]
fn msa_attention_gradients_are_its_derivative() {
    let (x, cu_seqlens, d_o) = (qkv(21), [0, 17, 17, 21], uniform(6, 21 * 24));
    let ids = block_ids(21, &cu_seqlens);
    let inputs = Inputs {
        params: params(21),
        q: &x[0],
        k: &x[1],
        v: &x[2],
        block_ids: &ids,
        cu_seqlens: &cu_seqlens,
    };
    let output = run(&x, &ids, &cu_seqlens);
    let g = backward(&inputs, &output, &Grads { d_o: &d_o }, &EXACT);
    assert_derivative(&x, &[g.dq, g.dk, g.dv], |x| {
        dot(&run(x, &ids, &cu_seqlens).o, &d_o)
    });
}

/// Bit for bit, up to the last token at which every visible block is selected, and no further.
#[test]
fn up_to_k_blocks_it_equals_dense_attention() {
    let tokens = TOPK * BLOCK + 3;
    let (x, cu_seqlens) = (qkv(tokens), [0, tokens as i32]);
    let sparse = run(&x, &block_ids(tokens, &cu_seqlens), &cu_seqlens);
    let params = attention::Params {
        tokens,
        q_heads: 4,
        kv_heads: 2,
        head_dim: 6,
        scale: 0.4,
        causal: true,
    };
    let inputs = attention::Inputs {
        params,
        q: &x[0],
        k: &x[1],
        v: &x[2],
        cu_seqlens: &cu_seqlens,
    };
    let dense = attention::forward(&inputs, &EXACT);
    let same = TOPK * BLOCK;
    assert_eq!(sparse.o[..same * 24], dense.o[..same * 24]);
    assert_eq!(sparse.lse[..same * 4], dense.lse[..same * 4]);
    assert_ne!(sparse.lse[same * 4..], dense.lse[same * 4..]);
}

#[test]
fn a_packed_sequence_selects_and_attends_as_if_alone() {
    let (tokens, start) = (19, 7);
    let (x, cu_seqlens) = (qkv(tokens), [0, 7, 19, 19]);
    let ids = block_ids(tokens, &cu_seqlens);
    let packed = run(&x, &ids, &cu_seqlens);
    let alone_x = [
        &x[0][start * 24..],
        &x[1][start * 12..],
        &x[2][start * 12..],
    ];
    let alone_ids: Vec<i32> = ids
        .chunks_exact(tokens * TOPK)
        .flat_map(|head| &head[start * TOPK..])
        .copied()
        .collect();
    let alone = run(&alone_x.map(<[f64]>::to_vec), &alone_ids, &[0, 12]);
    assert_eq!(packed.o[start * 24..], alone.o);
    assert_eq!(packed.lse[start * 4..], alone.lse);
}

#[test]
fn an_empty_selection_gives_zero_and_passes_no_gradient() {
    let (x, cu_seqlens, d_o) = (qkv(6), [0, 6], uniform(6, 6 * 24));
    let full = block_ids(6, &cu_seqlens);
    let mut ids = full.clone();
    ids[2 * TOPK..3 * TOPK].fill(-1);
    let output = run(&x, &ids, &cu_seqlens);
    // Head 0 of the selection governs query heads 0 and 1 of token 2; everything else stays.
    let whole = run(&x, &full, &cu_seqlens);
    for (i, (lse, expected)) in output.lse.iter().zip(&whole.lse).enumerate() {
        let empty = i == 8 || i == 9;
        assert_eq!(*lse, if empty { f64::NEG_INFINITY } else { *expected });
    }
    assert!(output.o[2 * 24..2 * 24 + 12].iter().all(|&o| o == 0.0));
    let inputs = Inputs {
        params: params(6),
        q: &x[0],
        k: &x[1],
        v: &x[2],
        block_ids: &ids,
        cu_seqlens: &cu_seqlens,
    };
    let g = backward(&inputs, &output, &Grads { d_o: &d_o }, &EXACT);
    assert!(g.dq[2 * 24..2 * 24 + 12].iter().all(|&dq| dq == 0.0));
    assert!([g.dq, g.dk, g.dv].concat().iter().all(|g| g.is_finite()));
}

#[test]
fn chosen_rows_equal_the_whole() {
    let (x, cu_seqlens) = (qkv(13), [0, 13]);
    let ids = block_ids(13, &cu_seqlens);
    let whole = run(&x, &ids, &cu_seqlens);
    let inputs = Inputs {
        params: params(13),
        q: &x[0],
        k: &x[1],
        v: &x[2],
        block_ids: &ids,
        cu_seqlens: &cu_seqlens,
    };
    let some = m3_reference::ops::msa_attention::forward_rows(&inputs, [3, 12], &EXACT);
    for t in [3, 12] {
        assert_eq!(some.o[t * 24..(t + 1) * 24], whole.o[t * 24..(t + 1) * 24]);
    }
    assert!(some.o[..3 * 24].iter().all(|&o| o == 0.0));
}
