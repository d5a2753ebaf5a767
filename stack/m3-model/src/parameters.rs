//! Parameters and their slices: storage may be fused, every released tensor stays addressable in it.

use m3_kernels::{Backend, Result, Tensor};
use m3_spec::dtype::DType;

/// How a released tensor is cut over the ranks of tensor or expert parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// Whole on every rank.
    Replicated,
    /// Along axis 0: heads, FFN channels or vocabulary.
    Rows,
    /// Along axis 1: the summed extent of a product.
    Columns,
    /// Whole experts.
    Expert,
}

/// A tensor of weights in the layout that the operations use, with its fp32 gradient.
#[derive(Debug)]
pub struct Parameter<B: Backend> {
    /// Weights.
    pub value: Tensor<B>,
    /// Gradient of the leading rows that are trained; absent in an engine that only runs forward.
    pub grad: Option<Tensor<B>>,
}

impl<B: Backend> Parameter<B> {
    /// Zero weights `[rows, ..]`, of which the first `trained_rows` get a gradient when `gradients` is set.
    pub(crate) fn zeros(
        backend: &B,
        dtype: DType,
        shape: &[usize],
        trained_rows: usize,
        gradients: bool,
    ) -> Result<Self> {
        let value = zeros(backend, dtype, shape)?;
        let mut trained = shape.to_vec();
        trained[0] = trained_rows;
        let wanted = gradients && trained_rows > 0;
        let grad = if wanted {
            Some(zeros(backend, DType::F32, &trained)?)
        } else {
            None
        };
        Ok(Parameter { value, grad })
    }

    /// The slice of a released tensor that is the whole parameter.
    pub(crate) fn whole(&self, name: String, sharding: Sharding, trained: bool) -> Slice<B> {
        Slice {
            name,
            value: self.value.clone(),
            grad: self.grad.clone(),
            sharding,
            trained,
        }
    }

    /// The slice of a released tensor that is a range of rows.
    pub(crate) fn rows(
        &self,
        name: String,
        rows: std::ops::Range<usize>,
        sharding: Sharding,
        trained: bool,
    ) -> Slice<B> {
        let grad = self
            .grad
            .as_ref()
            .filter(|_| trained)
            .map(|grad| grad.slice(0, rows.clone()));
        Slice {
            name,
            value: self.value.slice(0, rows),
            grad,
            sharding,
            trained,
        }
    }
}

fn zeros<B: Backend>(backend: &B, dtype: DType, shape: &[usize]) -> Result<Tensor<B>> {
    match *shape {
        [n] => Tensor::zeros(backend, dtype, [n]),
        [n, k] => Tensor::zeros(backend, dtype, [n, k]),
        [e, n, k] => Tensor::zeros(backend, dtype, [e, n, k]),
        _ => unreachable!("parameters have rank 1 to 3"),
    }
}

/// A released tensor inside the storage.
pub struct Slice<B: Backend> {
    /// Released name.
    pub name: String,
    /// Its elements; contiguous, in the released order.
    pub value: Tensor<B>,
    /// Its fp32 gradient.
    pub grad: Option<Tensor<B>>,
    /// How it is cut over ranks.
    pub sharding: Sharding,
    /// Whether an optimizer may change it.
    pub trained: bool,
}
