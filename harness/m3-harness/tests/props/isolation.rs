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
