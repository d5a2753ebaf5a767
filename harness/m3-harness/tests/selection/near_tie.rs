//! Proof that a row which differs from the reference's differs by rounding alone.

use crate::shape::{BLOCK, BLOCKS, Pack, TOKENS};

/// Error granted to an f32 score: 16 roundings of 2^-24 of the sum of |q k| at the key that gave the score. Sums of
/// 128 products by any order stay three times below it.
const ROUNDINGS: f64 = 16.0 / (1 << 24) as f64;

/// Why a row that differs is wrong.
#[derive(Debug, PartialEq)]
pub enum NotNear {
    /// Ids that are no ids, repeat, or lack the own block.
    Malformed,
    /// A block that was left out although its score lies clearly above the cut, or was taken clearly below it.
    Block {
        /// The block.
        block: usize,
        /// Its score less the worst selected one of the reference.
        gap: f64,
        /// What rounding explains.
        granted: f64,
    },
}

/// Shows that `got` takes every block whose f64 score lies above the cut by more than rounding and none that lies
/// below it by more. `scores` is `[Hi, T, blocks]`.
pub fn prove(
    pack: &Pack,
    scores: &[f64],
    row: usize,
    got: &[i32],
    reference: &[i32],
) -> Result<(), NotNear> {
    let token = row % TOKENS;
    let own = token / BLOCK;
    let scores = &scores[row * BLOCKS..][..=own];
    let visible = |id: &i32| (0..=own as i32).contains(id);
    let well_formed = got.is_sorted_by(|a, b| a < b)
        && got.len() == reference.len()
        && got.iter().all(visible)
        && got.last() == Some(&(own as i32));
    if !well_formed {
        return Err(NotNear::Malformed);
    }
    let others = reference.iter().filter(|&&id| id != own as i32);
    let cut_block = others
        .map(|&id| id as usize)
        .min_by(|&a, &b| scores[a].total_cmp(&scores[b]))
        .expect("more than the own block");
    let cut_error = score_error(pack, row, cut_block);
    for block in 0..own {
        let gap = scores[block] - scores[cut_block];
        let granted = cut_error.max(score_error(pack, row, block)) * 2.0;
        let taken = got.contains(&(block as i32));
        let right = if taken {
            gap >= -granted
        } else {
            gap <= granted
        };
        if !right {
            return Err(NotNear::Block {
                block,
                gap,
                granted,
            });
        }
    }
    Ok(())
}

/// Error granted to the f32 score of a block before the query's own.
fn score_error(pack: &Pack, row: usize, block: usize) -> f64 {
    let query = pack.query(row);
    let product = |token: usize| {
        let products = || query.iter().zip(pack.key(token)).map(|(q, k)| q * k);
        (
            products().sum::<f64>(),
            products().map(f64::abs).sum::<f64>(),
        )
    };
    let keys = block * BLOCK..(block + 1) * BLOCK;
    let best = keys
        .map(product)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .expect("a block has keys");
    ROUNDINGS * best.1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::{HEADS, TOPK};
    use m3_spec::dtype::DType;

    /// A row whose scores fall from block to block, but for two that lie `gap` apart at the cut.
    fn row(gap: f64) -> Result<(), NotNear> {
        let pack = Pack {
            dtype: DType::F32,
            index_q: vec![1.0; TOKENS * HEADS * 128],
            index_k: vec![1.0; TOKENS * 128],
        };
        let token = TOKENS - 1;
        let mut scores = vec![0.0; HEADS * TOKENS * BLOCKS];
        let row_scores = &mut scores[token * BLOCKS..][..BLOCKS];
        for (block, score) in row_scores.iter_mut().enumerate() {
            *score = 100.0 - block as f64;
        }
        row_scores[TOPK - 1] = row_scores[TOPK - 2] - gap;
        let own = BLOCKS as i32 - 1;
        let reference: Vec<i32> = (0..TOPK as i32 - 1).chain([own]).collect();
        let mut got = reference.clone();
        got[TOPK - 2] += 1;
        prove(&pack, &scores, token, &got, &reference)
    }

    #[test]
    fn an_exchange_within_rounding_is_proven_and_one_beyond_it_is_not() {
        // 2 x 16 x 2^-24 x 128 = 2.4e-4.
        assert_eq!(row(2e-4), Ok(()));
        assert!(matches!(row(3e-4), Err(NotNear::Block { .. })));
        assert!(matches!(row(f64::NAN), Err(NotNear::Block { .. })));
    }
}
