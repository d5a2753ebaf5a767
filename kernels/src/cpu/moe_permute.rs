//! Rows in expert order.

use super::CpuBackend;
use super::access::{Access, indices, with_storage};
use super::router::ascending_ids;
use super::rows::{Rows, add, for_rows};
use crate::error::{Error, Result};
use crate::ops;

/// A counting sort: tokens stay ascending within an expert.
pub(super) fn moe_plan(_: &CpuBackend, args: &ops::MoePlan<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    if i32::try_from(dims.tokens * dims.topk).is_err() {
        return Err(Error::Argument {
            op: "moe_plan",
            what: format!(
                "{} tokens of {} experts each have more rows than an I32 counts",
                dims.tokens, dims.topk
            ),
        });
    }
    let outputs = [args.expert_offsets, args.row_of_slot, args.token_of_row];
    let held = Access::lock(&[args.expert_ids, outputs[0], outputs[1], outputs[2]]);
    let ids = held.read::<i32>(args.expert_ids).as_slice();
    ascending_ids("moe_plan", ids, &dims)?;
    let mut next = vec![0; dims.experts + 1];
    for &id in ids {
        next[id as usize + 1] += 1;
    }
    for expert in 0..dims.experts {
        next[expert + 1] += next[expert];
    }
    // SAFETY: the only slices of these views.
    let [expert_offsets, row_of_slot, token_of_row] =
        outputs.map(|tensor| unsafe { held.write::<i32>(tensor).as_mut_slice() });
    expert_offsets.copy_from_slice(&next);
    for (slot, &id) in ids.iter().enumerate() {
        let row = &mut next[id as usize];
        row_of_slot[slot] = *row;
        token_of_row[*row as usize] = (slot / dims.topk) as i32;
        *row += 1;
    }
    Ok(())
}

pub(super) fn moe_permute(_: &CpuBackend, args: &ops::MoePermute<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.x, args.token_of_row, args.out]);
    let tokens = held.read::<i32>(args.token_of_row).as_slice();
    indices("moe_permute", "token_of_row", tokens, dims.tokens)?;
    with_storage!(args.x.dtype(), T => {
        let (x, out) = (held.read::<T>(args.x), held.write::<T>(args.out));
        for_rows(dims.rows, dims.hidden, |rows| {
            for row in rows {
                // SAFETY: a row of the output belongs to one task.
                unsafe { out.row_mut([row]) }.copy_from_slice(x.row([tokens[row] as usize]));
            }
        });
    });
    Ok(())
}

pub(super) fn moe_permute_backward(
    _: &CpuBackend,
    args: &ops::MoePermuteBackward<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.d_rows, args.row_of_slot, args.dx]);
    let row_of_slot = held.read::<i32>(args.row_of_slot);
    let slots = row_of_slot.as_slice();
    indices("moe_permute_backward", "row_of_slot", slots, dims.rows)?;
    let (d_rows, dx) = (Rows::new(&held, args.d_rows), held.write::<f32>(args.dx));
    for_rows(dims.tokens, dims.topk * dims.hidden, |tokens| {
        let [mut scratch, mut sum] = [(); 2].map(|()| vec![0.0; dims.hidden]);
        for t in tokens {
            sum.fill(0.0);
            // A token's slots are in ascending order of their experts.
            for &row in row_of_slot.row([t]) {
                add(d_rows.row([row as usize], &mut scratch), &mut sum);
            }
            // SAFETY: a row of the gradient belongs to one task.
            add(&sum, unsafe { dx.row_mut([t]) });
        }
    });
    Ok(())
}
