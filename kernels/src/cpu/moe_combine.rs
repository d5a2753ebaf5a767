//! Weighted sum of the experts' rows of a token.

use super::CpuBackend;
use super::access::{Access, indices};
use super::rows::{Rows, RowsMut, add, axpy, for_rows, scale};
use super::simd::{dispatch, dot};
use crate::error::{Error, Result};
use crate::ops;

pub(super) fn moe_combine(_: &CpuBackend, args: &ops::MoeCombine<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let always = [args.down, args.row_of_slot, args.weights, args.out];
    let operands = always.into_iter().chain(args.shared);
    let held = Access::lock(&operands.collect::<Vec<_>>());
    let row_of_slot = held.read::<i32>(args.row_of_slot);
    let slots = row_of_slot.as_slice();
    indices("moe_combine", "row_of_slot", slots, dims.rows)?;
    let weights = held.read::<f32>(args.weights);
    let down = Rows::new(&held, args.down);
    let shared = args.shared.map(|shared| Rows::new(&held, shared));
    let out = RowsMut::new(&held, args.out);
    for_rows(dims.tokens, (dims.topk + 1) * dims.hidden, |tokens| {
        let [mut scratch, mut sum] = [(); 2].map(|()| vec![0.0; dims.hidden]);
        for t in tokens {
            sum.fill(0.0);
            // A token's slots are in ascending order of their experts.
            for (&row, &weight) in row_of_slot.row([t]).iter().zip(weights.row([t])) {
                let down = down.row([row as usize], &mut scratch);
                axpy(args.scaling * weight, down, &mut sum);
            }
            if let Some(shared) = &shared {
                add(shared.row([t], &mut scratch), &mut sum);
            }
            // SAFETY: a row of the output belongs to one task.
            unsafe { out.store([t], &sum) };
        }
    });
    Ok(())
}

pub(super) fn moe_combine_backward(
    _: &CpuBackend,
    args: &ops::MoeCombineBackward<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[
        args.d_out,
        args.down,
        args.row_of_slot,
        args.weights,
        args.d_down,
        args.d_weights,
    ]);
    let row_of_slot = held.read::<i32>(args.row_of_slot);
    let unnamed = unnamed_rows(row_of_slot.as_slice(), dims.rows)?;
    let weights = held.read::<f32>(args.weights);
    let (d_out, down) = (Rows::new(&held, args.d_out), Rows::new(&held, args.down));
    let d_down = RowsMut::new(&held, args.d_down);
    let d_weights = held.write::<f32>(args.d_weights);
    for_rows(dims.tokens, 2 * dims.topk * dims.hidden, |tokens| {
        let [mut d_row, mut down_row, mut scaled] = [(); 3].map(|()| vec![0.0; dims.hidden]);
        for t in tokens {
            let d = d_out.row([t], &mut d_row);
            for (slot, (&row, &weight)) in row_of_slot
                .row([t])
                .iter()
                .zip(weights.row([t]))
                .enumerate()
            {
                let row = row as usize;
                scale(args.scaling * weight, d, &mut scaled);
                let product = inner_product(d, down.row([row], &mut down_row));
                // SAFETY: no two slots name one row, and a token's slots belong to one task.
                unsafe {
                    d_down.store([row], &scaled);
                    d_weights.set([t, slot], args.scaling * product);
                }
            }
        }
    });
    let zeros = vec![0.0; dims.hidden];
    for row in unnamed {
        // SAFETY: no task runs any more.
        unsafe { d_down.store([row], &zeros) };
    }
    Ok(())
}

/// Rows that no slot names.
fn unnamed_rows(row_of_slot: &[i32], rows: usize) -> Result<Vec<usize>> {
    let op = "moe_combine_backward";
    indices(op, "row_of_slot", row_of_slot, rows)?;
    let mut named = vec![false; rows];
    for (slot, &row) in row_of_slot.iter().enumerate() {
        if std::mem::replace(&mut named[row as usize], true) {
            let what = format!("row_of_slot[{slot}] = {row} is the row of another slot as well");
            return Err(Error::Argument { op, what });
        }
    }
    Ok((0..rows).filter(|&row| !named[row]).collect())
}

dispatch! {
    fn inner_product(x: &[f32], y: &[f32]) -> f32 {
        dot(x, y)
    }
}
