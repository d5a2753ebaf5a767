//! The transpose of a selection: for every key block, the queries that selected it.
//!
//! Map row of block b of sequence s: `block_offsets[s] + b`. Its queries (tokens of the pack) are
//! `queries[h][row_offsets[h][row] .. row_offsets[h][row + 1]]`, ascending. Rows past the last block are empty; entries
//! of `queries` past the last edge are −1. Capacity for rows: M = T / block + B.
//!
//! Blocks wider and narrower than a kernel's tile are both allowed: the map speaks of blocks, the walk cuts them into tiles.
//! Source: block-sparse kernels, CSR of the selection.

use crate::axes::{fixed, var};
use crate::op_spec::{BOUNDARIES, CU_SEQLENS, KV_HEAD, OpSpec, SLOT, TOKEN, constant, int, plain};

/// Transpose of a selection.
pub const SPEC: OpSpec = OpSpec {
    name: "tile_map",
    summary: "queries of every key block",
    axes: &[
        var("T", "tokens"),
        var("B", "sequences"),
        var("M", "capacity for key blocks of the pack, T / block + B"),
        fixed("Hkv", "key and value heads, one index head each"),
        fixed("topk", "slots"),
    ],
    constants: &[constant("block", "keys per block, 128")],
    inputs: &[
        int(
            "block_ids",
            &[KV_HEAD, TOKEN, SLOT],
            "selected blocks, ascending, -1 tail",
        ),
        CU_SEQLENS,
    ],
    outputs: &[
        int(
            "block_offsets",
            &[BOUNDARIES],
            "blocks of the sequences before",
        ),
        int(
            "row_offsets",
            &[KV_HEAD, plain("M+1")],
            "first edge of every map row",
        ),
        int(
            "queries",
            &[KV_HEAD, plain("T*topk")],
            "tokens that selected the row's block, ascending",
        ),
    ],
    flops: |_| 0,
    backward: None,
    invariants: &[
        "every selected (query, block) is one edge, and nothing else is",
        "transposing twice gives the selection back",
        "row offsets never fall, and the last is the number of edges",
        "empty sequences and empty selections give empty rows",
    ],
};

/// Capacity M for map rows: no pack of so many tokens and sequences has more key blocks.
pub fn row_capacity(tokens: u64, sequences: u64, block: u64) -> u64 {
    tokens / block + sequences
}
