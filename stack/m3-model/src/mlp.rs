//! The dense MLP: gate and up in one fused weight, the clamped activation, down. Also the shared expert.

use m3_kernels::{Backend, Result, Tensor, ops};
use m3_spec::config::TextConfig;
use m3_spec::dtype::DType;

use crate::context::Context;
use crate::linear;
use crate::parameters::{Parameter, Sharding, Slice};

/// Weights of the MLP.
pub struct Mlp<B: Backend> {
    /// Rows `[gate; up]`, `[2F, H]`.
    pub gate_up: Parameter<B>,
    /// `[H, F]`.
    pub down: Parameter<B>,
    activation: Activation,
}

/// Constants of swigluoai.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Activation {
    alpha: f32,
    limit: f32,
}

impl Activation {
    pub(crate) fn new(config: &TextConfig) -> Self {
        Activation {
            alpha: config.swiglu_alpha as f32,
            limit: config.swiglu_limit as f32,
        }
    }

    /// `[rows, F]` from the fused halves `[rows, 2F]`.
    pub(crate) fn forward<B: Backend>(
        self,
        ctx: &Context<'_, B>,
        gate_up: &Tensor<B>,
        out: &Tensor<B>,
    ) -> Result<()> {
        let (gate, up) = halves(gate_up);
        let Activation { alpha, limit } = self;
        let args = ops::Swigluoai {
            gate: &gate,
            up: &up,
            out,
            alpha,
            limit,
        };
        ctx.backend.swigluoai(ctx.stream, &args)
    }

    /// Gradient of the fused halves.
    pub(crate) fn backward<B: Backend>(
        self,
        ctx: &Context<'_, B>,
        gate_up: &Tensor<B>,
        d_out: &Tensor<B>,
        d_gate_up: &Tensor<B>,
    ) -> Result<()> {
        let ((gate, up), (d_gate, d_up)) = (halves(gate_up), halves(d_gate_up));
        let Activation { alpha, limit } = self;
        let args = ops::SwigluoaiBackward {
            gate: &gate,
            up: &up,
            d_out,
            d_gate: &d_gate,
            d_up: &d_up,
            alpha,
            limit,
        };
        ctx.backend.swigluoai_backward(ctx.stream, &args)
    }
}

fn halves<B: Backend>(gate_up: &Tensor<B>) -> (Tensor<B>, Tensor<B>) {
    let width = gate_up.shape()[1] / 2;
    (
        gate_up.slice(1, 0..width),
        gate_up.slice(1, width..2 * width),
    )
}

/// What the gradient reads.
pub(crate) struct Saved<B: Backend> {
    gate_up: Tensor<B>,
    activated: Tensor<B>,
}

impl<B: Backend> Mlp<B> {
    /// Zero weights with `width` channels.
    pub(crate) fn zeros(
        backend: &B,
        config: &TextConfig,
        width: usize,
        dtype: DType,
        gradients: bool,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        let weight =
            |rows, columns| Parameter::zeros(backend, dtype, &[rows, columns], rows, gradients);
        Ok(Mlp {
            gate_up: weight(2 * width, hidden)?,
            down: weight(hidden, width)?,
            activation: Activation::new(config),
        })
    }

    /// Every released tensor of the MLP.
    pub(crate) fn slices(&self, prefix: &str, slices: &mut Vec<Slice<B>>) {
        let name = |tensor: &str| format!("{prefix}{tensor}.weight");
        let width = self.width();
        let half = |tensor: &str, rows| self.gate_up.rows(name(tensor), rows, Sharding::Rows, true);
        slices.push(half("gate_proj", 0..width));
        slices.push(half("up_proj", width..2 * width));
        slices.push(self.down.whole(name("down_proj"), Sharding::Columns, true));
    }

    /// y `[T, H]` from x `[T, H]`.
    pub(crate) fn forward(
        &self,
        ctx: &mut Context<'_, B>,
        x: &Tensor<B>,
        y: &Tensor<B>,
    ) -> Result<Saved<B>> {
        let tokens = x.shape()[0];
        let gate_up = ctx.activation([tokens, 2 * self.width()])?;
        let activated = ctx.activation([tokens, self.width()])?;
        linear::forward(ctx, x, &self.gate_up.value, &gate_up)?;
        self.activation.forward(ctx, &gate_up, &activated)?;
        linear::forward(ctx, &activated, &self.down.value, y)?;
        Ok(Saved { gate_up, activated })
    }

    /// dx `[T, H]` from dy; added in fp32 when `accumulate` is set.
    pub(crate) fn backward(
        &self,
        ctx: &mut Context<'_, B>,
        x: &Tensor<B>,
        saved: &Saved<B>,
        dy: &Tensor<B>,
        dx: &Tensor<B>,
        accumulate: bool,
    ) -> Result<()> {
        let tokens = x.shape()[0];
        let d_activated = ctx.activation([tokens, self.width()])?;
        let d_gate_up = ctx.activation([tokens, 2 * self.width()])?;
        linear::backward_input(ctx, dy, &self.down.value, &d_activated, false)?;
        linear::backward_weight(ctx, dy, &saved.activated, self.down.grad.as_ref())?;
        self.activation
            .backward(ctx, &saved.gate_up, &d_activated, &d_gate_up)?;
        linear::backward_weight(ctx, &d_gate_up, x, self.gate_up.grad.as_ref())?;
        linear::backward_input(ctx, &d_gate_up, &self.gate_up.value, dx, accumulate)
    }

    fn width(&self) -> usize {
        self.down.value.shape()[1]
    }
}
