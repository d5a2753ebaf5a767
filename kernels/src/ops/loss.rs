//! Log-probabilities and the policy loss.

use super::check::{Check, F32, I32, STORAGE};
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::Tensor;

/// Log-probabilities of target tokens: `log_softmax(x · weightᵀ / temperature)[target]`, walked in vocabulary tiles; the
/// full logits are never held. Logits are fp32 and never rounded.
pub struct LogProb<'a, B: Backend> {
    /// Hidden rows, F32 or BF16 `[T, H]`.
    pub x: &'a Tensor<B>,
    /// Language-model head, F32 or BF16 `[V, H]`.
    pub weight: &'a Tensor<B>,
    /// I32 `[T]`; a negative target is skipped.
    pub targets: &'a Tensor<B>,
    /// F32 `[1]`, finite and above 0.
    pub temperature: &'a Tensor<B>,
    /// Written; F32 `[T]`, at most 0; 0 where skipped.
    pub log_prob: &'a Tensor<B>,
    /// Written; F32 `[T]`, log of the sum of exponentials of the tempered logits; 0 where skipped.
    pub lse: &'a Tensor<B>,
    /// Written; F32 `[T]`, entropy of the tempered distribution in nats; 0 where skipped.
    pub entropy: &'a Tensor<B>,
}

/// Extents of the log-probability operations.
pub struct LogProbDims {
    /// Rows.
    pub tokens: usize,
    /// Vocabulary.
    pub vocab: usize,
    /// Channels.
    pub hidden: usize,
}

impl<B: Backend> LogProb<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<LogProbDims> {
        let mut check = Check::new("log_prob");
        let dims = head(
            &mut check,
            self.x,
            self.weight,
            self.targets,
            self.temperature,
        )?;
        for (name, tensor) in [
            ("log_prob", self.log_prob),
            ("lse", self.lse),
            ("entropy", self.entropy),
        ] {
            check.output(name, tensor, F32, &[Some(dims.tokens)])?;
            check.contiguous(name, tensor)?;
        }
        check.disjoint()?;
        Ok(dims)
    }
}

/// Gradient of [`LogProb`]: `d_logits = d_log_prob · (1[target] − softmax) / temperature`, rounded once to the dtype of `x`
/// as operand of both products. A skipped row is not read; its `dx` is 0.
pub struct LogProbBackward<'a, B: Backend> {
    /// Hidden rows of the forward pass.
    pub x: &'a Tensor<B>,
    /// Language-model head.
    pub weight: &'a Tensor<B>,
    /// I32 `[T]`.
    pub targets: &'a Tensor<B>,
    /// F32 `[1]`.
    pub temperature: &'a Tensor<B>,
    /// F32 `[T]` of the forward pass.
    pub lse: &'a Tensor<B>,
    /// F32 `[T]`.
    pub d_log_prob: &'a Tensor<B>,
    /// Written; F32 or BF16 `[T, H]`, one rounding.
    pub dx: &'a Tensor<B>,
    /// Read and written; F32 `[V, H]`.
    pub d_weight: &'a Tensor<B>,
}

impl<B: Backend> LogProbBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<LogProbDims> {
        let mut check = Check::new("log_prob_backward");
        let dims = head(
            &mut check,
            self.x,
            self.weight,
            self.targets,
            self.temperature,
        )?;
        for (name, tensor) in [("lse", self.lse), ("d_log_prob", self.d_log_prob)] {
            check.input(name, tensor, F32, &[Some(dims.tokens)])?;
            check.contiguous(name, tensor)?;
        }
        check.output(
            "dx",
            self.dx,
            STORAGE,
            &[Some(dims.tokens), Some(dims.hidden)],
        )?;
        check.output(
            "d_weight",
            self.d_weight,
            F32,
            &[Some(dims.vocab), Some(dims.hidden)],
        )?;
        check.rows("dx", self.dx)?;
        check.rows("d_weight", self.d_weight)?;
        check.disjoint()?;
        Ok(dims)
    }
}

fn head<'a, B: Backend>(
    check: &mut Check<'a, B>,
    x: &'a Tensor<B>,
    weight: &'a Tensor<B>,
    targets: &'a Tensor<B>,
    temperature: &'a Tensor<B>,
) -> Result<LogProbDims> {
    check.input("x", x, STORAGE, &[None, None])?;
    let (tokens, hidden) = (x.shape()[0], x.shape()[1]);
    check.input("weight", weight, STORAGE, &[None, Some(hidden)])?;
    check.input("targets", targets, I32, &[Some(tokens)])?;
    check.input("temperature", temperature, F32, &[Some(1)])?;
    check.rows("x", x)?;
    check.rows("weight", weight)?;
    check.contiguous("targets", targets)?;
    Ok(LogProbDims {
        tokens,
        vocab: weight.shape()[0],
        hidden,
    })
}

/// Clipped policy-gradient loss over tokens, and its gradient.
///
/// d = old − new, ρ = exp(clamp(−d, ±20)), L = max(−ρ·A, −clip(ρ, 1 − eps_low, 1 + eps_high)·A), loss = Σ weight·L. The
/// weight of a token carries its mask and every denominator, so a masked sample counts nowhere: a token of weight 0 is
/// not read. The clamp keeps an infinite ratio finite, with gradient 0 beyond it; a NaN reaches the loss and is seen.
pub struct GrpoLoss<'a, B: Backend> {
    /// F32 `[N]` from the pass that is differentiated.
    pub log_prob: &'a Tensor<B>,
    /// F32 `[N]` of the policy before the step.
    pub old_log_prob: &'a Tensor<B>,
    /// F32 `[N]`.
    pub advantage: &'a Tensor<B>,
    /// F32 `[N]`, 0 where masked.
    pub weight: &'a Tensor<B>,
    /// Written; F32 `[1]`.
    pub loss: &'a Tensor<B>,
    /// Written; F32 `[N]`, gradient of the loss.
    pub d_log_prob: &'a Tensor<B>,
    /// Written; F32 `[2]`: weighted sums of d (ppo_kl) and of the clip indicator (pg_clipfrac).
    pub stats: &'a Tensor<B>,
    /// 0.2.
    pub eps_low: f32,
    /// 0.28.
    pub eps_high: f32,
}

impl<B: Backend> GrpoLoss<'_, B> {
    /// Checks the operands; returns the number of tokens.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<usize> {
        let mut check = Check::new("grpo_loss");
        check.input("log_prob", self.log_prob, F32, &[None])?;
        let tokens = self.log_prob.shape()[0];
        let inputs = [
            ("log_prob", self.log_prob),
            ("old_log_prob", self.old_log_prob),
            ("advantage", self.advantage),
            ("weight", self.weight),
        ];
        for (name, tensor) in inputs {
            check.input(name, tensor, F32, &[Some(tokens)])?;
            check.contiguous(name, tensor)?;
        }
        check.output("loss", self.loss, F32, &[Some(1)])?;
        check.output("d_log_prob", self.d_log_prob, F32, &[Some(tokens)])?;
        check.output("stats", self.stats, F32, &[Some(2)])?;
        check.contiguous("d_log_prob", self.d_log_prob)?;
        check.contiguous("stats", self.stats)?;
        check.disjoint()?;
        Ok(tokens)
    }
}
