//! Random checkpoints of any config: fixtures of tests, and the start of training from nothing.

use crate::error::Result;
use crate::writer::{Writer, plan};
use m3_spec::config::Config;
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};
use m3_spec::philox::Stream;
use m3_spec::round::to_dtype;
use m3_spec::tensors::{Role, TensorSpec, tensors};
use std::path::Path;

/// How a random checkpoint is drawn and stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// Run seed; an element depends on it, the released name and the element's index alone.
    pub seed: u64,
    /// Standard deviation of matrices and of the router's weight, mean 0.
    pub std: f64,
    /// Standard deviation of the zero-centred norm weights; 0 leaves every scale at 1.
    pub norm_std: f64,
    /// Standard deviation of the router's bias; 0 lets the scores alone choose the experts.
    pub router_bias_std: f64,
    /// Dtype of matrices and norms, F32 or BF16.
    pub storage: DType,
    /// Whether F32 storage holds values already rounded to BF16, so that both storages hold equal weights.
    pub bf16_values: bool,
    /// Largest shard, in bytes of tensors.
    pub shard_bytes_max: u64,
}

impl Synthetic {
    /// BF16 weights of this standard deviation, norms and router bias 0, in one file.
    pub fn new(seed: u64, std: f64) -> Self {
        Synthetic {
            seed,
            std,
            norm_std: 0.0,
            router_bias_std: 0.0,
            storage: DType::BF16,
            bf16_values: true,
            shard_bytes_max: u64::MAX,
        }
    }

    fn std_of(&self, role: Role) -> f64 {
        match role {
            Role::RouterBias => self.router_bias_std,
            Role::InputNorm
            | Role::PostAttentionNorm
            | Role::FinalNorm
            | Role::QNorm
            | Role::KNorm
            | Role::IndexQNorm
            | Role::IndexKNorm => self.norm_std,
            _ => self.std,
        }
    }
}

/// Writes the text model of `config` with random weights to `dir`. Vision is not made, so the written config is text-only.
///
/// # Errors
/// As [`Writer::create`] and [`Writer::finish`].
pub fn synthetic(dir: impl AsRef<Path>, config: &Config, options: &Synthetic) -> Result<()> {
    let config_json = Config::text_only(config.text.clone()).to_released_json();
    let config_json = format!("{config_json:#}\n");
    let mut writer = Writer::create(
        dir,
        &config_json,
        &plan(&config.text, options.storage),
        options.shard_bytes_max,
    )?;
    let inputs = Inputs::on_stream(options.seed, Stream::Init, "");
    for tensor in &tensors(&config.text) {
        writer.write_f32(&tensor.name, values(&inputs, tensor, options))?;
    }
    writer.finish()
}

fn values<'a>(
    inputs: &'a Inputs,
    tensor: &'a TensorSpec,
    options: &Synthetic,
) -> impl Iterator<Item = f32> + 'a {
    let distribution = Distribution::Normal {
        std: options.std_of(tensor.role),
    };
    let dtype = match tensor.dtype {
        DType::F32 => DType::F32,
        _ if options.bf16_values => DType::BF16,
        _ => options.storage,
    };
    let elements = tensor.elements();
    (0..elements as u64).map(move |index| {
        // + 0.0 turns the -0 of a standard deviation of 0 into 0. Rounded from f64 once; the conversion to f32 is exact.
        to_dtype(
            inputs.element(&tensor.name, distribution, index) + 0.0,
            dtype,
        ) as f32
    })
}
