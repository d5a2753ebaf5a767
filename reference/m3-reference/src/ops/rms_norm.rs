//! Residual add, then gemma RMSNorm: r = resid + y, out = r / rms(r) · (1 + w).
//!
//! r is rounded first and the norm reads the *rounded* r; the scale 1 + w is never rounded by itself.

use crate::Rounding;
use crate::math::{dot, row, row_mut};

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Rows, one a token.
    pub rows: usize,
    /// Row length H.
    pub hidden: usize,
    /// Added to the mean square.
    pub eps: f64,
}

/// What the op reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes and constants.
    pub params: Params,
    /// Residual stream `[T, H]`.
    pub resid: &'a [f64],
    /// Branch output that joins the stream `[T, H]`; none at the first norm of the model.
    pub y: Option<&'a [f64]>,
    /// Zero-centred weight `[H]`.
    pub weight: &'a [f64],
}

/// What the op writes.
#[derive(Clone, Debug)]
pub struct Output {
    /// New residual stream `[T, H]`.
    pub r: Vec<f64>,
    /// Normed rows `[T, H]`.
    pub out: Vec<f64>,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T, H]`, the sum over the consumers of the norm.
    pub dout: &'a [f64],
    /// `[T, H]`, from the later residual stream; none at the last norm of the model.
    pub dr: Option<&'a [f64]>,
}

/// Gradients that leave.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T, H]`; the gradient of both `resid` and `y`.
    pub dresid: Vec<f64>,
    /// `[H]`, fp32
    pub dweight: Vec<f64>,
}

/// Two roundings: the new stream, and the normed row.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Params { rows, hidden, eps } = inputs.params;
    assert_eq!(inputs.resid.len(), rows * hidden, "resid is [rows, hidden]");
    let r = match inputs.y {
        Some(y) => {
            assert_eq!(y.len(), rows * hidden, "y is [rows, hidden]");
            inputs
                .resid
                .iter()
                .zip(y)
                .map(|(resid, y)| rounding.store(resid + y))
                .collect()
        }
        None => inputs.resid.to_vec(),
    };
    let mut out = vec![0.0; rows * hidden];
    for t in 0..rows {
        normalise(
            row(&r, t, hidden),
            inputs.weight,
            eps,
            row_mut(&mut out, t, hidden),
        );
    }
    Output {
        r,
        out: rounding.store_all(out),
    }
}

/// The gradient through the norm joins the stream's own and is rounded once with it.
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Params { rows, hidden, eps } = inputs.params;
    assert_eq!(grads.dout.len(), rows * hidden, "dout is [rows, hidden]");
    let mut dresid = match grads.dr {
        Some(dr) => dr.to_vec(),
        None => vec![0.0; rows * hidden],
    };
    assert_eq!(dresid.len(), rows * hidden, "dr is [rows, hidden]");
    let mut dweight = vec![0.0; hidden];
    for t in 0..rows {
        let (r, dout) = (row(&output.r, t, hidden), row(grads.dout, t, hidden));
        add_gradients(
            r,
            inputs.weight,
            eps,
            dout,
            row_mut(&mut dresid, t, hidden),
            &mut dweight,
        );
    }
    Gradients {
        dresid: rounding.store_all(dresid),
        dweight: rounding.fp32_all(dweight),
    }
}

/// out = x / rms(x) · (1 + w) of one row.
pub(crate) fn normalise(x: &[f64], weight: &[f64], eps: f64, out: &mut [f64]) {
    let inv_rms = inv_rms(x, eps);
    assert_eq!(weight.len(), x.len(), "one weight a column");
    for i in 0..x.len() {
        out[i] = x[i] * inv_rms * (1.0 + weight[i]);
    }
}

/// Adds one row's dx and its share of dweight. With x̂ = x/rms and ĝ = dout·(1+w): dx = (ĝ − x̂·mean(ĝ·x̂)) / rms.
pub(crate) fn add_gradients(
    x: &[f64],
    weight: &[f64],
    eps: f64,
    dout: &[f64],
    dx: &mut [f64],
    dweight: &mut [f64],
) {
    let inv_rms = inv_rms(x, eps);
    let x_hat: Vec<f64> = x.iter().map(|x| x * inv_rms).collect();
    let g_hat: Vec<f64> = dout
        .iter()
        .zip(weight)
        .map(|(dout, w)| dout * (1.0 + w))
        .collect();
    let mean = dot(&g_hat, &x_hat) / x.len() as f64;
    for i in 0..x.len() {
        dx[i] += inv_rms * (g_hat[i] - x_hat[i] * mean);
        dweight[i] += dout[i] * x_hat[i];
    }
}

fn inv_rms(x: &[f64], eps: f64) -> f64 {
    1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt()
}
