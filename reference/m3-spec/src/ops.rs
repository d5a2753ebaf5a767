//! The ops of the model, one file each. Read an op's file first: equation, shapes, rounding, edge rules, source.
//!
//! | symbol | counts |
//! |---|---|
//! | T, B | tokens of the pack, sequences in it |
//! | H, V | width of the residual stream, vocabulary |
//! | Hq, Hkv, D | query heads, key and value heads, dims of a head |
//! | Hi, Di | index heads, dims of an index head |
//! | E, k, R, F | experts, experts per token, rows in expert order, hidden size of an MLP |
//!
//! All tensors are row-major. `round` is the one rounding to the storage dtype; the rest is fp32.

use crate::op_spec::OpSpec;

pub mod adamw;
pub mod attention;
pub mod block_select;
pub mod embedding;
pub mod grouped_gemm;
pub mod grpo_loss;
pub mod linear;
pub mod log_prob;
pub mod moe_combine;
pub mod moe_permute;
pub mod msa_attention;
pub mod msa_score;
pub mod qk_norm_rope;
pub mod rms_norm;
pub mod router;
pub mod swigluoai;
pub mod tile_map;

/// All ops, in the order in which a training step first meets them.
const ALL: [&OpSpec; 17] = [
    &embedding::SPEC,
    &rms_norm::SPEC,
    &linear::SPEC,
    &qk_norm_rope::SPEC,
    &attention::SPEC,
    &msa_score::SPEC,
    &block_select::SPEC,
    &tile_map::SPEC,
    &msa_attention::SPEC,
    &swigluoai::SPEC,
    &router::SPEC,
    &moe_permute::SPEC,
    &grouped_gemm::SPEC,
    &moe_combine::SPEC,
    &log_prob::SPEC,
    &grpo_loss::SPEC,
    &adamw::SPEC,
];

/// All ops, in the order in which a training step first meets them.
pub fn all() -> impl Iterator<Item = &'static OpSpec> {
    ALL.into_iter()
}

/// The op of that name.
pub fn named(name: &str) -> Option<&'static OpSpec> {
    all().find(|op| op.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::op_spec::TensorArg;
    use crate::rounding::{Rounds, TABLE};
    use std::collections::BTreeSet;

    fn any_values(op: &OpSpec) -> crate::axes::AxisValues {
        let values: Vec<_> = op
            .axes
            .iter()
            .zip(2..)
            .map(|(axis, value)| (axis.name, value))
            .collect();
        op.axis_values(&values).unwrap()
    }

    fn results(op: &'static OpSpec) -> impl Iterator<Item = &'static TensorArg> {
        op.outputs
            .iter()
            .chain(op.backward.iter().flat_map(|b| b.grads))
    }

    #[test]
    fn names_are_unique_and_found() {
        for op in all() {
            assert_eq!(named(op.name).map(|found| found.summary), Some(op.summary));
        }
        assert_eq!(all().map(|op| op.name).collect::<BTreeSet<_>>().len(), 17);
        assert!(named("conv3d").is_none());
    }

    #[test]
    fn every_shape_and_work_function_names_axes_that_exist() {
        for op in all() {
            let axes = any_values(op);
            for tensor in op.tensors() {
                assert!(
                    !tensor.shape(&axes).contains(&0),
                    "{} {}",
                    op.name,
                    tensor.name
                );
                assert!(tensor.bytes(&axes, DType::BF16) > 0);
            }
            let _ = (op.flops)(&axes);
            assert_eq!(
                op.backward.is_some(),
                op.backward_bytes(&axes, DType::BF16) > 0,
                "{}",
                op.name
            );
            assert_eq!(
                op.backward.is_some(),
                op.backward_flops(&axes) > 0,
                "{}",
                op.name
            );
            assert!(op.bytes(&axes, DType::F32) >= op.bytes(&axes, DType::BF16));
        }
    }

    #[test]
    fn what_is_saved_is_an_input_or_an_output() {
        for op in all() {
            for name in op.backward.iter().flat_map(|b| b.saved) {
                let known = op
                    .inputs
                    .iter()
                    .chain(op.outputs)
                    .any(|tensor| tensor.name == *name);
                assert!(known, "{} saves {name}", op.name);
            }
        }
    }

    #[test]
    fn every_result_has_one_rounding_point_that_fits_its_dtype() {
        for op in all() {
            for tensor in results(op) {
                let points: Vec<_> = op
                    .rounding()
                    .filter(|point| point.tensor == tensor.name)
                    .collect();
                assert_eq!(points.len(), 1, "{} {}", op.name, tensor.name);
                let dtype = tensor.dtype(DType::BF16);
                let fits = match points[0].rounds {
                    Rounds::Storage | Rounds::Operand => dtype == DType::BF16,
                    Rounds::Fp32 => dtype == DType::F32,
                    Rounds::Exact => dtype != DType::F32,
                };
                assert!(
                    fits,
                    "{} {} is {dtype}, {:?}",
                    op.name, tensor.name, points[0].rounds
                );
            }
        }
    }

    #[test]
    fn every_rounding_point_belongs_to_an_op_and_a_tensor() {
        for point in TABLE {
            let op = named(point.op).unwrap_or_else(|| panic!("no op {}", point.op));
            let known = point.tensor.starts_with('(')
                || results(op).any(|tensor| tensor.name == point.tensor);
            assert!(known, "{} has no {}", point.op, point.tensor);
        }
    }

    #[test]
    fn every_op_states_invariants() {
        assert!(all().all(|op| !op.invariants.is_empty()));
    }

    /// 4096 tokens of one M3 sparse layer: 64 heads · 4 flops · pairs · 128, and the sparse share of the dense work.
    #[test]
    fn attention_work_counts_pairs() {
        let tokens = 4096u64;
        let pairs = attention::causal_pairs(&[0, 4096]);
        assert_eq!(pairs, tokens * (tokens + 1) / 2);
        let values = [
            ("T", tokens),
            ("B", 1),
            ("pairs", pairs),
            ("Hq", 64),
            ("Hkv", 4),
            ("D", 128),
        ];
        let axes = attention::SPEC.axis_values(&values).unwrap();
        assert_eq!((attention::SPEC.flops)(&axes), 4 * 64 * pairs * 128);
        assert_eq!(attention::SPEC.backward_flops(&axes), 10 * 64 * pairs * 128);
        // q, k, v, o in bf16, lse in f32, two boundaries.
        let bytes = 2 * tokens * 128 * (64 + 4 + 4 + 64) + 4 * tokens * 64 + 4 * 2;
        assert_eq!(attention::SPEC.bytes(&axes, DType::BF16), bytes);
    }

    #[test]
    fn embedding_moves_the_rows_it_reads_and_not_the_table() {
        let axes = embedding::SPEC
            .axis_values(&[("T", 3), ("V", 200_064), ("H", 8)])
            .unwrap();
        assert_eq!(
            embedding::SPEC.bytes(&axes, DType::BF16),
            3 * 4 + 2 * 3 * 8 * 2
        );
    }
}
