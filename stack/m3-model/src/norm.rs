//! Residual add and norm: the entrance of both halves of a layer, and of the head.

use m3_kernels::{Backend, Result, Tensor, ops};
use m3_spec::dtype::DType;

use crate::context::Context;
use crate::parameters::Parameter;

/// The residual stream between two blocks: what has been summed, and the last block's output that is still to be added.
pub struct Stream<B: Backend> {
    /// `[T, H]`.
    pub residual: Tensor<B>,
    /// `[T, H]`; absent right after the embedding.
    pub branch: Option<Tensor<B>>,
}

/// What the gradient of the norm reads.
pub(crate) struct Saved<B: Backend> {
    /// The rounded sum `[T, H]`.
    pub(crate) residual: Tensor<B>,
    rstd: Tensor<B>,
    /// The normalised rows `[T, H]`.
    pub(crate) out: Tensor<B>,
}

/// Sums the stream into `residual_out` (the residual itself when nothing is to be added) and normalises it.
pub(crate) fn forward<B: Backend>(
    ctx: &mut Context<'_, B>,
    stream: &Stream<B>,
    residual_out: Option<&Tensor<B>>,
    weight: &Parameter<B>,
    eps: f32,
) -> Result<Saved<B>> {
    let [tokens, hidden] = [ctx.tokens(), stream.residual.shape()[1]];
    let out = ctx.activation([tokens, hidden])?;
    let rstd = ctx.alloc(DType::F32, [tokens])?;
    let sum = match (&stream.branch, residual_out) {
        (None, _) => None,
        (Some(_), Some(given)) => Some(given.clone()),
        (Some(_), None) => Some(ctx.activation([tokens, hidden])?),
    };
    let args = ops::RmsNorm {
        residual: &stream.residual,
        y: stream.branch.as_ref(),
        weight: &weight.value,
        residual_out: sum.as_ref(),
        out: &out,
        rstd: &rstd,
        eps,
    };
    ctx.backend.rms_norm(ctx.stream, &args)?;
    Ok(Saved {
        residual: sum.unwrap_or_else(|| stream.residual.clone()),
        rstd,
        out,
    })
}

/// Gradient of the rounded sum, which is the gradient of the residual and of the branch.
pub(crate) fn backward<B: Backend>(
    ctx: &mut Context<'_, B>,
    saved: &Saved<B>,
    weight: &Parameter<B>,
    d_out: &Tensor<B>,
    d_residual_in: Option<&Tensor<B>>,
    d_residual: &Tensor<B>,
) -> Result<()> {
    let Some(d_weight) = &weight.grad else {
        return Ok(());
    };
    let args = ops::RmsNormBackward {
        residual: &saved.residual,
        weight: &weight.value,
        rstd: &saved.rstd,
        d_out,
        d_residual_in,
        d_residual,
        d_weight,
    };
    ctx.backend.rms_norm_backward(ctx.stream, &args)
}
