//! Tiles, tasks and threads: none of them decides a value, and the last two not even a bit.

use m3_kernels::cpu::CpuBackend;
use proptest::prelude::*;

use crate::pack::{KEY_TILES, Pack, full, holds, packs};
use crate::walk::{Operands, Results, attention};

/// Difference granted to a row of two results that are each within 1e-5 of the exact one (the gates of msa_attention
/// in f32), against its norm, or against 1 where terms of order 1 cancel.
const NOISE: f64 = 2e-5;

fn near(pack: &Pack, [ours, theirs]: [&Results; 2]) -> Result<(), TestCaseError> {
    for ((name, ours, width), (_, theirs, _)) in
        ours.tensors(pack).into_iter().zip(theirs.tensors(pack))
    {
        for (token, (a, b)) in ours
            .chunks_exact(width)
            .zip(theirs.chunks_exact(width))
            .enumerate()
        {
            let square = |sum: f64, x: f64| sum + x * x;
            let pairs = a.iter().zip(b).filter(|(a, b)| a != b);
            let error = pairs
                .map(|(a, b)| f64::from(*a) - f64::from(*b))
                .fold(0.0, square)
                .sqrt();
            let finite = a.iter().filter(|x| x.is_finite());
            let norm = finite.map(|&x| f64::from(x)).fold(0.0, square).sqrt();
            let granted = NOISE * if norm > 1.0 { norm } else { 1.0 };
            prop_assert!(
                error <= granted,
                "{} of token {}: {} > {}",
                name,
                token,
                error,
                granted
            );
        }
    }
    Ok(())
}

#[test]
fn the_key_tile_changes_values_by_noise_alone() {
    let backend = CpuBackend::default();
    holds(file!(), [40, 1000], &packs(12, 1024), |pack| {
        let operands = Operands::normal(&pack);
        let [narrow, middle, wide] = KEY_TILES.map(|key_tile| {
            let pack = Pack {
                key_tile,
                ..pack.clone()
            };
            attention(&backend, &pack, &operands)
        });
        near(&pack, [&narrow, &middle])?;
        near(&pack, [&narrow, &wide])
    });
}

#[test]
fn the_query_tile_changes_no_bit_of_a_query() {
    let backend = CpuBackend::default();
    holds(file!(), [40, 1000], &packs(12, 1024), |pack| {
        let operands = Operands::normal(&pack);
        let ours = attention(&backend, &pack, &operands);
        for query_tile in [1, 7, 64, 5000] {
            let pack = Pack {
                query_tile,
                ..pack.clone()
            };
            let theirs = attention(&backend, &pack, &operands);
            for (name, ours, theirs) in [
                ("o", &ours.o, &theirs.o),
                ("lse", &ours.lse, &theirs.lse),
                ("dq", &ours.dq, &theirs.dq),
            ] {
                let same = ours
                    .iter()
                    .zip(theirs)
                    .all(|(a, b)| a.to_bits() == b.to_bits());
                prop_assert!(same, "{} at {} queries a task", name, query_tile);
            }
            near(&pack, [&ours, &theirs])?;
        }
        Ok(())
    });
}

#[test]
fn threads_and_repetition_change_no_bit() {
    let backends = [1, 2, 3].map(|threads| CpuBackend::new(threads).unwrap());
    let repeats = if full() { 20 } else { 3 };
    holds(file!(), [20, 200], &packs(12, 1024), |pack| {
        let operands = Operands::normal(&pack);
        let everything = 0..pack.tokens();
        let first = attention(&backends[0], &pack, &operands).bits(&pack, everything.clone());
        for backend in backends.iter().cycle().skip(1).take(repeats) {
            let again = attention(backend, &pack, &operands);
            prop_assert!(
                first == again.bits(&pack, everything.clone()),
                "{} threads",
                backend.threads()
            );
        }
        Ok(())
    });
}
