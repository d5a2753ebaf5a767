//! The k best blocks of every query and index head.

use rayon::prelude::*;

use super::CpuBackend;
use super::access::Access;
use crate::error::{Error, Result};
use crate::ops;

/// Rows that a task selects, so that its buffer of keys is worth its allocation.
const TASK_ROWS: usize = 64;

pub(super) fn block_select(_: &CpuBackend, args: &ops::BlockSelect<'_, CpuBackend>) -> Result<()> {
    let dims = args.dims()?;
    let access = Access::lock(&[args.scores, args.positions, args.block_ids]);
    let scores = access.read::<f32>(args.scores);
    let positions = access.read::<i32>(args.positions).as_slice();
    let block_ids = access.write::<i32>(args.block_ids);
    check_positions(positions, args.block, dims.max_blocks)?;

    let rows = dims.index_heads * dims.tokens;
    let task = |first: usize| {
        let mut keys = Vec::new();
        for row in first..rows.min(first + TASK_ROWS) {
            let (head, token) = (row / dims.tokens, row % dims.tokens);
            // SAFETY: every row belongs to one task.
            let ids = unsafe { block_ids.row_mut([head, token]) };
            // A negative position sees no block.
            let visible = usize::try_from(positions[token]).map_or(0, |at| at / args.block + 1);
            let forced =
                |block: usize| block < args.init_blocks || block + args.local_blocks >= visible;
            select(
                &scores.row([head, token])[..visible],
                forced,
                &mut keys,
                ids,
            );
        }
    };
    (0..rows).into_par_iter().step_by(TASK_ROWS).for_each(task);
    Ok(())
}

fn check_positions(positions: &[i32], block: usize, max_blocks: usize) -> Result<()> {
    let upper = i64::try_from(max_blocks.saturating_mul(block)).unwrap_or(i64::MAX);
    match positions.iter().position(|&at| i64::from(at) >= upper) {
        None => Ok(()),
        Some(index) => Err(Error::Index {
            op: "block_select",
            tensor: "positions",
            index,
            value: positions[index].into(),
            lower: -1,
            upper,
        }),
    }
}

/// Writes the ids of the best of the visible blocks, ascending, with a −1 tail.
fn select(scores: &[f32], forced: impl Fn(usize) -> bool, keys: &mut Vec<u64>, ids: &mut [i32]) {
    let best = |(block, &score): (usize, &f32)| {
        let rank = if forced(block) { FORCED } else { rank(score) };
        // The lower id wins among equal ranks.
        u64::from(rank) << 32 | u64::from(!(block as u32))
    };
    keys.clear();
    keys.extend(scores.iter().enumerate().map(best));
    let count = ids.len().min(keys.len());
    if count < keys.len() && count > 0 {
        keys.select_nth_unstable_by(count - 1, |a, b| b.cmp(a));
    }
    for (id, &key) in ids.iter_mut().zip(&keys[..count]) {
        *id = !(key as u32) as i32;
    }
    ids[..count].sort_unstable();
    ids[count..].fill(-1);
}

/// Above the rank of every score.
const FORCED: u32 = u32::MAX;

/// A number that orders as the score does; NaN below everything, −0 equal to +0.
fn rank(score: f32) -> u32 {
    if score.is_nan() {
        return 0;
    }
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_order_as_scores_do_with_nan_last() {
        let ascending = [
            f32::NAN,
            f32::NEG_INFINITY,
            f32::MIN,
            -1.0,
            -f32::from_bits(1),
            0.0,
            f32::from_bits(1),
            1.0,
            f32::MAX,
            f32::INFINITY,
        ];
        assert!(ascending.map(rank).is_sorted_by(|a, b| a < b));
        assert_eq!(rank(-0.0), rank(0.0));
        assert_eq!(rank(-f32::NAN), rank(f32::NAN));
        assert!(rank(f32::INFINITY) < FORCED);
    }
}
