//! Copies, sums and the activation.

use super::check::{Check, F32, I32, STORAGE, U64};
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::Tensor;
use m3_spec::dtype::DType;

const ANY: (&[DType], &str) = (
    &[
        DType::F32,
        DType::BF16,
        DType::I32,
        DType::U32,
        DType::U64,
        DType::U8,
    ],
    "any dtype",
);

/// Strided copy. F32 and BF16 convert into each other (one rounding to nearest even); other dtypes stay as they are.
pub struct Copy<'a, B: Backend> {
    /// Read; any strides.
    pub source: &'a Tensor<B>,
    /// Written; the same shape.
    pub target: &'a Tensor<B>,
}

impl<B: Backend> Copy<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<()> {
        let mut check = Check::new("copy");
        let shape: Vec<_> = self.source.shape().iter().map(|&n| Some(n)).collect();
        check.input("source", self.source, ANY, &shape)?;
        check.output("target", self.target, ANY, &shape)?;
        let storage = |t: &Tensor<B>| STORAGE.0.contains(&t.dtype());
        if !(storage(self.source) && storage(self.target)) {
            check.same_dtype("target", self.target, self.source)?;
        }
        check.disjoint()
    }
}

/// Every element of `target` set to `value`.
pub struct Fill<'a, B: Backend> {
    /// Written; F32 or BF16, any strides.
    pub target: &'a Tensor<B>,
    /// Value, rounded to the target's dtype.
    pub value: f32,
}

impl<B: Backend> Fill<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<()> {
        let shape = vec![None; self.target.shape().len()];
        Check::new("fill").output("target", self.target, STORAGE, &shape)
    }
}

/// `target += source`, in fp32.
pub struct Accumulate<'a, B: Backend> {
    /// Read; F32 or BF16, any strides.
    pub source: &'a Tensor<B>,
    /// Read and written; F32, the same shape.
    pub target: &'a Tensor<B>,
}

impl<B: Backend> Accumulate<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<()> {
        let mut check = Check::new("accumulate");
        let shape: Vec<_> = self.source.shape().iter().map(|&n| Some(n)).collect();
        check.input("source", self.source, STORAGE, &shape)?;
        check.output("target", self.target, F32, &shape)?;
        check.disjoint()
    }
}

/// Digest of a tensor's bits, keyed by position ([`m3_spec::digest`]), added to `sums`.
pub struct Digest<'a, B: Backend> {
    /// Read; F32, BF16 or I32, row-major order of its view.
    pub source: &'a Tensor<B>,
    /// Position of the first element in the released tensor.
    pub start: u64,
    /// Read and written; U64 `[2]`, one sum per seed.
    pub sums: &'a Tensor<B>,
}

impl<B: Backend> Digest<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<()> {
        let mut check = Check::new("digest");
        let shape = vec![None; self.source.shape().len()];
        let words = (
            &[DType::F32, DType::BF16, DType::I32][..],
            "F32, BF16 or I32",
        );
        check.input("source", self.source, words, &shape)?;
        check.output("sums", self.sums, U64, &[Some(2)])?;
        check.disjoint()
    }
}

/// Rows of the embedding table: `out[t] = table[ids[t]]`.
pub struct Embedding<'a, B: Backend> {
    /// Token ids, I32 `[T]`.
    pub ids: &'a Tensor<B>,
    /// Table, F32 or BF16 `[V, H]`.
    pub table: &'a Tensor<B>,
    /// Written; `[T, H]` of the table's dtype.
    pub out: &'a Tensor<B>,
}

/// Extents of [`Embedding`] and [`EmbeddingBackward`].
pub struct EmbeddingDims {
    /// Tokens.
    pub tokens: usize,
    /// Rows of the table.
    pub vocab: usize,
    /// Channels.
    pub hidden: usize,
}

impl<B: Backend> Embedding<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<EmbeddingDims> {
        let mut check = Check::new("embedding");
        check.input("table", self.table, STORAGE, &[None, None])?;
        check.input("ids", self.ids, I32, &[None])?;
        let (tokens, vocab, hidden) = (
            self.ids.shape()[0],
            self.table.shape()[0],
            self.table.shape()[1],
        );
        check.output("out", self.out, STORAGE, &[Some(tokens), Some(hidden)])?;
        check.same_dtype("out", self.out, self.table)?;
        check.rows("table", self.table)?;
        check.rows("out", self.out)?;
        check.contiguous("ids", self.ids)?;
        check.disjoint()?;
        Ok(EmbeddingDims {
            tokens,
            vocab,
            hidden,
        })
    }
}

/// `d_table[ids[t]] += d_out[t]`, tokens in order.
pub struct EmbeddingBackward<'a, B: Backend> {
    /// Token ids, I32 `[T]`.
    pub ids: &'a Tensor<B>,
    /// Gradient of the rows, F32 or BF16 `[T, H]`.
    pub d_out: &'a Tensor<B>,
    /// Read and written; F32 `[V, H]`.
    pub d_table: &'a Tensor<B>,
}

impl<B: Backend> EmbeddingBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<EmbeddingDims> {
        let mut check = Check::new("embedding_backward");
        check.input("d_out", self.d_out, STORAGE, &[None, None])?;
        let (tokens, hidden) = (self.d_out.shape()[0], self.d_out.shape()[1]);
        check.input("ids", self.ids, I32, &[Some(tokens)])?;
        check.output("d_table", self.d_table, F32, &[None, Some(hidden)])?;
        check.rows("d_out", self.d_out)?;
        check.rows("d_table", self.d_table)?;
        check.contiguous("ids", self.ids)?;
        check.disjoint()?;
        Ok(EmbeddingDims {
            tokens,
            vocab: self.d_table.shape()[0],
            hidden,
        })
    }
}

/// Clamped SwiGLU: g' = min(g, limit), u' = clamp(u, ±limit), out = (u' + 1) · g' · sigmoid(alpha · g'); fp32 inside,
/// one rounding (swigluoai).
pub struct Swigluoai<'a, B: Backend> {
    /// Gate half, F32 or BF16 `[T, F]`; may be a slice of a fused row.
    pub gate: &'a Tensor<B>,
    /// Up half, like the gate.
    pub up: &'a Tensor<B>,
    /// Written; `[T, F]`.
    pub out: &'a Tensor<B>,
    /// 1.702.
    pub alpha: f32,
    /// 7.0.
    pub limit: f32,
}

/// Extents of [`Swigluoai`] and its gradient.
pub struct SwigluoaiDims {
    /// Rows.
    pub tokens: usize,
    /// Channels of each half.
    pub width: usize,
}

impl<B: Backend> Swigluoai<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<SwigluoaiDims> {
        let mut check = Check::new("swigluoai");
        let (tokens, width) = two(self.gate);
        let shape = [Some(tokens), Some(width)];
        for (name, tensor) in [("gate", self.gate), ("up", self.up)] {
            check.input(name, tensor, STORAGE, &shape)?;
            check.same_dtype(name, tensor, self.gate)?;
            check.rows(name, tensor)?;
        }
        check.output("out", self.out, STORAGE, &shape)?;
        check.same_dtype("out", self.out, self.gate)?;
        check.rows("out", self.out)?;
        check.disjoint()?;
        Ok(SwigluoaiDims { tokens, width })
    }
}

/// Gradient of [`Swigluoai`]; a clamp passes its gradient at equality.
pub struct SwigluoaiBackward<'a, B: Backend> {
    /// Gate half of the forward pass, `[T, F]`.
    pub gate: &'a Tensor<B>,
    /// Up half of the forward pass.
    pub up: &'a Tensor<B>,
    /// Gradient of the output, `[T, F]`.
    pub d_out: &'a Tensor<B>,
    /// Written; gradient of the gate, may be a slice of a fused row.
    pub d_gate: &'a Tensor<B>,
    /// Written; gradient of the up half.
    pub d_up: &'a Tensor<B>,
    /// 1.702.
    pub alpha: f32,
    /// 7.0.
    pub limit: f32,
}

impl<B: Backend> SwigluoaiBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<SwigluoaiDims> {
        let mut check = Check::new("swigluoai_backward");
        let (tokens, width) = two(self.gate);
        let shape = [Some(tokens), Some(width)];
        for (name, tensor) in [("gate", self.gate), ("up", self.up), ("d_out", self.d_out)] {
            check.input(name, tensor, STORAGE, &shape)?;
            check.same_dtype(name, tensor, self.gate)?;
            check.rows(name, tensor)?;
        }
        for (name, tensor) in [("d_gate", self.d_gate), ("d_up", self.d_up)] {
            check.output(name, tensor, STORAGE, &shape)?;
            check.same_dtype(name, tensor, self.gate)?;
            check.rows(name, tensor)?;
        }
        check.disjoint()?;
        Ok(SwigluoaiDims { tokens, width })
    }
}

/// The two extents of a matrix; a wrong rank is found by the shape check that follows.
fn two<B: Backend>(t: &Tensor<B>) -> (usize, usize) {
    let shape = t.shape();
    (
        shape.first().copied().unwrap_or(0),
        shape.get(1).copied().unwrap_or(0),
    )
}
