//! Selections, last logits and small gradients as safetensors.

use m3_comm::Communicator;
use m3_kernels::tensor::as_bytes;
use m3_kernels::{Backend, Tensor};
use m3_model::Model;
use m3_model::layer::Saved;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::error::{Error, Result};

/// Gradients of larger tensors are left out, but for embedding and head.
const GRADIENT_BYTES_MAX: usize = 1 << 20;

/// Tensors in the making.
pub(super) struct Dump {
    tensors: Vec<Entry>,
    sequences: usize,
}

struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Dump {
    pub(super) fn new(lengths: &[usize]) -> Self {
        let ends = crate::lab::cu_seqlens(lengths);
        let mut dump = Dump {
            tensors: Vec::new(),
            sequences: lengths.len(),
        };
        dump.push(
            "cu_seqlens".into(),
            Dtype::I32,
            vec![ends.len()],
            as_bytes(&ends),
        );
        dump
    }

    /// Blocks, experts and expert weights of a layer that has them.
    pub(super) fn layer<B: Backend>(
        &mut self,
        backend: &B,
        stream: &B::Stream,
        layer: usize,
        saved: &Saved<B>,
    ) -> m3_model::Result<()> {
        if let Some(block_ids) = saved.block_ids() {
            let values = block_ids.to_vec::<i32>(backend, stream)?;
            self.put(
                format!("blocks.{layer}"),
                Dtype::I32,
                block_ids,
                as_bytes(&values),
            );
        }
        if let Some((expert_ids, weights)) = saved.experts() {
            let values = expert_ids.to_vec::<i32>(backend, stream)?;
            self.put(
                format!("experts.{layer}"),
                Dtype::I32,
                expert_ids,
                as_bytes(&values),
            );
            let values = weights.to_vec::<f32>(backend, stream)?;
            self.put(
                format!("expert_weights.{layer}"),
                Dtype::F32,
                weights,
                as_bytes(&values),
            );
        }
        Ok(())
    }

    /// Logits of every sequence's last token, `[sequences, vocab]`, or `[vocab]` of a single one.
    pub(super) fn last_logits(&mut self, logits: Vec<f32>, vocab: usize) {
        let shape = if self.sequences == 1 {
            vec![vocab]
        } else {
            vec![self.sequences, vocab]
        };
        self.push("logits.last".into(), Dtype::F32, shape, as_bytes(&logits));
    }

    /// Gradients of embedding, head and every small tensor.
    pub(super) fn gradients<B: Backend, C: Communicator<B>>(
        &mut self,
        model: &Model<B, C>,
        backend: &B,
        stream: &B::Stream,
    ) -> Result<()> {
        for slice in model.slices() {
            let Some(grad) = &slice.grad else { continue };
            let table = slice.name.ends_with("embed_tokens.weight")
                || slice.name.ends_with("lm_head.weight");
            if table || grad.elements() * size_of::<f32>() < GRADIENT_BYTES_MAX {
                let values = grad.to_vec::<f32>(backend, stream)?;
                self.put(
                    format!("grad.{}", slice.name),
                    Dtype::F32,
                    grad,
                    as_bytes(&values),
                );
            }
        }
        Ok(())
    }

    /// The file.
    pub(super) fn bytes(&self) -> Result<Vec<u8>> {
        let refused = |error| Error::Input(format!("the dump cannot be laid out: {error}"));
        let views: std::result::Result<Vec<_>, _> = self
            .tensors
            .iter()
            .map(|entry| {
                let view = TensorView::new(entry.dtype, entry.shape.clone(), &entry.bytes)?;
                Ok((entry.name.as_str(), view))
            })
            .collect();
        safetensors::serialize(views.map_err(refused)?, None).map_err(refused)
    }

    fn put<B: Backend>(&mut self, name: String, dtype: Dtype, tensor: &Tensor<B>, bytes: &[u8]) {
        self.push(name, dtype, tensor.shape().to_vec(), bytes);
    }

    fn push(&mut self, name: String, dtype: Dtype, shape: Vec<usize>, bytes: &[u8]) {
        self.tensors.push(Entry {
            name,
            dtype,
            shape,
            bytes: bytes.to_vec(),
        });
    }
}
