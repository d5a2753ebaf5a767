//! y = (u' + 1) · g' · sigmoid(alpha·g') with g' = min(g, limit) and u' = clamp(u, -limit, limit).
//!
//! The gate is limited from above only. A clamp passes the gradient at equality.

use crate::Rounding;
use crate::math::sigmoid;

/// Constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// 1.702
    pub alpha: f64,
    /// 7.0
    pub limit: f64,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Constants.
    pub params: Params,
    /// `[rows, F]`
    pub gate: &'a [f64],
    /// `[rows, F]`
    pub up: &'a [f64],
}

/// What the op writes.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[rows, F]`
    pub y: Vec<f64>,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[rows, F]`
    pub dy: &'a [f64],
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[rows, F]`
    pub dgate: Vec<f64>,
    /// `[rows, F]`
    pub dup: Vec<f64>,
}

/// One rounding.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params { alpha, limit } = inputs.params;
    assert_eq!(
        inputs.gate.len(),
        inputs.up.len(),
        "gate and up have one shape"
    );
    let y = inputs.gate.iter().zip(inputs.up).map(|(&gate, &up)| {
        let (g, u) = (at_most(gate, limit), clamp(up, limit));
        rounding.store((u + 1.0) * g * sigmoid(alpha * g))
    });
    Output { y: y.collect() }
}

/// One rounding each.
pub fn backward(inputs: &Inputs, _: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Params { alpha, limit } = inputs.params;
    assert_eq!(
        grads.dy.len(),
        inputs.gate.len(),
        "dy has the shape of gate"
    );
    let mut gradients = Gradients {
        dgate: Vec::new(),
        dup: Vec::new(),
    };
    for ((&gate, &up), &dy) in inputs.gate.iter().zip(inputs.up).zip(grads.dy) {
        let (g, u) = (at_most(gate, limit), clamp(up, limit));
        let s = sigmoid(alpha * g);
        let dg = dy * (u + 1.0) * s * (1.0 + alpha * g * (1.0 - s));
        let du = dy * g * s;
        gradients.dgate.push(if gate > limit {
            0.0
        } else {
            rounding.store(dg)
        });
        gradients.dup.push(if up > limit || up < -limit {
            0.0
        } else {
            rounding.store(du)
        });
    }
    gradients
}

/// Unlike `f64::min` it keeps a NaN.
fn at_most(x: f64, limit: f64) -> f64 {
    if x > limit { limit } else { x }
}

fn clamp(x: f64, limit: f64) -> f64 {
    if x < -limit {
        -limit
    } else {
        at_most(x, limit)
    }
}
