//! One product per expert over its own rows, and the gradients of the experts' weights.

use super::CudaBackend;
use super::launch::address;
use super::linear::{Cut, Experts, Matrix, Product, enqueue};
use super::stream::Enqueue;
use crate::error::Result;
use crate::ops;

pub(super) fn grouped_gemm(
    queue: &mut Enqueue<'_>,
    args: &ops::GroupedGemm<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let product = Product {
        a: Matrix::of(args.a),
        b: Matrix::of(args.b),
        c: Matrix::of(args.c),
        extents: [dims.rows, dims.n, dims.k],
        accumulate: false,
    };
    let experts = Experts {
        cut: Cut::Rows,
        count: dims.experts,
        offsets: address(args.expert_offsets),
        b_stride: args.b.strides()[0],
        c_stride: 0,
    };
    enqueue(queue, &product, &experts)
}

pub(super) fn grouped_gemm_weights(
    queue: &mut Enqueue<'_>,
    args: &ops::GroupedGemmWeights<'_, CudaBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let product = Product {
        a: Matrix::of(args.a).transposed(),
        b: Matrix::of(args.b),
        c: Matrix::of(args.dw),
        extents: [dims.k, dims.n, dims.rows],
        accumulate: true,
    };
    let experts = Experts {
        cut: Cut::Weights,
        count: dims.experts,
        offsets: address(args.expert_offsets),
        b_stride: 0,
        c_stride: args.dw.strides()[0],
    };
    enqueue(queue, &product, &experts)
}
