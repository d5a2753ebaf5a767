//! Dense grouped-query attention over packed sequences.
//!
//! For query token t of a sequence and q head h, over the keys j of the same sequence (j ≤ t if causal), with kv head
//! g = h / (Hq/Hkv): `s_j = scale · q[t,h]·k[j,g]`, `lse = ln Σ_j e^{s_j}`, `p_j = e^{s_j − lse}`, `o = Σ_j p_j·v[j,g]`.
//!
//! Gradient: `delta = d_o·o`, `dp_j = d_o·v_j`, `ds_j = p_j·(dp_j − delta)`, `dq = scale·Σ_j ds_j·k_j`,
//! `dk_j = scale·Σ ds_j·q`, `dv_j = Σ p_j·d_o`; dk and dv sum over the queries and the q heads of their kv head.
//!
//! A row without a visible key has o = 0, lse = −inf and no gradient: never a NaN. `causal = false` serves the vision
//! tower. Source: attention of the text decoder.

use crate::axes::{fixed, var};
use crate::op_spec::{
    Backward, CU_SEQLENS, HEAD_DIM, KEY_TOKEN, KV_HEAD, OpSpec, Q_HEAD, TOKEN, constant, fp32,
    stored,
};

/// Dense attention.
pub const SPEC: OpSpec = OpSpec {
    name: "attention",
    summary: "dense grouped-query attention over packed sequences",
    axes: &[
        var("T", "tokens"),
        var("B", "sequences"),
        var("pairs", "visible (query, key) pairs of one head"),
        fixed("Hq", "query heads"),
        fixed("Hkv", "key and value heads"),
        fixed("D", "dims of a head"),
    ],
    constants: &[
        constant("scale", "factor of the scores, D^-0.5"),
        constant(
            "causal",
            "whether a query sees only keys up to its own position, true in the decoder",
        ),
    ],
    inputs: &[
        stored("q", &[TOKEN, Q_HEAD, HEAD_DIM], "queries"),
        stored("k", &[KEY_TOKEN, KV_HEAD, HEAD_DIM], "keys"),
        stored("v", &[KEY_TOKEN, KV_HEAD, HEAD_DIM], "values"),
        CU_SEQLENS,
    ],
    outputs: &[
        stored("o", &[TOKEN, Q_HEAD, HEAD_DIM], "weighted values"),
        fp32(
            "lse",
            &[TOKEN, Q_HEAD],
            "natural log of the sum of exponentials",
        ),
    ],
    flops: |a| a.eval("4*Hq*pairs*D"),
    backward: Some(Backward {
        grads_in: &[stored("d_o", &[TOKEN, Q_HEAD, HEAD_DIM], "gradient of o")],
        saved: &["q", "k", "v", "cu_seqlens", "o", "lse"],
        grads: &[
            stored("dq", &[TOKEN, Q_HEAD, HEAD_DIM], "gradient of q"),
            stored("dk", &[KEY_TOKEN, KV_HEAD, HEAD_DIM], "gradient of k"),
            stored("dv", &[KEY_TOKEN, KV_HEAD, HEAD_DIM], "gradient of v"),
        ],
        flops: |a| a.eval("10*Hq*pairs*D"),
    }),
    invariants: &[
        "a row without a visible key is 0 with lse -inf and no gradient",
        "no row sees another sequence",
        "keys past the end of a sequence, whatever they hold, change no bit",
        "a row has the same bits alone, in any batch, in prefill and in decode",
        "equal values give exactly that value",
    ],
};

/// Visible (query, key) pairs of one head under a causal mask: Σ n·(n + 1)/2 over the sequences.
pub fn causal_pairs(cu_seqlens: &[i32]) -> u64 {
    lengths(cu_seqlens).map(|n| n * (n + 1) / 2).sum()
}

/// The same without a mask: Σ n².
pub fn bidirectional_pairs(cu_seqlens: &[i32]) -> u64 {
    lengths(cu_seqlens).map(|n| n * n).sum()
}

fn lengths(cu_seqlens: &[i32]) -> impl Iterator<Item = u64> + '_ {
    cu_seqlens
        .windows(2)
        .map(|w| u64::try_from(w[1] - w[0]).unwrap_or(0))
}
