//! The sampler.

use super::check::{Check, F32, I32};
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::Tensor;

/// One token per row: argmax of logit / temperature + Gumbel(u) over the ids that top-k, then top-p keep; lower id on
/// ties. u comes from Philox4x32-10 with the counter (prompt, sample, position, id / 4).
///
/// The reported log-probability is that of the whole tempered distribution, as [`super::LogProb`] computes it.
pub struct Sample<'a, B: Backend> {
    /// F32 `[R, V]`, before the temperature.
    pub logits: &'a Tensor<B>,
    /// F32 `[1]`, above 0.
    pub temperature: &'a Tensor<B>,
    /// I32 `[1]`: ids kept by logit; 0 keeps all.
    pub top_k: &'a Tensor<B>,
    /// F32 `[1]`: probability mass kept of what top-k left; 1 keeps all.
    pub top_p: &'a Tensor<B>,
    /// I32 `[R, 3]`: running number of the prompt, sample, position of the token that is drawn.
    pub counters: &'a Tensor<B>,
    /// Written; I32 `[R]`.
    pub tokens: &'a Tensor<B>,
    /// Written; F32 `[R]`.
    pub log_prob: &'a Tensor<B>,
    /// Seed of the run.
    pub seed: u64,
}

/// Extents of [`Sample`].
pub struct SampleDims {
    /// Rows.
    pub rows: usize,
    /// Vocabulary.
    pub vocab: usize,
}

impl<B: Backend> Sample<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<SampleDims> {
        let mut check = Check::new("sample");
        check.input("logits", self.logits, F32, &[None, None])?;
        let (rows, vocab) = (self.logits.shape()[0], self.logits.shape()[1]);
        check.input("temperature", self.temperature, F32, &[Some(1)])?;
        check.input("top_k", self.top_k, I32, &[Some(1)])?;
        check.input("top_p", self.top_p, F32, &[Some(1)])?;
        check.input("counters", self.counters, I32, &[Some(rows), Some(3)])?;
        check.output("tokens", self.tokens, I32, &[Some(rows)])?;
        check.output("log_prob", self.log_prob, F32, &[Some(rows)])?;
        check.argument(vocab > 0, || "the vocabulary must not be empty".into())?;
        check.rows("logits", self.logits)?;
        for (name, tensor) in [
            ("counters", self.counters),
            ("tokens", self.tokens),
            ("log_prob", self.log_prob),
        ] {
            check.contiguous(name, tensor)?;
        }
        check.disjoint()?;
        Ok(SampleDims { rows, vocab })
    }
}
