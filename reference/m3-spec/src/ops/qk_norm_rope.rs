//! Per-head gemma norm and partial rotary embedding of q, k, index q or index k.
//!
//! Per token and head: `n = (x · rstd) · (1 + weight)` over the D dims, one weight for all heads. Then, for i < R/2 with
//! R = rotary_dim and (c, s) the table's entry of the token's position:
//! `y_i = n_i·c − n_{i+R/2}·s`, `y_{i+R/2} = n_{i+R/2}·c + n_i·s`; dims from R on stay n.
//! Norm and rotation are fp32 together; y is rounded once.
//!
//! Gradient: the inverse rotation of dy, then the norm's gradient; `dweight` sums over tokens and heads.
//!
//! Position 0 turns by nothing. Pairs are (i, i + R/2): not interleaved, and not (i, i + D/2). Positions count from the
//! sequence's start. Source: attention and RoPE of the text decoder; the table is [`crate::rope`].

use crate::axes::{fixed, var};
use crate::op_spec::{
    Backward, HEAD_DIM, OpSpec, TOKEN, Word, constant, dim, fp32, int, plain, stored,
};

/// Norm and rotation.
pub const SPEC: OpSpec = OpSpec {
    name: "qk_norm_rope",
    summary: "per-head gemma norm and partial rotary embedding",
    axes: &[
        var("T", "tokens"),
        var("positions", "rows of the rotary table"),
        fixed("heads", "heads"),
        fixed("D", "dims of a head"),
        fixed("half", "pairs that rotate, rotary_dim / 2"),
    ],
    constants: &[constant("eps", "added to the mean square, 1e-6")],
    inputs: &[
        stored(
            "x",
            &[TOKEN, dim("heads", Word::Head), HEAD_DIM],
            "projected heads",
        ),
        stored(
            "weight",
            &[HEAD_DIM],
            "zero-centred weight, one for all heads",
        ),
        fp32(
            "cos_sin",
            &[plain("positions"), plain("half"), plain("2")],
            "rotary table",
        )
        .touching("T*half*2"),
        int("positions", &[TOKEN], "position of a token in its sequence"),
    ],
    outputs: &[stored(
        "y",
        &[TOKEN, dim("heads", Word::Head), HEAD_DIM],
        "normalised, rotated heads",
    )],
    flops: |a| a.eval("5*T*heads*D + 6*T*heads*half"),
    backward: Some(Backward {
        grads_in: &[stored(
            "dy",
            &[TOKEN, dim("heads", Word::Head), HEAD_DIM],
            "gradient of y",
        )],
        saved: &["x", "weight", "cos_sin", "positions"],
        grads: &[
            stored(
                "dx",
                &[TOKEN, dim("heads", Word::Head), HEAD_DIM],
                "gradient of x",
            ),
            fp32("dweight", &[HEAD_DIM], "gradient of the weight"),
        ],
        flops: |a| a.eval("9*T*heads*D + 6*T*heads*half"),
    }),
    invariants: &[
        "position 0 leaves the normalised head as it is",
        "dims from rotary_dim on are not rotated",
        "a head's norm over D dims is unchanged by the rotation",
        "two packed sequences equal each alone",
    ],
};
