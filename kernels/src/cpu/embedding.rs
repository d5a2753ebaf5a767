//! Rows of the embedding table and their gradient.

use super::CpuBackend;
use super::access::{Access, indices, with_storage};
use super::rows::{Rows, add, for_rows};
use crate::error::Result;
use crate::ops;

/// Channels of a task of the backward pass: sixteen cache lines.
const COLS_PER_TASK: usize = 256;

pub(super) fn embedding(_: &CpuBackend, args: &ops::Embedding<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.ids, args.table, args.out]);
    let ids = held.read::<i32>(args.ids).as_slice();
    indices("embedding", "ids", ids, dims.vocab)?;
    with_storage!(args.table.dtype(), T => {
        let (table, out) = (held.read::<T>(args.table), held.write::<T>(args.out));
        for_rows(dims.tokens, dims.hidden, |tokens| {
            for t in tokens {
                // SAFETY: a row of the output belongs to one task.
                unsafe { out.row_mut([t]) }.copy_from_slice(table.row([ids[t] as usize]));
            }
        });
    });
    Ok(())
}

/// Tokens meet in the rows of the table, so tasks divide the channels.
pub(super) fn embedding_backward(
    _: &CpuBackend,
    args: &ops::EmbeddingBackward<'_, CpuBackend>,
) -> Result<()> {
    let dims = args.dims()?;
    let held = Access::lock(&[args.ids, args.d_out, args.d_table]);
    let ids = held.read::<i32>(args.ids).as_slice();
    indices("embedding_backward", "ids", ids, dims.vocab)?;
    let slices = dims.hidden.div_ceil(COLS_PER_TASK);
    for_rows(slices, dims.tokens * COLS_PER_TASK, |slices| {
        for slice in slices {
            let first = slice * COLS_PER_TASK;
            let cols = first..(first + COLS_PER_TASK).min(dims.hidden);
            let mut scratch = vec![0.0; cols.len()];
            let d_out = args.d_out.slice(1, cols.clone());
            let d_out = Rows::new(&held, &d_out);
            let d_table = held.write::<f32>(&args.d_table.slice(1, cols));
            for (t, &id) in ids.iter().enumerate() {
                // SAFETY: these channels of the table belong to one task.
                let row = unsafe { d_table.row_mut([id as usize]) };
                add(d_out.row([t], &mut scratch), row);
            }
        }
    });
    Ok(())
}
