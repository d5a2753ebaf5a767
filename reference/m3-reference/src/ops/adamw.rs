//! AdamW with decoupled weight decay on fp32 master weights, and the gradient clip before it.

use crate::Rounding;
use crate::math::dot;

/// Constants and the state of the step.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// 0.9
    pub beta1: f64,
    /// 0.98
    pub beta2: f64,
    /// 1e-8, added after the square root
    pub eps: f64,
    /// Decoupled: lr · weight_decay · w leaves w.
    pub weight_decay: f64,
    /// Number of this step, from 1.
    pub step: i32,
    /// Factor of every gradient, from [`clip_coefficient`].
    pub grad_scale: f64,
}

/// What the op reads, all fp32 and of one length.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Constants and the state of the step.
    pub params: Params,
    /// Master weights.
    pub w: &'a [f64],
    /// Gradient, unscaled.
    pub dw: &'a [f64],
    /// First moment.
    pub m: &'a [f64],
    /// Second moment.
    pub v: &'a [f64],
}

/// What the op writes.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// Master weights, fp32.
    pub w: Vec<f64>,
    /// First moment, fp32.
    pub m: Vec<f64>,
    /// Second moment, fp32.
    pub v: Vec<f64>,
    /// The weights that the model reads, in its storage type.
    pub stored: Vec<f64>,
}

/// One step. m' = b1·m + (1−b1)·g, v' = b2·v + (1−b2)·g², both corrected for their start at zero.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params {
        learning_rate,
        beta1,
        beta2,
        eps,
        weight_decay,
        step,
        grad_scale,
    } = inputs.params;
    let Inputs { w, dw, m, v, .. } = *inputs;
    assert!(
        [dw, m, v].iter().all(|x| x.len() == w.len()),
        "w, dw, m and v have one length"
    );
    assert!(step >= 1, "steps count from 1");
    let (correction1, correction2) = (1.0 - beta1.powi(step), 1.0 - beta2.powi(step));
    let mut output = Output::default();
    for i in 0..w.len() {
        let g = grad_scale * dw[i];
        let m = rounding.fp32(beta1 * m[i] + (1.0 - beta1) * g);
        let v = rounding.fp32(beta2 * v[i] + (1.0 - beta2) * g * g);
        let update = m / correction1 / ((v / correction2).sqrt() + eps);
        let w = rounding.fp32(w[i] - learning_rate * (weight_decay * w[i] + update));
        output.w.push(w);
        output.m.push(m);
        output.v.push(v);
        output.stored.push(rounding.store(w));
    }
    output
}

/// L2 norm of all gradients together.
pub fn grad_norm<'a>(gradients: impl IntoIterator<Item = &'a [f64]>) -> f64 {
    gradients.into_iter().map(|g| dot(g, g)).sum::<f64>().sqrt()
}

/// min(1, max_norm / (norm + 1e-6)). A NaN norm stays NaN.
pub fn clip_coefficient(norm: f64, max_norm: f64) -> f64 {
    let coefficient = max_norm / (norm + 1e-6);
    if coefficient > 1.0 { 1.0 } else { coefficient }
}
