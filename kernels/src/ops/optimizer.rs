//! Gradient norm, clip coefficient and AdamW over slices.

use super::check::{Check, F32, I32, STORAGE};
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::Tensor;

/// `sum[0] = Σ source²` in a fixed order.
pub struct SumSquares<'a, B: Backend> {
    /// F32 or BF16, any shape and strides.
    pub source: &'a Tensor<B>,
    /// Written; F32 `[1]`.
    pub sum: &'a Tensor<B>,
}

impl<B: Backend> SumSquares<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<()> {
        let mut check = Check::new("sum_squares");
        let shape = vec![None; self.source.shape().len()];
        check.input("source", self.source, STORAGE, &shape)?;
        check.output("sum", self.sum, F32, &[Some(1)])?;
        check.disjoint()
    }
}

/// norm = sqrt(Σ sums), coefficient = min(1, max_norm / (norm + 1e-6)), finite = 1 when the norm is finite, else 0.
pub struct ClipCoefficient<'a, B: Backend> {
    /// F32 `[S]`, one sum of squares per slice.
    pub sums: &'a Tensor<B>,
    /// Written; F32 `[1]`, global norm before clipping.
    pub norm: &'a Tensor<B>,
    /// Written; F32 `[1]`, factor of every gradient.
    pub coefficient: &'a Tensor<B>,
    /// Written; I32 `[1]`.
    pub finite: &'a Tensor<B>,
    /// Norm above which gradients shrink.
    pub max_norm: f32,
}

impl<B: Backend> ClipCoefficient<'_, B> {
    /// Checks the operands; returns the number of slices.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<usize> {
        let mut check = Check::new("clip_coefficient");
        check.input("sums", self.sums, F32, &[None])?;
        check.output("norm", self.norm, F32, &[Some(1)])?;
        check.output("coefficient", self.coefficient, F32, &[Some(1)])?;
        check.output("finite", self.finite, I32, &[Some(1)])?;
        check.contiguous("sums", self.sums)?;
        check.disjoint()?;
        Ok(self.sums.shape()[0])
    }
}

/// One AdamW step on a slice, with decoupled weight decay. Skipped when `finite` is 0.
///
/// g = coefficient·grad; m = β₁m + (1 − β₁)g; v = β₂v + (1 − β₂)g²;
/// master −= lr·( m/(1 − β₁^step) / (sqrt(v/(1 − β₂^step)) + eps) + weight_decay·master ); param = round(master).
pub struct AdamW<'a, B: Backend> {
    /// F32, contiguous: gradient of the slice.
    pub grad: &'a Tensor<B>,
    /// Read and written; F32, fp32 master weight.
    pub master: &'a Tensor<B>,
    /// Read and written; F32, first moment.
    pub exp_avg: &'a Tensor<B>,
    /// Read and written; F32, second moment.
    pub exp_avg_sq: &'a Tensor<B>,
    /// Written; F32 or BF16, the parameter itself.
    pub param: &'a Tensor<B>,
    /// F32 `[1]`.
    pub learning_rate: &'a Tensor<B>,
    /// I32 `[1]`, 1 at the first step.
    pub step: &'a Tensor<B>,
    /// F32 `[1]`, of [`ClipCoefficient`].
    pub coefficient: &'a Tensor<B>,
    /// I32 `[1]`, of [`ClipCoefficient`].
    pub finite: &'a Tensor<B>,
    /// β₁.
    pub beta1: f32,
    /// β₂.
    pub beta2: f32,
    /// Added to the root.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
}

impl<B: Backend> AdamW<'_, B> {
    /// Checks the operands; returns the number of elements.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<usize> {
        let mut check = Check::new("adamw");
        let shape: Vec<_> = self.grad.shape().iter().map(|&n| Some(n)).collect();
        check.input("grad", self.grad, F32, &shape)?;
        check.output("master", self.master, F32, &shape)?;
        check.output("exp_avg", self.exp_avg, F32, &shape)?;
        check.output("exp_avg_sq", self.exp_avg_sq, F32, &shape)?;
        check.output("param", self.param, STORAGE, &shape)?;
        for (name, tensor) in [
            ("grad", self.grad),
            ("master", self.master),
            ("exp_avg", self.exp_avg),
            ("exp_avg_sq", self.exp_avg_sq),
            ("param", self.param),
        ] {
            check.contiguous(name, tensor)?;
        }
        check.input("learning_rate", self.learning_rate, F32, &[Some(1)])?;
        check.input("step", self.step, I32, &[Some(1)])?;
        check.input("coefficient", self.coefficient, F32, &[Some(1)])?;
        check.input("finite", self.finite, I32, &[Some(1)])?;
        check.disjoint()?;
        Ok(self.grad.elements())
    }
}
