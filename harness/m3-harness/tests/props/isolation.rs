//! A document's results depend on that document alone, to the bit.

use m3_kernels::cpu::CpuBackend;
use proptest::prelude::*;

use crate::pack::{Pack, holds, packs};
use crate::walk::{Operands, attention};

const POISON: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];

#[test]
fn nan_and_infinity_in_other_documents_and_padding_change_no_bit() {
    let backend = CpuBackend::default();
    let packs = (
        packs(12, 1024),
        any::<prop::sample::Index>(),
        0..POISON.len(),
    );
    holds(file!(), [60, 1500], &packs, |(pack, kept, poison)| {
        prop_assume!(!pack.lengths.is_empty());
        let kept = kept.index(pack.lengths.len());
        let first = pack.starts()[kept];
        let tokens = first..first + pack.lengths[kept];
        let clean = Operands::normal(&pack);
        let mut poisoned = clean.clone();
        let values = [
            &mut poisoned.q,
            &mut poisoned.k,
            &mut poisoned.v,
            &mut poisoned.d_o,
        ];
        for values in values {
            let width = values.len() / pack.tokens().max(1);
            for (token, row) in values.chunks_exact_mut(width.max(1)).enumerate() {
                if !tokens.contains(&token) {
                    row.fill(POISON[poison]);
                }
            }
        }
        let [clean, poisoned] =
            [&clean, &poisoned].map(|operands| attention(&backend, &pack, operands));
        prop_assert!(clean.bits(&pack, tokens.clone()) == poisoned.bits(&pack, tokens));
        Ok(())
    });
}

/// Whether query `token` of a kv head sees key `key`, which lies in the document from `start` on.
fn sees(
    pack: &Pack,
    block_ids: &[i32],
    head: usize,
    [token, key]: [usize; 2],
    start: usize,
) -> bool {
    let row = (head * pack.tokens() + token) * pack.topk;
    let ids = &block_ids[row..][..pack.topk];
    (start..=token).contains(&key) && ids.contains(&(((key - start) / pack.block) as i32))
}

/// Tokens of the document that a token belongs to.
fn document(pack: &Pack, token: usize) -> std::ops::Range<usize> {
    let (start, length) = pack.documents()[token];
    start..start + length
}

/// A pack, clean operands, and a token of a document in it.
fn with_token() -> impl Strategy<Value = (Pack, usize, f32)> {
    let filled = packs(6, 700).prop_filter("a token", |pack| pack.covered() > 0);
    let poison = prop::sample::select(&POISON[..]);
    (filled, any::<prop::sample::Index>(), poison).prop_map(|(pack, token, poison)| {
        let token = token.index(pack.covered());
        (pack, token, poison)
    })
}

#[test]
fn a_poisoned_key_reaches_only_the_queries_that_see_it() {
    let backend = CpuBackend::default();
    holds(file!(), [60, 1000], &with_token(), |(pack, key, poison)| {
        let document = document(&pack, key);
        let clean = Operands::normal(&pack);
        let mut poisoned = clean.clone();
        let width = pack.kv_heads * pack.head_dim;
        poisoned.k[key * width..][..width].fill(poison);
        poisoned.v[key * width..][..width].fill(poison);
        let [ours, theirs] =
            [&clean, &poisoned].map(|operands| attention(&backend, &pack, operands));
        for token in 0..pack.tokens() {
            for head in 0..pack.q_heads() {
                let kv_head = head / pack.group;
                let inside = document.contains(&token);
                if !(inside
                    && sees(
                        &pack,
                        &clean.block_ids,
                        kv_head,
                        [token, key],
                        document.start,
                    ))
                {
                    let row = token * pack.q_heads() + head;
                    for (name, ours, theirs) in
                        [("o", &ours.o, &theirs.o), ("dq", &ours.dq, &theirs.dq)]
                    {
                        let same = same_row(ours, theirs, row, pack.head_dim);
                        prop_assert!(same, "{} of token {}, head {}", name, token, head);
                    }
                    prop_assert!(
                        same_row(&ours.lse, &theirs.lse, row, 1),
                        "lse of token {}",
                        token
                    );
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_poisoned_query_reaches_only_the_keys_it_sees() {
    let backend = CpuBackend::default();
    holds(
        file!(),
        [60, 1000],
        &with_token(),
        |(pack, query, poison)| {
            let document = document(&pack, query);
            let clean = Operands::normal(&pack);
            let mut poisoned = clean.clone();
            let width = pack.q_heads() * pack.head_dim;
            poisoned.q[query * width..][..width].fill(poison);
            poisoned.d_o[query * width..][..width].fill(poison);
            let [ours, theirs] =
                [&clean, &poisoned].map(|operands| attention(&backend, &pack, operands));
            for key in 0..pack.tokens() {
                for head in 0..pack.kv_heads {
                    let row = key * pack.kv_heads + head;
                    for (name, ours, theirs) in
                        [("dk", &ours.dk, &theirs.dk), ("dv", &ours.dv, &theirs.dv)]
                    {
                        let same = same_row(ours, theirs, row, pack.head_dim);
                        let seen =
                            sees(&pack, &clean.block_ids, head, [query, key], document.start);
                        prop_assert!(seen || same, "{} of key {}, head {}", name, key, head);
                    }
                }
            }
            Ok(())
        },
    );
}

fn same_row(ours: &[f32], theirs: &[f32], row: usize, width: usize) -> bool {
    let [ours, theirs] = [ours, theirs].map(|values| values[row * width..][..width].iter());
    ours.zip(theirs).all(|(a, b)| a.to_bits() == b.to_bits())
}

#[test]
fn the_order_of_documents_changes_no_bit() {
    let backend = CpuBackend::default();
    let packs = packs(20, 1500).prop_flat_map(|pack| {
        let order: Vec<usize> = (0..pack.lengths.len()).collect();
        (Just(pack), Just(order).prop_shuffle())
    });
    holds(file!(), [24, 1000], &packs, |(pack, order)| {
        let starts = pack.starts();
        let document = |&number: &usize| starts[number]..starts[number] + pack.lengths[number];
        let tokens: Vec<usize> = order
            .iter()
            .flat_map(document)
            .chain(pack.covered()..pack.tokens())
            .collect();
        let shuffled = Pack {
            lengths: order.iter().map(|&number| pack.lengths[number]).collect(),
            ..pack.clone()
        };
        let operands = Operands::normal(&pack);
        let ours = attention(&backend, &pack, &operands);
        let theirs = attention(&backend, &shuffled, &operands.gather(&pack, &tokens));
        for (number, start) in order.iter().zip(shuffled.starts()) {
            let same = ours.bits(&pack, document(number))
                == theirs.bits(&shuffled, start..start + pack.lengths[*number]);
            prop_assert!(same, "document {}", number);
        }
        Ok(())
    });
}

#[test]
fn another_document_and_more_padding_change_no_bit() {
    let backend = CpuBackend::default();
    let packs = (packs(12, 1024), 0..300_usize, 0..2_usize);
    holds(file!(), [24, 1000], &packs, |(pack, length, padding)| {
        let mut longer = pack.clone();
        longer.lengths.push(length);
        longer.padding += padding;
        let [ours, theirs] =
            [&pack, &longer].map(|pack| attention(&backend, pack, &Operands::normal(pack)));
        let tokens = 0..pack.covered();
        prop_assert!(ours.bits(&pack, tokens.clone()) == theirs.bits(&longer, tokens));
        Ok(())
    });
}
