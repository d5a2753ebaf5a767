//! The three products of a linear layer with weight W `[N, K]`.

use m3_kernels::{Backend, Result, Tensor, ops};

use crate::context::Context;

/// y = x · Wᵀ.
pub(crate) fn forward<B: Backend>(
    ctx: &Context<'_, B>,
    x: &Tensor<B>,
    weight: &Tensor<B>,
    y: &Tensor<B>,
) -> Result<()> {
    product(ctx, x, &weight.transpose(0, 1), y, false)
}

/// dx = dy · W, or dx += dy · W in fp32.
pub(crate) fn backward_input<B: Backend>(
    ctx: &Context<'_, B>,
    dy: &Tensor<B>,
    weight: &Tensor<B>,
    dx: &Tensor<B>,
    accumulate: bool,
) -> Result<()> {
    product(ctx, dy, weight, dx, accumulate)
}

/// dW += dyᵀ · x in fp32.
pub(crate) fn backward_weight<B: Backend>(
    ctx: &Context<'_, B>,
    dy: &Tensor<B>,
    x: &Tensor<B>,
    grad: Option<&Tensor<B>>,
) -> Result<()> {
    grad.map_or(Ok(()), |grad| {
        product(ctx, &dy.transpose(0, 1), x, grad, true)
    })
}

fn product<B: Backend>(
    ctx: &Context<'_, B>,
    a: &Tensor<B>,
    b: &Tensor<B>,
    c: &Tensor<B>,
    accumulate: bool,
) -> Result<()> {
    ctx.backend.gemm(
        ctx.stream,
        &ops::Gemm {
            a,
            b,
            c,
            accumulate,
        },
    )
}
