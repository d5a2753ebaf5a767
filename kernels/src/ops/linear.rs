//! Matrix products of strided operands.

use super::check::{Check, F32, STORAGE};
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::Tensor;

/// `c = a · b`, or `c += a · b` in fp32.
///
/// Every element is a sum over k in one fixed order, so a row's bits depend on neither the number of rows nor on which
/// columns are computed beside it. Transposed views make the three products of a linear layer with weight W `[N, K]`:
/// y = x · Wᵀ, dx = dy · W, dW += dyᵀ · x.
pub struct Gemm<'a, B: Backend> {
    /// Left operand, F32 or BF16 `[M, K]`, any strides.
    pub a: &'a Tensor<B>,
    /// Right operand, F32 or BF16 `[K, N]`, any strides.
    pub b: &'a Tensor<B>,
    /// Written; F32 or BF16 `[M, N]`, one rounding.
    pub c: &'a Tensor<B>,
    /// Add to `c` instead of replacing it; `c` must then be F32.
    pub accumulate: bool,
}

/// Extents of [`Gemm`].
pub struct GemmDims {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Summed extent.
    pub k: usize,
}

impl<B: Backend> Gemm<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<GemmDims> {
        let mut check = Check::new("gemm");
        check.input("a", self.a, STORAGE, &[None, None])?;
        let (m, k) = (self.a.shape()[0], self.a.shape()[1]);
        check.input("b", self.b, STORAGE, &[Some(k), None])?;
        let n = self.b.shape()[1];
        let result = if self.accumulate { F32 } else { STORAGE };
        check.output("c", self.c, result, &[Some(m), Some(n)])?;
        check.disjoint()?;
        Ok(GemmDims { m, n, k })
    }
}
