//! Mixture of experts: router, rows in expert order, one product per expert, weighted sum.
//!
//! Permute, product and combine are separate operations with buffers between, so that expert parallelism can exchange
//! rows there.

use super::check::{Check, F32, I32, STORAGE};
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::Tensor;

/// The k experts of every token: largest sigmoid(logit) + bias in fp32, lower id first on exact ties, ids ascending.
pub struct RouterSelect<'a, B: Backend> {
    /// F32 `[T, E]`.
    pub logits: &'a Tensor<B>,
    /// Score correction, F32 `[E]`; used for the selection alone.
    pub bias: &'a Tensor<B>,
    /// Written; I32 `[T, k]`.
    pub expert_ids: &'a Tensor<B>,
}

/// Extents of the router's operations.
pub struct RouterDims {
    /// Tokens.
    pub tokens: usize,
    /// Experts.
    pub experts: usize,
    /// Experts per token.
    pub topk: usize,
}

impl<B: Backend> RouterSelect<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<RouterDims> {
        let mut check = Check::new("router_select");
        check.input("logits", self.logits, F32, &[None, None])?;
        let (tokens, experts) = (self.logits.shape()[0], self.logits.shape()[1]);
        check.input("bias", self.bias, F32, &[Some(experts)])?;
        check.output("expert_ids", self.expert_ids, I32, &[Some(tokens), None])?;
        router(&check, self.logits, self.expert_ids, &[("bias", self.bias)])?;
        check.disjoint()?;
        Ok(RouterDims {
            tokens,
            experts,
            topk: self.expert_ids.shape()[1],
        })
    }
}

/// Weights of given experts: s_j / Σ s over the token's ids with s = sigmoid(logit); the bias does not enter.
pub struct RouterWeights<'a, B: Backend> {
    /// F32 `[T, E]`.
    pub logits: &'a Tensor<B>,
    /// I32 `[T, k]`, ascending.
    pub expert_ids: &'a Tensor<B>,
    /// Written; F32 `[T, k]`.
    pub weights: &'a Tensor<B>,
}

impl<B: Backend> RouterWeights<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<RouterDims> {
        let mut check = Check::new("router_weights");
        check.input("logits", self.logits, F32, &[None, None])?;
        let (tokens, experts) = (self.logits.shape()[0], self.logits.shape()[1]);
        check.input("expert_ids", self.expert_ids, I32, &[Some(tokens), None])?;
        let topk = self.expert_ids.shape()[1];
        check.output("weights", self.weights, F32, &[Some(tokens), Some(topk)])?;
        router(
            &check,
            self.logits,
            self.expert_ids,
            &[("weights", self.weights)],
        )?;
        check.disjoint()?;
        Ok(RouterDims {
            tokens,
            experts,
            topk,
        })
    }
}

/// Gradient of [`RouterWeights`]; 0 for experts that were not chosen.
pub struct RouterBackward<'a, B: Backend> {
    /// F32 `[T, E]` of the forward pass.
    pub logits: &'a Tensor<B>,
    /// I32 `[T, k]`, ascending.
    pub expert_ids: &'a Tensor<B>,
    /// F32 `[T, k]`.
    pub d_weights: &'a Tensor<B>,
    /// Written; F32 `[T, E]`.
    pub d_logits: &'a Tensor<B>,
}

impl<B: Backend> RouterBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<RouterDims> {
        let mut check = Check::new("router_backward");
        check.input("logits", self.logits, F32, &[None, None])?;
        let (tokens, experts) = (self.logits.shape()[0], self.logits.shape()[1]);
        check.input("expert_ids", self.expert_ids, I32, &[Some(tokens), None])?;
        let topk = self.expert_ids.shape()[1];
        check.input(
            "d_weights",
            self.d_weights,
            F32,
            &[Some(tokens), Some(topk)],
        )?;
        check.output(
            "d_logits",
            self.d_logits,
            F32,
            &[Some(tokens), Some(experts)],
        )?;
        let others = [("d_weights", self.d_weights), ("d_logits", self.d_logits)];
        router(&check, self.logits, self.expert_ids, &others)?;
        check.disjoint()?;
        Ok(RouterDims {
            tokens,
            experts,
            topk,
        })
    }
}

/// Rows of every expert: slot (t, j) goes to a row of expert `expert_ids[t][j]`, tokens ascending within an expert.
pub struct MoePlan<'a, B: Backend> {
    /// I32 `[T, k]`, ascending within a token.
    pub expert_ids: &'a Tensor<B>,
    /// Written; I32 `[E + 1]`, first row of every expert.
    pub expert_offsets: &'a Tensor<B>,
    /// Written; I32 `[T, k]`, row of every slot.
    pub row_of_slot: &'a Tensor<B>,
    /// Written; I32 `[T · k]`, token of every row.
    pub token_of_row: &'a Tensor<B>,
}

impl<B: Backend> MoePlan<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<RouterDims> {
        let mut check = Check::new("moe_plan");
        check.input("expert_ids", self.expert_ids, I32, &[None, None])?;
        let (tokens, topk) = (self.expert_ids.shape()[0], self.expert_ids.shape()[1]);
        check.output("expert_offsets", self.expert_offsets, I32, &[None])?;
        check.output(
            "row_of_slot",
            self.row_of_slot,
            I32,
            &[Some(tokens), Some(topk)],
        )?;
        check.output(
            "token_of_row",
            self.token_of_row,
            I32,
            &[Some(tokens * topk)],
        )?;
        check.argument(self.expert_offsets.elements() > 1, || {
            "there must be an expert".into()
        })?;
        for (name, tensor) in [
            ("expert_ids", self.expert_ids),
            ("expert_offsets", self.expert_offsets),
            ("row_of_slot", self.row_of_slot),
            ("token_of_row", self.token_of_row),
        ] {
            check.contiguous(name, tensor)?;
        }
        check.disjoint()?;
        Ok(RouterDims {
            tokens,
            experts: self.expert_offsets.elements() - 1,
            topk,
        })
    }
}

/// `out[r] = x[token_of_row[r]]`.
pub struct MoePermute<'a, B: Backend> {
    /// F32 or BF16 `[T, H]`.
    pub x: &'a Tensor<B>,
    /// I32 `[R]`.
    pub token_of_row: &'a Tensor<B>,
    /// Written; `[R, H]`.
    pub out: &'a Tensor<B>,
}

/// Extents of the operations that move rows.
pub struct MoeRowsDims {
    /// Tokens.
    pub tokens: usize,
    /// Rows in expert order.
    pub rows: usize,
    /// Experts per token; 0 where the operation does not know it.
    pub topk: usize,
    /// Channels.
    pub hidden: usize,
}

impl<B: Backend> MoePermute<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<MoeRowsDims> {
        let mut check = Check::new("moe_permute");
        check.input("x", self.x, STORAGE, &[None, None])?;
        let (tokens, hidden) = (self.x.shape()[0], self.x.shape()[1]);
        check.input("token_of_row", self.token_of_row, I32, &[None])?;
        let rows = self.token_of_row.shape()[0];
        check.output("out", self.out, STORAGE, &[Some(rows), Some(hidden)])?;
        check.same_dtype("out", self.out, self.x)?;
        check.rows("x", self.x)?;
        check.rows("out", self.out)?;
        check.contiguous("token_of_row", self.token_of_row)?;
        check.disjoint()?;
        Ok(MoeRowsDims {
            tokens,
            rows,
            topk: 0,
            hidden,
        })
    }
}

/// `dx[t] += Σ_j d_rows[row_of_slot[t][j]]` in fp32, ascending expert id.
pub struct MoePermuteBackward<'a, B: Backend> {
    /// F32 or BF16 `[R, H]`.
    pub d_rows: &'a Tensor<B>,
    /// I32 `[T, k]`.
    pub row_of_slot: &'a Tensor<B>,
    /// Read and written; F32 `[T, H]`.
    pub dx: &'a Tensor<B>,
}

impl<B: Backend> MoePermuteBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<MoeRowsDims> {
        let mut check = Check::new("moe_permute_backward");
        check.input("d_rows", self.d_rows, STORAGE, &[None, None])?;
        let (rows, hidden) = (self.d_rows.shape()[0], self.d_rows.shape()[1]);
        check.input("row_of_slot", self.row_of_slot, I32, &[None, None])?;
        let (tokens, topk) = (self.row_of_slot.shape()[0], self.row_of_slot.shape()[1]);
        check.output("dx", self.dx, F32, &[Some(tokens), Some(hidden)])?;
        check.rows("d_rows", self.d_rows)?;
        check.rows("dx", self.dx)?;
        check.contiguous("row_of_slot", self.row_of_slot)?;
        check.disjoint()?;
        Ok(MoeRowsDims {
            tokens,
            rows,
            topk,
            hidden,
        })
    }
}

/// `c[rows of e] = a[rows of e] · b[e]` for every expert; an expert's other rows do not matter to a row's bits. Rows
/// past the last expert's are set to zero.
pub struct GroupedGemm<'a, B: Backend> {
    /// F32 or BF16 `[R, K]`.
    pub a: &'a Tensor<B>,
    /// F32 or BF16 `[E, K, N]`, any strides: a transposed view of `[E, N, K]` for the forward product.
    pub b: &'a Tensor<B>,
    /// I32 `[E + 1]`.
    pub expert_offsets: &'a Tensor<B>,
    /// Written; F32 or BF16 `[R, N]`, one rounding.
    pub c: &'a Tensor<B>,
}

/// Extents of the grouped products.
pub struct GroupedGemmDims {
    /// Rows in expert order.
    pub rows: usize,
    /// Experts.
    pub experts: usize,
    /// Columns of the result.
    pub n: usize,
    /// Summed extent; for weight gradients the rows of the result.
    pub k: usize,
}

impl<B: Backend> GroupedGemm<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<GroupedGemmDims> {
        let mut check = Check::new("grouped_gemm");
        check.input("a", self.a, STORAGE, &[None, None])?;
        let (rows, k) = (self.a.shape()[0], self.a.shape()[1]);
        check.input("b", self.b, STORAGE, &[None, Some(k), None])?;
        let (experts, n) = (self.b.shape()[0], self.b.shape()[2]);
        check.input(
            "expert_offsets",
            self.expert_offsets,
            I32,
            &[Some(experts + 1)],
        )?;
        check.output("c", self.c, STORAGE, &[Some(rows), Some(n)])?;
        check.contiguous("expert_offsets", self.expert_offsets)?;
        check.disjoint()?;
        Ok(GroupedGemmDims {
            rows,
            experts,
            n,
            k,
        })
    }
}

/// `dw[e] += a[rows of e]ᵀ · b[rows of e]` in fp32, rows in order.
pub struct GroupedGemmWeights<'a, B: Backend> {
    /// F32 or BF16 `[R, M]`: gradient of the product's rows.
    pub a: &'a Tensor<B>,
    /// F32 or BF16 `[R, N]`: input of the product.
    pub b: &'a Tensor<B>,
    /// I32 `[E + 1]`.
    pub expert_offsets: &'a Tensor<B>,
    /// Read and written; F32 `[E, M, N]`.
    pub dw: &'a Tensor<B>,
}

impl<B: Backend> GroupedGemmWeights<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<GroupedGemmDims> {
        let mut check = Check::new("grouped_gemm_weights");
        check.input("a", self.a, STORAGE, &[None, None])?;
        let (rows, m) = (self.a.shape()[0], self.a.shape()[1]);
        check.input("b", self.b, STORAGE, &[Some(rows), None])?;
        let n = self.b.shape()[1];
        check.output("dw", self.dw, F32, &[None, Some(m), Some(n)])?;
        let experts = self.dw.shape()[0];
        check.input(
            "expert_offsets",
            self.expert_offsets,
            I32,
            &[Some(experts + 1)],
        )?;
        check.contiguous("expert_offsets", self.expert_offsets)?;
        check.disjoint()?;
        Ok(GroupedGemmDims {
            rows,
            experts,
            n,
            k: m,
        })
    }
}

/// `out[t] = round(Σ_j (scaling · weights[t][j]) · down[row_of_slot[t][j]] + shared[t])` in fp32, ascending expert id.
pub struct MoeCombine<'a, B: Backend> {
    /// Expert rows, F32 or BF16 `[R, H]`.
    pub down: &'a Tensor<B>,
    /// I32 `[T, k]`.
    pub row_of_slot: &'a Tensor<B>,
    /// F32 `[T, k]`, before the scaling.
    pub weights: &'a Tensor<B>,
    /// Shared expert, `[T, H]`.
    pub shared: Option<&'a Tensor<B>>,
    /// Written; `[T, H]`, one rounding.
    pub out: &'a Tensor<B>,
    /// 2.0.
    pub scaling: f32,
}

impl<B: Backend> MoeCombine<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<MoeRowsDims> {
        let mut check = Check::new("moe_combine");
        let dims = combined(&mut check, self.down, self.row_of_slot, self.weights)?;
        let shape = [Some(dims.tokens), Some(dims.hidden)];
        if let Some(shared) = self.shared {
            check.input("shared", shared, STORAGE, &shape)?;
            check.rows("shared", shared)?;
        }
        check.output("out", self.out, STORAGE, &shape)?;
        check.same_dtype("out", self.out, self.down)?;
        check.rows("out", self.out)?;
        check.disjoint()?;
        Ok(dims)
    }
}

/// Gradient of [`MoeCombine`]: `d_down[row] = round(scaling · w_j · dy[t])`,
/// `d_weights[t][j] = scaling · ⟨dy[t], down[row]⟩`.
/// No two slots may name one row; a row that none names gets zeros. The shared expert's gradient is `d_out` itself.
pub struct MoeCombineBackward<'a, B: Backend> {
    /// Gradient of the sum, `[T, H]`.
    pub d_out: &'a Tensor<B>,
    /// Expert rows of the forward pass, `[R, H]`.
    pub down: &'a Tensor<B>,
    /// I32 `[T, k]`.
    pub row_of_slot: &'a Tensor<B>,
    /// F32 `[T, k]`.
    pub weights: &'a Tensor<B>,
    /// Written; `[R, H]`.
    pub d_down: &'a Tensor<B>,
    /// Written; F32 `[T, k]`.
    pub d_weights: &'a Tensor<B>,
    /// 2.0.
    pub scaling: f32,
}

impl<B: Backend> MoeCombineBackward<'_, B> {
    /// Checks the operands.
    ///
    /// # Errors
    /// What does not fit.
    pub fn dims(&self) -> Result<MoeRowsDims> {
        let mut check = Check::new("moe_combine_backward");
        let dims = combined(&mut check, self.down, self.row_of_slot, self.weights)?;
        check.input(
            "d_out",
            self.d_out,
            STORAGE,
            &[Some(dims.tokens), Some(dims.hidden)],
        )?;
        check.output(
            "d_down",
            self.d_down,
            STORAGE,
            &[Some(dims.rows), Some(dims.hidden)],
        )?;
        check.output(
            "d_weights",
            self.d_weights,
            F32,
            &[Some(dims.tokens), Some(dims.topk)],
        )?;
        check.same_dtype("d_down", self.d_down, self.down)?;
        check.rows("d_out", self.d_out)?;
        check.rows("d_down", self.d_down)?;
        check.contiguous("d_weights", self.d_weights)?;
        check.disjoint()?;
        Ok(dims)
    }
}

fn combined<'a, B: Backend>(
    check: &mut Check<'a, B>,
    down: &'a Tensor<B>,
    row_of_slot: &'a Tensor<B>,
    weights: &'a Tensor<B>,
) -> Result<MoeRowsDims> {
    check.input("down", down, STORAGE, &[None, None])?;
    let (rows, hidden) = (down.shape()[0], down.shape()[1]);
    check.input("row_of_slot", row_of_slot, I32, &[None, None])?;
    let (tokens, topk) = (row_of_slot.shape()[0], row_of_slot.shape()[1]);
    check.input("weights", weights, F32, &[Some(tokens), Some(topk)])?;
    check.rows("down", down)?;
    check.contiguous("row_of_slot", row_of_slot)?;
    check.contiguous("weights", weights)?;
    Ok(MoeRowsDims {
        tokens,
        rows,
        topk,
        hidden,
    })
}

fn router<B: Backend>(
    check: &Check<'_, B>,
    logits: &Tensor<B>,
    expert_ids: &Tensor<B>,
    others: &[(&'static str, &Tensor<B>)],
) -> Result<()> {
    let (experts, topk) = (logits.shape()[1], expert_ids.shape()[1]);
    check.argument(topk <= experts, || {
        format!("topk {topk} is above the {experts} experts")
    })?;
    check.contiguous("logits", logits)?;
    check.contiguous("expert_ids", expert_ids)?;
    others
        .iter()
        .try_for_each(|&(name, tensor)| check.contiguous(name, tensor))
}
