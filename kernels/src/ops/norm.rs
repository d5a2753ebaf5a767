//! Normalisation: residual add with gemma RMSNorm, and per-head norm with rotary embedding.

use super::check::{Check, F32, I32, STORAGE};
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::Tensor;

/// r' = round(r + y); out = round(r' · rstd · (1 + w)) with rstd = 1/sqrt(mean(r'²) + eps); fp32 inside.
///
/// The norm reads the *rounded* sum. Without `y` the residual passes through unchanged.
pub struct RmsNorm<'a, B: Backend> {
    /// Residual stream, F32 or BF16 `[T, H]`.
    pub residual: &'a Tensor<B>,
    /// Output of the previous block to be added, `[T, H]`.
    pub y: Option<&'a Tensor<B>>,
    /// Zero-centred weight, F32 or BF16 `[H]`.
    pub weight: &'a Tensor<B>,
    /// Written when `y` is given; the rounded sum `[T, H]`.
    pub residual_out: Option<&'a Tensor<B>>,
    /// Written; the normalised rows `[T, H]`.
    pub out: &'a Tensor<B>,
    /// Written; F32 `[T]`, saved for the gradient.
    pub rstd: &'a Tensor<B>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Extents of [`RmsNorm`] and its gradient.
pub struct RmsNormDims {
    /// Rows.
    pub tokens: usize,
    /// Channels.
    pub hidden: usize,
}

impl<B: Backend> RmsNorm<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<RmsNormDims> {
        let mut check = Check::new("rms_norm");
        check.input("residual", self.residual, STORAGE, &[None, None])?;
        let (tokens, hidden) = (self.residual.shape()[0], self.residual.shape()[1]);
        let shape = [Some(tokens), Some(hidden)];
        check.input("weight", self.weight, STORAGE, &[Some(hidden)])?;
        check.output("out", self.out, STORAGE, &shape)?;
        check.output("rstd", self.rstd, F32, &[Some(tokens)])?;
        check.argument(self.y.is_some() == self.residual_out.is_some(), || {
            "y and residual_out are given together or not at all".into()
        })?;
        if let (Some(y), Some(sum)) = (self.y, self.residual_out) {
            check.input("y", y, STORAGE, &shape)?;
            check.output("residual_out", sum, STORAGE, &shape)?;
            check.same_dtype("y", y, self.residual)?;
            check.same_dtype("residual_out", sum, self.residual)?;
            check.rows("y", y)?;
            check.rows("residual_out", sum)?;
        }
        check.same_dtype("out", self.out, self.residual)?;
        check.rows("residual", self.residual)?;
        check.rows("out", self.out)?;
        check.rows("weight", self.weight)?;
        check.contiguous("rstd", self.rstd)?;
        check.disjoint()?;
        Ok(RmsNormDims { tokens, hidden })
    }
}

/// Gradient of [`RmsNorm`] with respect to the rounded sum, which is both addends' gradient.
///
/// With x̂ = r·rstd, g = d_out·(1+w): d_residual = round(d_residual_in + rstd·(g − x̂·mean(g·x̂))), d_weight += Σ_t d_out·x̂.
pub struct RmsNormBackward<'a, B: Backend> {
    /// The rounded sum of the forward pass, `[T, H]`.
    pub residual: &'a Tensor<B>,
    /// Zero-centred weight, `[H]`.
    pub weight: &'a Tensor<B>,
    /// F32 `[T]` of the forward pass.
    pub rstd: &'a Tensor<B>,
    /// Gradient of the normalised rows, `[T, H]`.
    pub d_out: &'a Tensor<B>,
    /// Gradient that reaches the sum past the norm, `[T, H]`.
    pub d_residual_in: Option<&'a Tensor<B>>,
    /// Written; gradient of the sum `[T, H]`, one rounding.
    pub d_residual: &'a Tensor<B>,
    /// Read and written; F32 `[H]`.
    pub d_weight: &'a Tensor<B>,
}

impl<B: Backend> RmsNormBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<RmsNormDims> {
        let mut check = Check::new("rms_norm_backward");
        check.input("residual", self.residual, STORAGE, &[None, None])?;
        let (tokens, hidden) = (self.residual.shape()[0], self.residual.shape()[1]);
        let shape = [Some(tokens), Some(hidden)];
        check.input("weight", self.weight, STORAGE, &[Some(hidden)])?;
        check.input("rstd", self.rstd, F32, &[Some(tokens)])?;
        check.input("d_out", self.d_out, STORAGE, &shape)?;
        if let Some(passed) = self.d_residual_in {
            check.input("d_residual_in", passed, STORAGE, &shape)?;
            check.rows("d_residual_in", passed)?;
        }
        check.output("d_residual", self.d_residual, STORAGE, &shape)?;
        check.output("d_weight", self.d_weight, F32, &[Some(hidden)])?;
        for (name, tensor) in [
            ("residual", self.residual),
            ("weight", self.weight),
            ("d_out", self.d_out),
            ("d_residual", self.d_residual),
            ("d_weight", self.d_weight),
        ] {
            check.rows(name, tensor)?;
        }
        check.contiguous("rstd", self.rstd)?;
        check.disjoint()?;
        Ok(RmsNormDims { tokens, hidden })
    }
}

/// Per head: n = x · rstd · (1 + w) over the head's channels, then the rotation of pairs (i, i + R/2) for i < R/2 with
/// R = rotary_dim; fp32 throughout, one rounding.
pub struct QkNormRope<'a, B: Backend> {
    /// Heads before the norm, F32 or BF16 `[T, heads, D]`; may be a slice of a fused row.
    pub x: &'a Tensor<B>,
    /// Zero-centred weight `[D]`, shared by the heads.
    pub weight: &'a Tensor<B>,
    /// F32 `[positions, R/2, 2]`, cos and sin.
    pub cos_sin: &'a Tensor<B>,
    /// I32 `[T]`, position within the token's own sequence.
    pub positions: &'a Tensor<B>,
    /// Written; `[T, heads, D]`.
    pub out: &'a Tensor<B>,
    /// Written; F32 `[T, heads]`, saved for the gradient.
    pub rstd: &'a Tensor<B>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Extents of [`QkNormRope`] and its gradient.
pub struct QkNormRopeDims {
    /// Rows.
    pub tokens: usize,
    /// Heads.
    pub heads: usize,
    /// Channels per head.
    pub head_dim: usize,
    /// Rotated channels per head.
    pub rotary_dim: usize,
    /// Rows of the table.
    pub positions: usize,
}

impl<B: Backend> QkNormRope<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<QkNormRopeDims> {
        let mut check = Check::new("qk_norm_rope");
        let dims = rope_dims(
            &mut check,
            self.x,
            self.weight,
            self.cos_sin,
            self.positions,
        )?;
        let shape = [Some(dims.tokens), Some(dims.heads), Some(dims.head_dim)];
        check.output("out", self.out, STORAGE, &shape)?;
        check.output("rstd", self.rstd, F32, &shape[..2])?;
        check.same_dtype("out", self.out, self.x)?;
        check.rows("out", self.out)?;
        check.contiguous("rstd", self.rstd)?;
        check.disjoint()?;
        Ok(dims)
    }
}

/// Gradient of [`QkNormRope`]: the inverse rotation, then the norm's gradient; dx one rounding.
pub struct QkNormRopeBackward<'a, B: Backend> {
    /// Heads before the norm, of the forward pass, `[T, heads, D]`.
    pub x: &'a Tensor<B>,
    /// Zero-centred weight `[D]`.
    pub weight: &'a Tensor<B>,
    /// F32 `[positions, R/2, 2]`.
    pub cos_sin: &'a Tensor<B>,
    /// I32 `[T]`.
    pub positions: &'a Tensor<B>,
    /// F32 `[T, heads]` of the forward pass.
    pub rstd: &'a Tensor<B>,
    /// Gradient of the rotated heads, `[T, heads, D]`.
    pub d_out: &'a Tensor<B>,
    /// Written; `[T, heads, D]`, may be a slice of a fused row.
    pub dx: &'a Tensor<B>,
    /// Read and written; F32 `[D]`.
    pub d_weight: &'a Tensor<B>,
}

impl<B: Backend> QkNormRopeBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<QkNormRopeDims> {
        let mut check = Check::new("qk_norm_rope_backward");
        let dims = rope_dims(
            &mut check,
            self.x,
            self.weight,
            self.cos_sin,
            self.positions,
        )?;
        let shape = [Some(dims.tokens), Some(dims.heads), Some(dims.head_dim)];
        check.input("rstd", self.rstd, F32, &shape[..2])?;
        check.input("d_out", self.d_out, STORAGE, &shape)?;
        check.output("dx", self.dx, STORAGE, &shape)?;
        check.output("d_weight", self.d_weight, F32, &shape[2..])?;
        check.same_dtype("dx", self.dx, self.x)?;
        for (name, tensor) in [
            ("d_out", self.d_out),
            ("dx", self.dx),
            ("d_weight", self.d_weight),
        ] {
            check.rows(name, tensor)?;
        }
        check.contiguous("rstd", self.rstd)?;
        check.disjoint()?;
        Ok(dims)
    }
}

fn rope_dims<'a, B: Backend>(
    check: &mut Check<'a, B>,
    x: &'a Tensor<B>,
    weight: &'a Tensor<B>,
    cos_sin: &'a Tensor<B>,
    positions: &'a Tensor<B>,
) -> Result<QkNormRopeDims> {
    check.input("x", x, STORAGE, &[None, None, None])?;
    let (tokens, heads, head_dim) = (x.shape()[0], x.shape()[1], x.shape()[2]);
    check.input("weight", weight, STORAGE, &[Some(head_dim)])?;
    check.input("cos_sin", cos_sin, F32, &[None, None, Some(2)])?;
    check.input("positions", positions, I32, &[Some(tokens)])?;
    check.rows("x", x)?;
    check.rows("weight", weight)?;
    check.contiguous("cos_sin", cos_sin)?;
    check.contiguous("positions", positions)?;
    let rotary_dim = 2 * cos_sin.shape()[1];
    check.argument(rotary_dim <= head_dim, || {
        format!("rotary_dim {rotary_dim} is above head_dim {head_dim}")
    })?;
    Ok(QkNormRopeDims {
        tokens,
        heads,
        head_dim,
        rotary_dim,
        positions: cos_sin.shape()[0],
    })
}
