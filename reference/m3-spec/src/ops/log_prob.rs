//! Log-probabilities of target tokens through the language-model head.
//!
//! `z = (x · wᵀ) / temperature`, `lse = ln Σ_v e^{z_v}`, `log_probs = z[target] − lse`,
//! `entropy = lse − Σ_v e^{z_v − lse}·z_v`. Logits are fp32 accumulators, never rounded to bf16, walked in fixed vocabulary
//! tiles. A negative target is skipped: its outputs are 0 and it has no gradient.
//!
//! Gradient: `dlogits = dlog_probs · (1[target] − softmax(z)) / temperature`, `dx = dlogits · w`, `dw = dlogitsᵀ · x`.
//!
//! The target of a row is the token after it. Temperature 0 is refused. Known value: logits [0, 0.8], target 1,
//! temperature 0.8 → −0.31326. Source: log-probs that are compared, RL loop.

use crate::axes::{fixed, var};
use crate::op_spec::{Backward, HIDDEN, OpSpec, TOKEN, Word, dim, fp32, int, plain, stored};

/// Head and log-probability.
pub const SPEC: OpSpec = OpSpec {
    name: "log_prob",
    summary: "log-probabilities of target tokens at a temperature",
    axes: &[
        var("T", "rows"),
        fixed("V", "vocabulary"),
        fixed("H", "hidden size"),
    ],
    constants: &[],
    inputs: &[
        stored("x", &[TOKEN, HIDDEN], "rows after the final norm"),
        stored(
            "w",
            &[dim("V", Word::VocabId), HIDDEN],
            "language-model head",
        ),
        int(
            "targets",
            &[TOKEN],
            "token that follows the row; negative to skip it",
        ),
        fp32("temperature", &[plain("1")], "above 0"),
    ],
    outputs: &[
        fp32("log_probs", &[TOKEN], "log-probability of the target"),
        fp32("entropy", &[TOKEN], "entropy in nats"),
        fp32("lse", &[TOKEN], "natural log of the sum of exponentials"),
    ],
    flops: |a| a.eval("2*T*V*H + 6*T*V"),
    backward: Some(Backward {
        grads_in: &[fp32(
            "dlog_probs",
            &[TOKEN],
            "gradient of the log-probabilities",
        )],
        saved: &["x", "w", "targets", "temperature", "lse"],
        grads: &[
            stored("dx", &[TOKEN, HIDDEN], "gradient of x"),
            fp32(
                "dw",
                &[dim("V", Word::VocabId), HIDDEN],
                "gradient of the head",
            ),
        ],
        flops: |a| a.eval("6*T*V*H + 4*T*V"),
    }),
    invariants: &[
        "a log-probability is at most 0",
        "the probabilities of all targets add up to 1",
        "a skipped row is 0 and has no gradient",
        "a row has the same bits alone and in any batch",
    ],
};
