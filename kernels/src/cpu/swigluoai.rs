//! Clamped SwiGLU with the +1 offset.

use super::CpuBackend;
use super::access::Access;
use super::math::sigmoid;
use super::rows::{Rows, RowsMut, for_rows};
use super::simd::dispatch;
use crate::error::Result;
use crate::ops;

pub(super) fn swigluoai(_: &CpuBackend, args: &ops::Swigluoai<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.gate, args.up, args.out]);
    let (gate, up) = (Rows::new(&held, args.gate), Rows::new(&held, args.up));
    let out = RowsMut::new(&held, args.out);
    for_rows(dims.tokens, dims.width, |tokens| {
        let [mut gate_row, mut up_row, mut out_row] = [(); 3].map(|()| vec![0.0; dims.width]);
        for t in tokens {
            let (gate, up) = (gate.row([t], &mut gate_row), up.row([t], &mut up_row));
            forward(gate, up, args.alpha, args.limit, &mut out_row);
            // SAFETY: a row of the output belongs to one task.
            unsafe { out.store([t], &out_row) };
        }
    });
    Ok(())
}

pub(super) fn swigluoai_backward(
    _: &CpuBackend,
    args: &ops::SwigluoaiBackward<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.gate, args.up, args.d_out, args.d_gate, args.d_up]);
    let [gate, up, d_out] = [args.gate, args.up, args.d_out].map(|t| Rows::new(&held, t));
    let [d_gate, d_up] = [args.d_gate, args.d_up].map(|t| RowsMut::new(&held, t));
    for_rows(dims.tokens, dims.width, |tokens| {
        let mut read = [(); 3].map(|()| vec![0.0; dims.width]);
        let mut written = [(); 2].map(|()| vec![0.0; dims.width]);
        for t in tokens {
            let [gate_row, up_row, d_row] = &mut read;
            let (gate, up) = (gate.row([t], gate_row), up.row([t], up_row));
            let [d_gate_row, d_up_row] = &mut written;
            let d = d_out.row([t], d_row);
            backward(gate, up, d, args.alpha, args.limit, d_gate_row, d_up_row);
            // SAFETY: a row of either gradient belongs to one task.
            unsafe {
                d_gate.store([t], d_gate_row);
                d_up.store([t], d_up_row);
            }
        }
    });
    Ok(())
}

/// Unlike `f32::min` it keeps a NaN.
#[inline(always)]
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

#[inline(always)]
fn at_least(x: f32, limit: f32) -> f32 {
    if x < limit { limit } else { x }
}

dispatch! {
    fn forward(gate: &[f32], up: &[f32], alpha: f32, limit: f32, out: &mut [f32]) {
        for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            let gate = at_most(gate, limit);
            let up = at_least(at_most(up, limit), -limit);
            *out = (up + 1.0) * (gate * sigmoid(alpha * gate));
        }
    }

    fn backward(
        gate: &[f32],
        up: &[f32],
        d: &[f32],
        alpha: f32,
        limit: f32,
        d_gate: &mut [f32],
        d_up: &mut [f32],
    ) {
        let inputs = gate.iter().zip(up).zip(d);
        for ((d_gate, d_up), ((&g, &u), &d)) in d_gate.iter_mut().zip(d_up).zip(inputs) {
            let gate = at_most(g, limit);
            let up = at_least(at_most(u, limit), -limit);
            let (open, shut) = (sigmoid(alpha * gate), sigmoid(-alpha * gate));
            let slope = open * (alpha * gate).mul_add(shut, 1.0);
            // A clamp passes its gradient at equality.
            *d_gate = if g > limit { 0.0 } else { d * (up + 1.0) * slope };
            *d_up = if u > limit || u < -limit { 0.0 } else { d * (gate * open) };
        }
    }
}
