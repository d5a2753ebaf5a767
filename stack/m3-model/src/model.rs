//! The model: embedding, layers, final norm, head. Weights, their slices, and how they are loaded.

use m3_checkpoint::Checkpoint;
use m3_comm::Communicator;
use m3_kernels::tensor::as_bytes;
use m3_kernels::{Backend, Tensor, ops};
use m3_spec::config::TextConfig;
use m3_spec::dtype::DType;

use crate::error::{Error, Result};
use crate::layer::Layer;
use crate::parameters::{Parameter, Sharding, Slice};

/// Prefix of every text tensor of a release.
const PREFIX: &str = "language_model.";

/// The text decoder on a device.
pub struct Model<B: Backend, C> {
    /// What it is.
    pub config: TextConfig,
    /// Storage dtype of weights and activations; router and bias are F32 in either.
    pub dtype: DType,
    /// `[V, H]`.
    pub embedding: Parameter<B>,
    /// Decoder layers.
    pub layers: Vec<Layer<B>>,
    /// `[H]`.
    pub norm: Parameter<B>,
    /// `[V, H]`.
    pub head: Parameter<B>,
    /// The ranks that share the model.
    pub comm: C,
}

impl<B: Backend, C: Communicator<B>> Model<B, C> {
    /// A model with zero weights, with fp32 gradient buffers when `gradients` is set.
    ///
    /// # Errors
    /// [`Error::Input`] for a storage dtype other than F32 and BF16 or for more than one rank; what the device reports.
    pub fn zeros(
        backend: &B,
        comm: C,
        config: &TextConfig,
        dtype: DType,
        gradients: bool,
    ) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::BF16) {
            return Err(Error::Input(format!(
                "weights are stored as F32 or BF16, not {dtype:?}"
            )));
        }
        if comm.size() != 1 {
            let ranks = comm.size();
            return Err(Error::Input(format!(
                "the model runs on 1 rank, not on {ranks}"
            )));
        }
        ops::heads_fit(config.num_q_heads, config.num_kv_heads, config.head_dim)
            .map_err(|what| Error::Input(format!("config.json: {what}")))?;
        let [vocab, hidden] = [config.vocab_size, config.hidden_size];
        let table = || Parameter::zeros(backend, dtype, &[vocab, hidden], vocab, gradients);
        let layer = |number| Layer::zeros(backend, config, number, dtype, gradients);
        Ok(Model {
            config: config.clone(),
            dtype,
            embedding: table()?,
            layers: (0..config.num_layers())
                .map(layer)
                .collect::<m3_kernels::Result<_>>()?,
            norm: Parameter::zeros(backend, dtype, &[hidden], hidden, gradients)?,
            head: table()?,
            comm,
        })
    }

    /// Every released text tensor, in the order of the layers.
    pub fn slices(&self) -> Vec<Slice<B>> {
        let mut slices = Vec::new();
        let whole = |parameter: &Parameter<B>, name: &str, sharding| {
            parameter.whole(format!("{PREFIX}{name}.weight"), sharding, true)
        };
        slices.push(whole(&self.embedding, "model.embed_tokens", Sharding::Rows));
        for (number, layer) in self.layers.iter().enumerate() {
            layer.slices(&format!("{PREFIX}model.layers.{number}."), &mut slices);
        }
        slices.push(whole(&self.norm, "model.norm", Sharding::Replicated));
        slices.push(whole(&self.head, "lm_head", Sharding::Rows));
        slices
    }

    /// Copies a checkpoint's tensors into the slices, one at a time; a narrower dtype is rounded to once.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a tensor that is missing or does not fit; what the device reports.
    pub fn load(&self, backend: &B, stream: &B::Stream, checkpoint: &Checkpoint) -> Result<()> {
        for slice in self.slices() {
            let source = checkpoint.tensor(&slice.name)?;
            if slice.value.dtype() == DType::BF16 {
                let mut values = vec![half::bf16::ZERO; source.elements()];
                source.read_bf16(&mut values)?;
                backend.upload(stream, &slice.value, as_bytes(&values))?;
            } else {
                let mut values = vec![0.0f32; source.elements()];
                source.read_f32(&mut values)?;
                backend.upload(stream, &slice.value, as_bytes(&values))?;
            }
        }
        Ok(())
    }

    /// Sets every gradient to zero.
    ///
    /// # Errors
    /// What the device reports.
    pub fn zero_gradients(&self, backend: &B, stream: &B::Stream) -> Result<()> {
        for grad in self.slices().iter().filter_map(|slice| slice.grad.as_ref()) {
            backend.fill(
                stream,
                &ops::Fill {
                    target: grad,
                    value: 0.0,
                },
            )?;
        }
        Ok(())
    }

    /// Logits F32 `[rows, V]` of hidden rows behind the final norm, before any temperature.
    ///
    /// # Errors
    /// What the device reports.
    pub fn logits(
        &self,
        backend: &B,
        stream: &B::Stream,
        hidden: &Tensor<B>,
        logits: &Tensor<B>,
    ) -> Result<()> {
        let b = &self.head.value.transpose(0, 1);
        let args = ops::Gemm {
            a: hidden,
            b,
            c: logits,
            accumulate: false,
        };
        Ok(backend.gemm(stream, &args)?)
    }
}
