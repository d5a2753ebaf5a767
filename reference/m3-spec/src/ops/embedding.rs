//! Rows of the embedding table.
//!
//! `x[t] = weight[ids[t]]`, copied: MiniMax-M3 scales embeddings by nothing.
//! Gradient: `dweight[v] = Σ_{t: ids[t] = v} dx[t]`, tokens in ascending order.
//!
//! An id outside `[0, V)` is refused. Source: spec of the model, text decoder forward.

use crate::axes::{fixed, var};
use crate::op_spec::{Backward, HIDDEN, OpSpec, TOKEN, Word, dim, fp32, int, stored};

/// Embedding lookup.
pub const SPEC: OpSpec = OpSpec {
    name: "embedding",
    summary: "rows of the embedding table",
    axes: &[
        var("T", "tokens"),
        fixed("V", "vocabulary"),
        fixed("H", "hidden size"),
    ],
    constants: &[],
    inputs: &[
        int("ids", &[TOKEN], "token ids"),
        stored(
            "weight",
            &[dim("V", Word::VocabId), HIDDEN],
            "embedding table",
        )
        .touching("T*H"),
    ],
    outputs: &[stored(
        "x",
        &[TOKEN, HIDDEN],
        "residual stream before layer 0",
    )],
    flops: |_| 0,
    backward: Some(Backward {
        grads_in: &[stored("dx", &[TOKEN, HIDDEN], "gradient of x")],
        saved: &["ids"],
        grads: &[fp32(
            "dweight",
            &[dim("V", Word::VocabId), HIDDEN],
            "gradient of the table",
        )],
        flops: |a| a.eval("T*H"),
    }),
    invariants: &[
        "a row of x holds the bits of its row of the table",
        "rows of the table that no token names have a zero gradient",
    ],
};
