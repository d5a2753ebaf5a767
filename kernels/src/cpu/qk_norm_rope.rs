//! Per-head norm and partial rotary embedding.

use super::CpuBackend;
use super::access::{Access, indices};
use super::rms_norm::{gain, normalise, normalise_backward};
use super::rows::{Rows, RowsMut, add, for_rows, sum_over_rows};
use super::simd::dispatch;
use crate::error::Result;
use crate::ops;
use crate::tensor::Tensor;

pub(super) fn qk_norm_rope(_: &CpuBackend, args: &ops::QkNormRope<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[
        args.x,
        args.weight,
        args.cos_sin,
        args.positions,
        args.out,
        args.rstd,
    ]);
    let table = Table::new("qk_norm_rope", &held, args.cos_sin, args.positions, &dims)?;
    let gain = gain(&held, args.weight);
    let (x, out) = (Rows::new(&held, args.x), RowsMut::new(&held, args.out));
    let rstd = held.write::<f32>(args.rstd);
    for_rows(dims.tokens, dims.heads * dims.head_dim, |tokens| {
        let [mut scratch, mut normed] = [(); 2].map(|()| vec![0.0; dims.head_dim]);
        for (t, head) in heads_of(tokens, dims.heads) {
            let x = x.row([t, head], &mut scratch);
            let root = normalise(x, &gain, args.eps, &mut normed);
            rotate(&mut normed, table.of_token(t), 1.0);
            // SAFETY: the heads of a token belong to one task.
            unsafe {
                rstd.set([t, head], root);
                out.store([t, head], &normed);
            }
        }
    });
    Ok(())
}

pub(super) fn qk_norm_rope_backward(
    _: &CpuBackend,
    args: &ops::QkNormRopeBackward<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[
        args.x,
        args.weight,
        args.cos_sin,
        args.positions,
        args.rstd,
        args.d_out,
        args.dx,
        args.d_weight,
    ]);
    let op = "qk_norm_rope_backward";
    let table = Table::new(op, &held, args.cos_sin, args.positions, &dims)?;
    let gain = gain(&held, args.weight);
    let [x, d_out] = [args.x, args.d_out].map(|tensor| Rows::new(&held, tensor));
    let (rstd, dx) = (held.read::<f32>(args.rstd), RowsMut::new(&held, args.dx));
    let d_weight = sum_over_rows(dims.tokens, dims.head_dim, |tokens, d_weight| {
        let [mut scratch, mut d, mut dx_row] = [(); 3].map(|()| vec![0.0; dims.head_dim]);
        for (t, head) in heads_of(tokens, dims.heads) {
            d.copy_from_slice(d_out.row([t, head], &mut scratch));
            rotate(&mut d, table.of_token(t), -1.0);
            let x = x.row([t, head], &mut scratch);
            normalise_backward(x, &gain, rstd.at([t, head]), &d, &mut dx_row, d_weight);
            // SAFETY: the heads of a token belong to one task.
            unsafe { dx.store([t, head], &dx_row) };
        }
    });
    // SAFETY: no task runs any more.
    add(&d_weight, unsafe {
        held.write::<f32>(args.d_weight).row_mut([])
    });
    Ok(())
}

fn heads_of(tokens: std::ops::Range<usize>, heads: usize) -> impl Iterator<Item = (usize, usize)> {
    tokens.flat_map(move |t| (0..heads).map(move |head| (t, head)))
}

/// The rotary table and where every token stands in it.
struct Table<'a> {
    cos_sin: &'a [f32],
    positions: &'a [i32],
    row: usize,
}

impl<'a> Table<'a> {
    fn new(
        op: &'static str,
        held: &'a Access<'_>,
        cos_sin: &Tensor<CpuBackend>,
        positions: &Tensor<CpuBackend>,
        dims: &ops::QkNormRopeDims,
    ) -> Result<Self> {
        let positions = held.read::<i32>(positions).as_slice();
        indices(op, "positions", positions, dims.positions)?;
        Ok(Table {
            cos_sin: held.read::<f32>(cos_sin).as_slice(),
            positions,
            row: dims.rotary_dim,
        })
    }

    /// (cos, sin) of every pair at a token's position.
    fn of_token(&self, t: usize) -> &'a [f32] {
        &self.cos_sin[self.positions[t] as usize * self.row..][..self.row]
    }
}

dispatch! {
    /// Rotates the pairs (i, i + R/2) of the first R channels; `direction` -1 rotates back.
    fn rotate(x: &mut [f32], cos_sin: &[f32], direction: f32) {
        let (low, rest) = x.split_at_mut(cos_sin.len() / 2);
        let (pairs, _) = cos_sin.as_chunks::<2>();
        for ((low, high), &[cos, sin]) in low.iter_mut().zip(rest).zip(pairs) {
            let (a, b, sin) = (*low, *high, direction * sin);
            *low = a * cos - b * sin;
            *high = b * cos + a * sin;
        }
    }
}
