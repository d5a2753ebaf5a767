//! Block scores of the lightning indexer.
//!
//! Per index head h, query t and key block b of the sequence (block b holds keys b·block … b·block + block − 1):
//! `scores[h,t,b] = max_{j in b, j ≤ t} iq[t,h]·ik[j]`, fp32, unscaled; −inf for b > t / block.
//!
//! Blocks start at each sequence's own start. The one index key head serves all index heads, and no maximum is taken over
//! heads. The last block pools only keys that exist. No gradient: the indexer is frozen and selection is not
//! differentiable. Source: lightning indexer, steps 3 to 5.

use crate::axes::{fixed, var};
use crate::op_spec::{
    CU_SEQLENS, INDEX_HEAD, KEY_TOKEN, OpSpec, TOKEN, Word, constant, dim, fp32, plain, stored,
};

/// Block scores.
pub const SPEC: OpSpec = OpSpec {
    name: "msa_score",
    summary: "best index score of every key block",
    axes: &[
        var("T", "tokens"),
        var("B", "sequences"),
        var("max_blocks", "capacity for key blocks of a sequence"),
        var("pairs", "visible (query, key) pairs of one head"),
        fixed("Hi", "index heads"),
        fixed("Di", "dims of an index head"),
    ],
    constants: &[constant("block", "keys per block, 128")],
    inputs: &[
        stored(
            "iq",
            &[TOKEN, INDEX_HEAD, plain("Di")],
            "index queries, normalised and rotated",
        ),
        stored(
            "ik",
            &[KEY_TOKEN, plain("1"), plain("Di")],
            "index keys, normalised and rotated",
        ),
        CU_SEQLENS,
    ],
    outputs: &[fp32(
        "scores",
        &[INDEX_HEAD, TOKEN, dim("max_blocks", Word::Block)],
        "block scores, -inf where not visible",
    )],
    flops: |a| a.eval("2*Hi*pairs*Di"),
    backward: None,
    invariants: &[
        "heads with different queries have different scores",
        "a block beyond the query's own is -inf",
        "keys past the end of a sequence, whatever they hold, change no bit",
        "a row has the same bits alone, in any batch, in prefill and in decode",
    ],
};
