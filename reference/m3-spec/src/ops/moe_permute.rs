//! Token rows gathered in expert order.
//!
//! Slot (t, j) goes to row `row_of_slot[t][j]` of expert `expert_ids[t][j]`; rows of an expert are in ascending token, rows
//! of expert e are `expert_offsets[e] .. expert_offsets[e + 1]`. `permuted[row] = x[token_of_row[row]]`, copied.
//!
//! Gradient: `dx[t] = Σ_j dpermuted[row_of_slot[t][j]]` in fp32 in ascending expert id, to which the caller adds the shared
//! expert's and the router's part before the one rounding.
//!
//! Expert parallelism puts its exchange between this op and [`super::grouped_gemm`]. An expert without tokens has no rows.
//! Source: MoE block; parity ladder.

use crate::axes::{fixed, var};
use crate::op_spec::{
    Backward, EXPERT_SLOT, HIDDEN, OpSpec, ROW, TOKEN, Word, dim, fp32, int, stored,
};

/// Gather in expert order.
pub const SPEC: OpSpec = OpSpec {
    name: "moe_permute",
    summary: "token rows gathered in expert order",
    axes: &[
        var("T", "tokens"),
        var("R", "rows in expert order, T·k"),
        fixed("H", "hidden size"),
        fixed("E", "experts"),
        fixed("k", "experts per token"),
    ],
    constants: &[],
    inputs: &[
        stored("x", &[TOKEN, HIDDEN], "token rows"),
        int(
            "expert_ids",
            &[TOKEN, EXPERT_SLOT],
            "chosen experts, ascending",
        ),
    ],
    outputs: &[
        stored("permuted", &[ROW, HIDDEN], "rows in expert order"),
        int(
            "expert_offsets",
            &[dim("E+1", Word::Expert)],
            "first row of every expert",
        ),
        int("row_of_slot", &[TOKEN, EXPERT_SLOT], "row of every slot"),
        int("token_of_row", &[ROW], "token of every row"),
    ],
    flops: |_| 0,
    backward: Some(Backward {
        grads_in: &[stored("dpermuted", &[ROW, HIDDEN], "gradient of the rows")],
        saved: &["row_of_slot"],
        grads: &[fp32(
            "dx",
            &[TOKEN, HIDDEN],
            "gradient of x through the routed experts",
        )],
        flops: |a| a.eval("R*H"),
    }),
    invariants: &[
        "every slot has one row and every row one slot",
        "rows of an expert are in ascending token",
        "offsets never fall, and the last is T·k",
    ],
};
