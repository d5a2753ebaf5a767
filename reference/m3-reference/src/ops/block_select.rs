//! Which key blocks a query attends to, per index head.
//!
//! A query at position t of its sequence sees blocks 0 to t / block. Forced blocks come first and inside the k: the
//! first `init_blocks`, then the last `local_blocks` visible ones. The rest follow by score, largest first; NaN is
//! worse than any number, -0 equals +0, and of exactly equal scores the lower block id wins. The chosen ids are
//! written in ascending order with a tail of -1.

use crate::math::{best_first, id, row, sequences};
use std::cmp::Ordering;

/// Sizes and rules.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// Hi
    pub index_heads: usize,
    /// Keys a block.
    pub block: usize,
    /// Row length of the scores.
    pub max_blocks: usize,
    /// k, at least `init_blocks + local_blocks`.
    pub topk: usize,
    /// First blocks of a sequence that are always chosen.
    pub init_blocks: usize,
    /// Last visible blocks that are always chosen, the query's own among them; 0 forces none.
    pub local_blocks: usize,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes and rules.
    pub params: Params,
    /// `[Hi, T, max_blocks]`
    pub scores: &'a [f64],
    /// `[B+1]`
    pub cu_seqlens: &'a [i32],
}

/// What the op writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// `[Hi, T, topk]`, local to the sequence, ascending, -1 tail
    pub block_ids: Vec<i32>,
}

/// Why a selection is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectionError {
    /// Wrong number of ids.
    #[error(
        "block_select: block_ids holds {got} ids, expected {expected} (index_heads x tokens x topk)"
    )]
    Length {
        /// index_heads · tokens · topk
        expected: usize,
        /// Ids given.
        got: usize,
    },
    /// An id that is no block of the sequence, or any id for a token outside all sequences.
    #[error(
        "block_select: head {head}, token {token}: block {got} out of range, the sequence has {blocks} blocks"
    )]
    OutOfRange {
        /// Index head.
        head: usize,
        /// Token of the pack.
        token: usize,
        /// Blocks of the token's sequence.
        blocks: usize,
        /// The id.
        got: i32,
    },
    /// A block that begins after the query.
    #[error(
        "block_select: head {head}, token {token}: block {got} lies after the query's own block {own}"
    )]
    NotCausal {
        /// Index head.
        head: usize,
        /// Token of the pack.
        token: usize,
        /// The query's own block.
        own: usize,
        /// The id.
        got: i32,
    },
    /// The same block twice.
    #[error("block_select: head {head}, token {token}: block {got} occurs twice")]
    Duplicate {
        /// Index head.
        head: usize,
        /// Token of the pack.
        token: usize,
        /// The id.
        got: i32,
    },
    /// Ids that do not ascend, or an id after a -1.
    #[error(
        "block_select: head {head}, token {token}: ids {got:?} must ascend and end in -1 entries only"
    )]
    Order {
        /// Index head.
        head: usize,
        /// Token of the pack.
        token: usize,
        /// The row.
        got: Vec<i32>,
    },
}

/// Ids have no rounding: the scores are fp32 values already.
pub fn forward(inputs: &Inputs) -> Output {
    let Params {
        tokens,
        index_heads,
        block,
        max_blocks,
        topk,
        init_blocks,
        local_blocks,
    } = inputs.params;
    assert!(
        topk >= init_blocks + local_blocks,
        "{topk} slots for the forced blocks"
    );
    assert_eq!(
        inputs.scores.len(),
        index_heads * tokens * max_blocks,
        "scores"
    );
    let mut block_ids = vec![-1; index_heads * tokens * topk];
    for sequence in sequences(inputs.cu_seqlens) {
        for head in 0..index_heads {
            for query in sequence.clone() {
                let slot = head * tokens + query;
                let visible = (query - sequence.start) / block + 1;
                let chosen = choose(
                    &row(inputs.scores, slot, max_blocks)[..visible],
                    &inputs.params,
                );
                for (i, b) in chosen.into_iter().enumerate() {
                    block_ids[slot * topk + i] = id(b);
                }
            }
        }
    }
    Output { block_ids }
}

/// The chosen of the visible blocks, ascending.
fn choose(scores: &[f64], params: &Params) -> Vec<usize> {
    let visible = scores.len();
    let rank = |b: usize| match b {
        b if b < params.init_blocks => 0,
        b if b + params.local_blocks >= visible => 1,
        _ => 2,
    };
    let order = |&a: &usize, &b: &usize| -> Ordering {
        let by_score = match rank(a) {
            2 => best_first(scores[a], scores[b]),
            _ => Ordering::Equal,
        };
        rank(a).cmp(&rank(b)).then(by_score).then(a.cmp(&b))
    };
    let mut blocks: Vec<usize> = (0..visible).collect();
    blocks.sort_by(order);
    blocks.truncate(params.topk);
    blocks.sort_unstable();
    blocks
}

/// Refuses block ids `[Hi, T, topk]` that break the contract of [`Output`]: what came from outside is never trusted.
pub fn validate(
    params: &Params,
    block_ids: &[i32],
    cu_seqlens: &[i32],
) -> Result<(), SelectionError> {
    let Params {
        tokens,
        index_heads,
        block,
        topk,
        ..
    } = *params;
    let expected = index_heads * tokens * topk;
    if block_ids.len() != expected {
        return Err(SelectionError::Length {
            expected,
            got: block_ids.len(),
        });
    }
    for head in 0..index_heads {
        for token in 0..tokens {
            let ids = &block_ids[(head * tokens + token) * topk..][..topk];
            let (blocks, own) = match sequences(cu_seqlens).find(|s| s.contains(&token)) {
                Some(s) => (s.len().div_ceil(block), (token - s.start) / block),
                None => (0, 0),
            };
            validate_row(head, token, blocks, own, ids)?;
        }
    }
    Ok(())
}

fn validate_row(
    head: usize,
    token: usize,
    blocks: usize,
    own: usize,
    ids: &[i32],
) -> Result<(), SelectionError> {
    let mut seen = Vec::new();
    for &got in ids.iter().filter(|&&id| id != -1) {
        match usize::try_from(got) {
            Ok(b) if b >= blocks => {
                return Err(SelectionError::OutOfRange {
                    head,
                    token,
                    blocks,
                    got,
                });
            }
            Err(_) => {
                return Err(SelectionError::OutOfRange {
                    head,
                    token,
                    blocks,
                    got,
                });
            }
            Ok(b) if b > own => {
                return Err(SelectionError::NotCausal {
                    head,
                    token,
                    own,
                    got,
                });
            }
            Ok(_) if seen.contains(&got) => {
                return Err(SelectionError::Duplicate { head, token, got });
            }
            Ok(_) => seen.push(got),
        }
    }
    let entries = seen.len();
    if ids[..entries].contains(&-1) || !seen.is_sorted() {
        return Err(SelectionError::Order {
            head,
            token,
            got: ids.to_vec(),
        });
    }
    Ok(())
}
