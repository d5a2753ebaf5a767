//! Queries without keys, blocks without queries, and what belongs to which head.

use m3_kernels::cpu::CpuBackend;
use proptest::prelude::*;

use crate::pack::{Choice, Pack, holds, packs};
use crate::walk::{Operands, attention};

fn all_plus_zero(values: &[f32]) -> bool {
    values.iter().all(|x| x.to_bits() == 0)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_query_that_selects_nothing_is_zero_and_changes_no_other() {
    let backend = CpuBackend::default();
    let packs = (
        packs(8, 700),
        prop::collection::vec(any::<prop::sample::Index>(), 1..40),
    );
    holds(file!(), [60, 1500], &packs, |(pack, emptied)| {
        prop_assume!(pack.tokens() > 0);
        let operands = Operands::normal(&pack);
        let mut fewer = operands.clone();
        for place in emptied {
            let row = place.index(pack.kv_heads * pack.tokens());
            fewer.block_ids[row * pack.topk..][..pack.topk].fill(-1);
        }
        let [all, some] = [&operands, &fewer].map(|operands| attention(&backend, &pack, operands));
        let (q_heads, width) = (pack.q_heads(), pack.head_dim);
        for row in 0..pack.tokens() * q_heads {
            let (token, kv_head) = (row / q_heads, row % q_heads / pack.group);
            let ids = &fewer.block_ids[(kv_head * pack.tokens() + token) * pack.topk..];
            let [o, dq] = [&some.o, &some.dq].map(|values| &values[row * width..][..width]);
            if ids[0] < 0 {
                prop_assert!(
                    all_plus_zero(o) && all_plus_zero(dq),
                    "token {}: {:?} {:?}",
                    token,
                    o,
                    dq
                );
                prop_assert_eq!(some.lse[row], f32::NEG_INFINITY);
            } else {
                prop_assert_eq!(bits(o), bits(&all.o[row * width..][..width]));
                prop_assert_eq!(bits(dq), bits(&all.dq[row * width..][..width]));
                prop_assert_eq!(some.lse[row].to_bits(), all.lse[row].to_bits());
            }
        }
        let finite = some.dk.iter().chain(&some.dv).all(|x| x.is_finite());
        prop_assert!(finite, "dk or dv is not finite");
        Ok(())
    });
}

#[test]
fn a_key_that_nobody_selected_has_plus_zero_gradients() {
    let backend = CpuBackend::default();
    holds(file!(), [60, 1500], &packs(12, 1024), |pack| {
        let operands = Operands::normal(&pack);
        let results = attention(&backend, &pack, &operands);
        let documents = pack.documents();
        let mut seen = vec![false; pack.tokens() * pack.kv_heads];
        for head in 0..pack.kv_heads {
            for (token, &(start, _)) in documents.iter().enumerate() {
                let row = (head * pack.tokens() + token) * pack.topk;
                for &id in operands.block_ids[row..][..pack.topk]
                    .iter()
                    .filter(|&&id| id >= 0)
                {
                    let first = start + id as usize * pack.block;
                    for key in first..(first + pack.block).min(token + 1) {
                        seen[key * pack.kv_heads + head] = true;
                    }
                }
            }
        }
        for (row, seen) in seen.into_iter().enumerate() {
            let rows = [&results.dk, &results.dv]
                .map(|values| &values[row * pack.head_dim..][..pack.head_dim]);
            let right = if seen {
                rows.iter().all(|row| row.iter().all(|x| x.is_finite()))
            } else {
                rows.iter().all(|row| all_plus_zero(row))
            };
            prop_assert!(
                right,
                "key {}, head {}, seen {}: {:?}",
                row / pack.kv_heads,
                row % pack.kv_heads,
                seen,
                rows
            );
        }
        Ok(())
    });
}

#[test]
fn packs_without_a_token_run() {
    let backend = CpuBackend::default();
    for lengths in [vec![], vec![0], vec![0, 0, 0]] {
        let pack = Pack {
            lengths,
            unused: 1,
            padding: 0,
            block: 128,
            topk: 2,
            kv_heads: 2,
            group: 2,
            head_dim: 32,
            key_tile: 64,
            query_tile: 64,
            head_splits: 2,
            choice: Choice::Own,
            seed: 0,
        };
        let results = attention(&backend, &pack, &Operands::normal(&pack));
        assert!(
            results
                .tensors(&pack)
                .iter()
                .all(|(_, values, _)| values.is_empty())
        );
    }
}

/// Values `[T, heads, width]` with head h taken from head `order[h]`.
fn reordered(values: &[f32], width: usize, order: &[usize]) -> Vec<f32> {
    let row = |row: &[f32]| {
        let head = |&head: &usize| row[head * width..][..width].to_vec();
        order.iter().flat_map(head).collect::<Vec<_>>()
    };
    values
        .chunks_exact(width * order.len())
        .flat_map(row)
        .collect()
}

#[test]
fn heads_of_a_group_exchange_places_to_the_bit() {
    let backend = CpuBackend::default();
    holds(file!(), [40, 1000], &packs(8, 700), |pack| {
        // The heads of every group in reverse.
        let reverse =
            |head: usize| head / pack.group * pack.group + pack.group - 1 - head % pack.group;
        let order: Vec<usize> = (0..pack.q_heads()).map(reverse).collect();
        let operands = Operands::normal(&pack);
        let exchanged = Operands {
            q: reordered(&operands.q, pack.head_dim, &order),
            d_o: reordered(&operands.d_o, pack.head_dim, &order),
            ..operands.clone()
        };
        let [ours, theirs] =
            [&operands, &exchanged].map(|operands| attention(&backend, &pack, operands));
        prop_assert!(bits(&theirs.o) == bits(&reordered(&ours.o, pack.head_dim, &order)));
        prop_assert!(bits(&theirs.dq) == bits(&reordered(&ours.dq, pack.head_dim, &order)));
        prop_assert!(bits(&theirs.lse) == bits(&reordered(&ours.lse, 1, &order)));
        Ok(())
    });
}

#[test]
fn an_index_head_selects_for_its_own_group_alone() {
    let backend = CpuBackend::default();
    let packs = (packs(8, 700), 0..2_usize);
    holds(file!(), [40, 1000], &packs, |(pack, changed)| {
        let pack = Pack {
            kv_heads: 2,
            ..pack
        };
        let operands = Operands::normal(&pack);
        let mut other = operands.clone();
        let half = other.block_ids.len() / 2;
        let theirs = Pack {
            seed: !pack.seed,
            choice: Choice::Any,
            ..pack.clone()
        }
        .selection();
        other.block_ids[changed * half..][..half]
            .copy_from_slice(&theirs[changed * half..][..half]);
        let [ours, theirs] =
            [&operands, &other].map(|operands| attention(&backend, &pack, operands));
        let kept = 1 - changed;
        let tensors = ours.tensors(&pack).into_iter().zip(theirs.tensors(&pack));
        for ((name, ours, width), (_, theirs, _)) in tensors {
            let group = |values: &[f32]| {
                let rows = values.chunks_exact(width);
                rows.flat_map(|row| bits(&row[kept * width / 2..][..width / 2]))
                    .collect::<Vec<_>>()
            };
            prop_assert!(group(ours) == group(theirs), "{}", name);
        }
        Ok(())
    });
}
