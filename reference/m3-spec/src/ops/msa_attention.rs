//! Block-sparse attention over a selection.
//!
//! As causal [`super::attention`], with the keys of query t and kv head g restricted to the blocks `block_ids[g][t]`:
//! j ≤ t and j / block selected. Index head g selects for kv head g, hence for its Hq/Hkv query heads.
//!
//! Gradient: as dense attention over the same pairs; the selection is a constant. dk and dv of a block sum over the
//! queries that selected it and the q heads of its kv head.
//!
//! With at most topk visible blocks the result is the dense one, bit for bit. Duplicate, out-of-range or non-causal ids are
//! refused. A query that selected nothing has o = 0 and lse = −inf. Source: lightning indexer, steps 8 and 9.

use crate::axes::{fixed, var};
use crate::op_spec::{
    Backward, CU_SEQLENS, HEAD_DIM, KEY_TOKEN, KV_HEAD, OpSpec, Q_HEAD, SLOT, TOKEN, constant,
    fp32, int, stored,
};

/// Block-sparse attention.
pub const SPEC: OpSpec = OpSpec {
    name: "msa_attention",
    summary: "attention over the selected key blocks",
    axes: &[
        var("T", "tokens"),
        var("B", "sequences"),
        var(
            "pairs",
            "selected visible (query, key) pairs, summed over kv heads",
        ),
        fixed("Hq", "query heads"),
        fixed("Hkv", "key and value heads"),
        fixed("G", "query heads per kv head"),
        fixed("D", "dims of a head"),
        fixed("topk", "slots"),
    ],
    constants: &[
        constant("scale", "factor of the scores, D^-0.5"),
        constant("block", "keys per block, 128"),
    ],
    inputs: &[
        stored("q", &[TOKEN, Q_HEAD, HEAD_DIM], "queries"),
        stored("k", &[KEY_TOKEN, KV_HEAD, HEAD_DIM], "keys"),
        stored("v", &[KEY_TOKEN, KV_HEAD, HEAD_DIM], "values"),
        CU_SEQLENS,
        int(
            "block_ids",
            &[KV_HEAD, TOKEN, SLOT],
            "selected blocks, ascending, -1 tail",
        ),
    ],
    outputs: &[
        stored("o", &[TOKEN, Q_HEAD, HEAD_DIM], "weighted values"),
        fp32(
            "lse",
            &[TOKEN, Q_HEAD],
            "natural log of the sum of exponentials",
        ),
    ],
    flops: |a| a.eval("4*G*pairs*D"),
    backward: Some(Backward {
        grads_in: &[stored("d_o", &[TOKEN, Q_HEAD, HEAD_DIM], "gradient of o")],
        saved: &["q", "k", "v", "cu_seqlens", "block_ids", "o", "lse"],
        grads: &[
            stored("dq", &[TOKEN, Q_HEAD, HEAD_DIM], "gradient of q"),
            stored("dk", &[KEY_TOKEN, KV_HEAD, HEAD_DIM], "gradient of k"),
            stored("dv", &[KEY_TOKEN, KV_HEAD, HEAD_DIM], "gradient of v"),
        ],
        flops: |a| a.eval("10*G*pairs*D"),
    }),
    invariants: &[
        "with all visible blocks selected the result is the dense one, bit for bit",
        "a key outside the selection, whatever it holds, changes no bit",
        "keys past the end of a sequence, whatever they hold, change no bit",
        "a query that selected nothing is 0 with lse -inf and no gradient",
        "a row has the same bits alone, in any batch, in prefill and in decode",
    ],
};

/// Selected visible pairs, summed over heads: for each id of `block_ids` `[heads, tokens, topk]` the keys of its block at
/// or before the query. Ids below 0 count nothing; tokens past the last sequence neither.
pub fn selected_pairs(
    block_ids: &[i32],
    cu_seqlens: &[i32],
    tokens: usize,
    topk: usize,
    block: usize,
) -> u64 {
    if topk == 0 || tokens == 0 {
        return 0;
    }
    let positions = positions(cu_seqlens, tokens);
    let pairs = |(row, ids): (usize, &[i32])| -> u64 {
        let Some(position) = positions[row % tokens] else {
            return 0;
        };
        let visible = |&id: &i32| {
            let start = usize::try_from(id).ok()? * block;
            (start <= position).then(|| (position + 1 - start).min(block) as u64)
        };
        ids.iter().filter_map(visible).sum()
    };
    block_ids.chunks_exact(topk).enumerate().map(pairs).sum()
}

/// Position of every token in its sequence.
fn positions(cu_seqlens: &[i32], tokens: usize) -> Vec<Option<usize>> {
    let mut positions = vec![None; tokens];
    for bounds in cu_seqlens.windows(2) {
        for (position, token) in (bounds[0]..bounds[1]).enumerate() {
            let slot = usize::try_from(token)
                .ok()
                .and_then(|token| positions.get_mut(token));
            if let Some(slot) = slot {
                *slot = Some(position);
            }
        }
    }
    positions
}

#[cfg(test)]
mod tests {
    use super::selected_pairs;
    use crate::ops::attention::{bidirectional_pairs, causal_pairs};

    #[test]
    fn selecting_every_visible_block_gives_the_causal_pairs() {
        let cu_seqlens = [0, 5, 5, 12];
        let mut block_ids = Vec::new();
        for t in [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6] {
            block_ids.extend([0, if t >= 4 { 1 } else { -1 }]);
        }
        assert_eq!(causal_pairs(&cu_seqlens), 15 + 28);
        assert_eq!(bidirectional_pairs(&cu_seqlens), 25 + 49);
        assert_eq!(selected_pairs(&block_ids, &cu_seqlens, 12, 2, 4), 43);
        let two_heads = [block_ids.clone(), block_ids].concat();
        assert_eq!(selected_pairs(&two_heads, &cu_seqlens, 12, 2, 4), 86);
    }

    #[test]
    fn tokens_past_the_last_sequence_count_nothing() {
        let block_ids = [0, 0, 0, 0, 0, 0];
        assert_eq!(selected_pairs(&block_ids, &[0, 2], 3, 1, 4), 2 * 3);
    }

    #[test]
    fn an_empty_pack_has_no_pairs() {
        assert_eq!(selected_pairs(&[], &[0, 0], 0, 2, 4), 0);
        assert_eq!(causal_pairs(&[]), 0);
    }
}
