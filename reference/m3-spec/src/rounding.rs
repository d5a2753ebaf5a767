//! Rounding profile S as data: what is rounded, where, and to what. Every op spec quotes its rows.
//!
//! *Storage* is bf16 in the default mode and f32 in the second one. A result that ends in storage is rounded exactly once,
//! from an fp32 value, to nearest even. The f64 reference rounds nowhere; its rounded twin rounds here and nowhere else.

/// To what a value is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounds {
    /// Once to the storage dtype.
    Storage,
    /// Once to the storage dtype, as an operand of a matrix product; with f32 storage it stays as it is.
    Operand,
    /// Kept in fp32.
    Fp32,
    /// A copy or an integer: no rounding.
    Exact,
}

/// One row of the profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundingPoint {
    /// Stem of the op.
    pub op: &'static str,
    /// An output or gradient of the op by name, or an intermediate in parentheses.
    pub tensor: &'static str,
    /// To what it is rounded.
    pub rounds: Rounds,
    /// The rule in words.
    pub text: &'static str,
}

const fn point(
    op: &'static str,
    tensor: &'static str,
    rounds: Rounds,
    text: &'static str,
) -> RoundingPoint {
    RoundingPoint {
        op,
        tensor,
        rounds,
        text,
    }
}

/// The rows of one op, in the order of the table.
pub fn points(op: &str) -> impl Iterator<Item = &'static RoundingPoint> {
    TABLE.iter().filter(move |point| point.op == op)
}

use Rounds::{Exact, Fp32, Operand, Storage};

/// The whole profile.
#[rustfmt::skip]
pub const TABLE: &[RoundingPoint] = &[
    point("embedding", "x", Exact, "a row of the table, copied"),
    point("embedding", "dweight", Fp32, "weight gradients are fp32, tokens added in ascending order"),

    point("linear", "y", Storage, "fp32 accumulators, one rounding; router logits and lm-head logits stay fp32"),
    point("linear", "dx", Storage, "one rounding; where x has several consumers the products are summed in fp32 first"),
    point("linear", "dw", Fp32, "weight gradients are fp32"),

    point("rms_norm", "r", Storage, "r = round(resid + y)"),
    point("rms_norm", "out", Storage, "fp32 inside, one rounding after the multiplication by (1 + w); the norm reads the rounded r"),
    point("rms_norm", "(rstd)", Fp32, "statistics are fp32"),
    point("rms_norm", "dresid", Storage, "norm path and residual path are summed in fp32, one rounding"),
    point("rms_norm", "dweight", Fp32, "weight gradients are fp32"),

    point("qk_norm_rope", "(x)", Storage, "the projection is rounded before the norm reads it"),
    point("qk_norm_rope", "y", Storage, "norm and rotation together in fp32, one rounding"),
    point("qk_norm_rope", "(rstd)", Fp32, "statistics are fp32"),
    point("qk_norm_rope", "dx", Storage, "one rounding"),
    point("qk_norm_rope", "dweight", Fp32, "weight gradients are fp32"),

    point("attention", "(s)", Fp32, "q·k and softmax are fp32"),
    point("attention", "(p)", Operand, "P is rounded once as operand of P·V"),
    point("attention", "o", Storage, "divided by the fp32 sum of the unrounded P, one rounding"),
    point("attention", "lse", Fp32, "natural log, fp32"),
    point("attention", "(delta)", Fp32, "dP and delta = Σ dO·O are fp32"),
    point("attention", "(ds)", Operand, "dS is rounded once as operand of dQ and dK"),
    point("attention", "dq", Storage, "one rounding"),
    point("attention", "dk", Storage, "slices of the query heads are summed in fp32 in order, one rounding"),
    point("attention", "dv", Storage, "slices of the query heads are summed in fp32 in order, one rounding"),

    point("msa_score", "scores", Fp32, "fp32 accumulation of the rounded index queries and keys, no scale"),
    point("block_select", "block_ids", Exact, "compares fp32 scores"),
    point("tile_map", "block_offsets", Exact, "integers"),
    point("tile_map", "row_offsets", Exact, "integers"),
    point("tile_map", "queries", Exact, "integers"),

    point("msa_attention", "(s)", Fp32, "q·k and softmax are fp32"),
    point("msa_attention", "(p)", Operand, "P is rounded once as operand of P·V"),
    point("msa_attention", "o", Storage, "divided by the fp32 sum of the unrounded P, one rounding"),
    point("msa_attention", "lse", Fp32, "natural log, fp32"),
    point("msa_attention", "(delta)", Fp32, "dP and delta = Σ dO·O are fp32"),
    point("msa_attention", "(ds)", Operand, "dS is rounded once as operand of dQ and dK"),
    point("msa_attention", "dq", Storage, "one rounding"),
    point("msa_attention", "dk", Storage, "slices of the query heads are summed in fp32 in order, one rounding"),
    point("msa_attention", "dv", Storage, "slices of the query heads are summed in fp32 in order, one rounding"),

    point("swigluoai", "(gate_up)", Storage, "the gate/up product is rounded before the activation reads it"),
    point("swigluoai", "y", Storage, "fp32 throughout, one rounding"),
    point("swigluoai", "dgate", Storage, "fp32 throughout, one rounding"),
    point("swigluoai", "dup", Storage, "fp32 throughout, one rounding"),

    point("router", "(logits)", Fp32, "weight, logits, sigmoid and bias are fp32"),
    point("router", "expert_ids", Exact, "selection compares fp32 scores"),
    point("router", "expert_weights", Fp32, "from the unbiased sigmoid, fp32, before the scaling"),
    point("router", "dlogits", Fp32, "router gradients are fp32"),

    point("moe_permute", "permuted", Exact, "rows of x, copied"),
    point("moe_permute", "expert_offsets", Exact, "integers"),
    point("moe_permute", "row_of_slot", Exact, "integers"),
    point("moe_permute", "token_of_row", Exact, "integers"),
    point("moe_permute", "(dpermuted)", Storage, "an expert's dX row is rounded before the sum"),
    point("moe_permute", "dx", Fp32, "summed in fp32 in ascending expert id; rounded once after the last consumer is added"),

    point("grouped_gemm", "y", Storage, "fp32 accumulators, one rounding: gate/up and down alike"),
    point("grouped_gemm", "dx", Storage, "one rounding"),
    point("grouped_gemm", "dw", Fp32, "weight gradients are fp32"),

    point("moe_combine", "y", Storage, "Σ (scaling·w_j)·down_j in fp32 in ascending expert id, + shared, one rounding"),
    point("moe_combine", "ddown", Storage, "round(scaling·w_j·dy)"),
    point("moe_combine", "dexpert_weights", Fp32, "from the rounded down_j, fp32"),

    point("log_prob", "(logits)", Fp32, "fp32 accumulators, never rounded, divided by the temperature in fp32"),
    point("log_prob", "log_probs", Fp32, "fp32"),
    point("log_prob", "lse", Fp32, "natural log, fp32"),
    point("log_prob", "entropy", Fp32, "nats, fp32"),
    point("log_prob", "(dlogits)", Operand, "dlogits are rounded once as operand of dX and dW"),
    point("log_prob", "dx", Storage, "one rounding"),
    point("log_prob", "dw", Fp32, "weight gradients are fp32"),

    point("grpo_loss", "loss", Fp32, "fp32"),
    point("grpo_loss", "ppo_kl", Fp32, "fp32"),
    point("grpo_loss", "clipfrac", Fp32, "fp32"),
    point("grpo_loss", "dlog_probs", Fp32, "log-prob gradients are fp32"),

    point("adamw", "w", Fp32, "fp32 master weight"),
    point("adamw", "m", Fp32, "fp32 moment"),
    point("adamw", "v", Fp32, "fp32 moment"),
    point("adamw", "stored", Storage, "the master rounded once"),
];
