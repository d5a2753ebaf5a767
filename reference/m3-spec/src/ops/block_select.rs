//! The key blocks that a query attends to.
//!
//! Per index head and query with n = t / block + 1 visible blocks, min(topk, n) blocks: the first `init` and the last
//! `local` visible ones (init before local), then by score descending. Exact ties go to the lower block id; NaN sorts
//! last; −0 equals +0. Ids are written ascending with a −1 tail, local to the sequence.
//!
//! Forced blocks occupy slots of the topk, they are not added on top. local = 1 is the query's own block. If n ≤ topk all
//! visible blocks are selected, and attention is dense. Source: lightning indexer, steps 5 to 7; decision on ties.

use crate::axes::{fixed, var};
use crate::op_spec::{CU_SEQLENS, INDEX_HEAD, OpSpec, SLOT, TOKEN, Word, constant, dim, fp32, int};

/// Block selection.
pub const SPEC: OpSpec = OpSpec {
    name: "block_select",
    summary: "the k best key blocks of every query and index head",
    axes: &[
        var("T", "tokens"),
        var("B", "sequences"),
        var("max_blocks", "capacity for key blocks of a sequence"),
        fixed("Hi", "index heads"),
        fixed("topk", "slots"),
    ],
    constants: &[
        constant("block", "keys per block, 128"),
        constant("init_blocks", "leading blocks always selected, 0"),
        constant("local_blocks", "last visible blocks always selected, 1"),
    ],
    inputs: &[
        fp32(
            "scores",
            &[INDEX_HEAD, TOKEN, dim("max_blocks", Word::Block)],
            "block scores",
        ),
        CU_SEQLENS,
    ],
    outputs: &[int(
        "block_ids",
        &[INDEX_HEAD, TOKEN, SLOT],
        "selected blocks, ascending, -1 tail",
    )],
    flops: |_| 0,
    backward: None,
    invariants: &[
        "ids are ascending, distinct and visible, with -1 only at the tail",
        "exactly min(topk, visible) blocks are selected, whatever the scores",
        "the own block is always kept where local_blocks is at least 1",
        "equal scores select the lowest ids",
        "no scores are shared between heads or layers",
    ],
};
