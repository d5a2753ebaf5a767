//! Which (query, key) pairs attention looks at: each of the reference's once, and no other.
//!
//! With q = 0 every visible key has the same weight, 1 / count. So where v holds 4^digit at one channel of its own for
//! every eight tokens, o x count spells out in base 4 how often each key was counted; dv does the same for queries.

use m3_kernels::cpu::CpuBackend;
use m3_reference::ops::tile_map;
use proptest::prelude::*;

use crate::pack::{Choice, Pack, holds, packs};
use crate::walk::{Operands, Results, Walk};

/// Base-4 digits of a channel: their sum stays below 2^16, so that f32 rounding stays far below one.
const DIGITS: usize = 8;
const HEAD_DIM: usize = 256;
/// Tokens that the channels have digits for, less the most padding.
const TOKENS: usize = DIGITS * HEAD_DIM - 70;

/// Channel and value of a token.
fn digit(token: usize) -> (usize, f32) {
    (token / DIGITS, 4_f32.powi((token % DIGITS) as i32))
}

/// The pairs, by the reference: keys of `[Hkv, T]`.
fn keys(pack: &Pack, block_ids: &[i32]) -> Vec<Vec<usize>> {
    let cu_seqlens = pack.cu_seqlens();
    let inputs = tile_map::Inputs {
        params: tile_map::Params {
            tokens: pack.tokens(),
            index_heads: pack.kv_heads,
            block: pack.block,
            topk: pack.topk,
        },
        block_ids,
        cu_seqlens: &cu_seqlens,
    };
    let rows =
        (0..pack.kv_heads).flat_map(|head| (0..pack.tokens()).map(move |token| (head, token)));
    rows.map(|(head, token)| tile_map::keys_of(&inputs, head, token))
        .collect()
}

/// Operands whose results spell out the pairs; of a group, only the first head has a gradient.
fn spelling(pack: &Pack, keys: &[Vec<usize>]) -> Operands {
    let (tokens, group) = (pack.tokens(), pack.group);
    let mut operands = Operands {
        q: vec![0.0; tokens * pack.q_heads() * HEAD_DIM],
        k: pack.normal("k", pack.kv_heads * HEAD_DIM),
        v: vec![0.0; tokens * pack.kv_heads * HEAD_DIM],
        d_o: vec![0.0; tokens * pack.q_heads() * HEAD_DIM],
        block_ids: pack.selection(),
    };
    for token in 0..tokens {
        let (channel, value) = digit(token);
        for head in 0..pack.kv_heads {
            let count = keys[head * tokens + token].len() as f32;
            operands.v[(token * pack.kv_heads + head) * HEAD_DIM + channel] = value;
            operands.d_o[(token * pack.q_heads() + head * group) * HEAD_DIM + channel] =
                count * value;
        }
    }
    operands
}

/// Fails unless every channel of `got` x `factor` spells out the tokens.
fn spells(what: &str, got: &[f32], factor: f32, tokens: &[usize]) -> Result<(), TestCaseError> {
    let mut expected = [0.0; HEAD_DIM];
    for (channel, value) in tokens.iter().map(|&token| digit(token)) {
        expected[channel] += value;
    }
    for (channel, (got, expected)) in got.iter().zip(expected).enumerate() {
        // Half of the smallest digit; a NaN is no small difference.
        let near = (got * factor - expected).abs() < 0.5;
        prop_assert!(
            near,
            "{}: tokens from {}: {} against {}",
            what,
            channel * DIGITS,
            got * factor,
            expected
        );
    }
    Ok(())
}

fn results(backend: &CpuBackend, pack: &Pack, keys: &[Vec<usize>]) -> Results {
    let operands = spelling(pack, keys);
    let walk = Walk::new(backend, pack, &operands.block_ids);
    walk.attention(&operands, 1.0).unwrap()
}

/// Packs whose heads have room for the digits.
fn spelled(most: usize) -> impl Strategy<Value = Pack> {
    packs(most, TOKENS).prop_map(|pack| Pack {
        head_dim: HEAD_DIM,
        group: pack.group.min(2),
        head_splits: pack.head_splits.min(pack.group.min(2)),
        ..pack
    })
}

#[test]
fn every_pair_of_the_selection_is_seen_once_in_both_passes() {
    let backend = CpuBackend::default();
    holds(file!(), [12, 600], &spelled(40), |pack| {
        let keys = keys(&pack, &pack.selection());
        let results = results(&backend, &pack, &keys);
        let (tokens, q_heads) = (pack.tokens(), pack.q_heads());
        let mut queries = vec![Vec::new(); pack.kv_heads * tokens];
        for head in 0..q_heads {
            let kv_head = head / pack.group;
            for token in 0..tokens {
                let seen = &keys[kv_head * tokens + token];
                let what = format!("o of token {token}, head {head}");
                let o = &results.o[(token * q_heads + head) * HEAD_DIM..][..HEAD_DIM];
                spells(&what, o, seen.len() as f32, seen)?;
                let lse = results.lse[token * q_heads + head];
                let expected = (seen.len() as f64).ln() as f32;
                prop_assert!(
                    lse == expected || (lse - expected).abs() < 4e-6,
                    "{}: lse {} for {} keys",
                    what,
                    lse,
                    seen.len()
                );
                if head % pack.group == 0 {
                    seen.iter()
                        .for_each(|key| queries[kv_head * tokens + key].push(token));
                }
            }
        }
        for kv_head in 0..pack.kv_heads {
            for token in 0..tokens {
                let seen_by = &queries[kv_head * tokens + token];
                let dv = &results.dv[(token * pack.kv_heads + kv_head) * HEAD_DIM..][..HEAD_DIM];
                spells(
                    &format!("dv of token {token}, kv head {kv_head}"),
                    dv,
                    1.0,
                    seen_by,
                )?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_query_with_all_its_blocks_sees_itself_and_what_lies_before_it() {
    let backend = CpuBackend::default();
    // Of these documents 65 blocks of 4 are all, and dense attention with the same tiles gives the same bits.
    holds(file!(), [40, 1500], &packs(8, 257), |pack| {
        let pack = Pack {
            topk: 257_usize.div_ceil(pack.block),
            choice: Choice::First,
            ..pack
        };
        let zero_q = Operands {
            q: vec![0.0; pack.tokens() * pack.q_heads() * pack.head_dim],
            ..Operands::normal(&pack)
        };
        let walk = Walk::new(&backend, &pack, &zero_q.block_ids);
        let results = walk.attention(&zero_q, 1.0).unwrap();
        for (token, (start, _)) in pack.documents().into_iter().enumerate() {
            let expected = ((token - start + 1) as f64).ln() as f32;
            let lse = results.lse[token * pack.q_heads()];
            prop_assert!(
                (lse - expected).abs() < 4e-6,
                "place {}: {} against {}",
                token - start,
                lse,
                expected
            );
        }
        let operands = Operands::normal(&pack);
        let sparse = walk.attention(&operands, 0.25).unwrap();
        let (o, lse) = walk.dense(&operands, 0.25).unwrap();
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&sparse.o), bits(&o));
        prop_assert_eq!(bits(&sparse.lse), bits(&lse));
        Ok(())
    });
}
