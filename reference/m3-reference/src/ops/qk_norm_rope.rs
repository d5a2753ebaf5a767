//! Gemma RMSNorm of each head, then rotary embedding of its first `rotary_dim` dims; for q, k, index q and index k.
//!
//! The rotation is the half-split one *inside the rotary slice*: dims i and i + rotary_dim/2 turn together, the dims
//! from `rotary_dim` on pass through. Norm and rotation share one rounding.

use super::rms_norm;
use crate::Rounding;
use crate::math::{index, row, row_mut};

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// T
    pub tokens: usize,
    /// Heads of x.
    pub heads: usize,
    /// D
    pub head_dim: usize,
    /// Dims that rotate, even, at most D.
    pub rotary_dim: usize,
    /// Added to the mean square.
    pub eps: f64,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes and constants.
    pub params: Params,
    /// `[T, heads, D]`
    pub x: &'a [f64],
    /// Zero-centred weight, one for all heads `[D]`.
    pub weight: &'a [f64],
    /// (cos, sin) pairs `[positions, rotary_dim / 2, 2]`, the pinned fp32 table.
    pub cos_sin: &'a [f32],
    /// Position of each token in its own sequence `[T]`.
    pub positions: &'a [i32],
}

/// What the op writes.
#[derive(Clone, Debug)]
pub struct Output {
    /// `[T, heads, D]`
    pub y: Vec<f64>,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T, heads, D]`
    pub dy: &'a [f64],
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T, heads, D]`
    pub dx: Vec<f64>,
    /// `[D]`, fp32
    pub dweight: Vec<f64>,
}

/// Norm and rotation, one rounding.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params {
        tokens,
        heads,
        head_dim,
        eps,
        ..
    } = inputs.params;
    check(inputs);
    let mut y = vec![0.0; tokens * heads * head_dim];
    for t in 0..tokens {
        for i in t * heads..(t + 1) * heads {
            let y = row_mut(&mut y, i, head_dim);
            rms_norm::normalise(row(inputs.x, i, head_dim), inputs.weight, eps, y);
            rotate(inputs, t, 1.0, y);
        }
    }
    Output {
        y: rounding.store_all(y),
    }
}

/// The rotation turned back, then the norm's gradient; the weight's is summed over tokens and heads.
pub fn backward(inputs: &Inputs, _: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Params {
        tokens,
        heads,
        head_dim,
        eps,
        ..
    } = inputs.params;
    check(inputs);
    assert_eq!(grads.dy.len(), inputs.x.len(), "dy has the shape of x");
    let mut dx = vec![0.0; tokens * heads * head_dim];
    let mut dweight = vec![0.0; head_dim];
    for t in 0..tokens {
        for i in t * heads..(t + 1) * heads {
            let mut dnormed = row(grads.dy, i, head_dim).to_vec();
            rotate(inputs, t, -1.0, &mut dnormed);
            let (x, dx) = (row(inputs.x, i, head_dim), row_mut(&mut dx, i, head_dim));
            rms_norm::add_gradients(x, inputs.weight, eps, &dnormed, dx, &mut dweight);
        }
    }
    Gradients {
        dx: rounding.store_all(dx),
        dweight: rounding.fp32_all(dweight),
    }
}

/// Turns one head by its token's angles (`direction` 1) or back (-1).
fn rotate(inputs: &Inputs, token: usize, direction: f64, head: &mut [f64]) {
    let half = inputs.params.rotary_dim / 2;
    let position = index(inputs.positions[token]);
    let angles = &inputs.cos_sin[position * 2 * half..(position + 1) * 2 * half];
    for i in 0..half {
        let (cos, sin) = (
            f64::from(angles[2 * i]),
            direction * f64::from(angles[2 * i + 1]),
        );
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * cos - b * sin;
        head[i + half] = b * cos + a * sin;
    }
}

fn check(inputs: &Inputs) {
    let Params {
        tokens,
        heads,
        head_dim,
        rotary_dim,
        ..
    } = inputs.params;
    assert_eq!(
        inputs.x.len(),
        tokens * heads * head_dim,
        "x is [tokens, heads, head_dim]"
    );
    assert_eq!(inputs.positions.len(), tokens, "one position a token");
    assert!(
        rotary_dim <= head_dim && rotary_dim.is_multiple_of(2),
        "rotary_dim {rotary_dim}"
    );
}
