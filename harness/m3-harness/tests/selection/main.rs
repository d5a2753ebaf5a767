//! Selection at the published shape: 4 index heads of 128 channels, blocks of 128 keys, the 16 best with the own one
//! among them. The f32 scorer and selection of the CPU against the f64 reference, each from its own scores.
//!
//! A query among the first 16 blocks selects them all whatever the scores are, so only the others count.
//! `M3_TIER=full` takes as many rows of bf16 inputs, whose products are exact in f32, as of f32 inputs.

mod near_tie;
mod shape;

use m3_gate::{Operand, Operands, Storage, Verdict, judge_case};
use m3_harness::{gates, today};
use m3_kernels::cpu::CpuBackend;
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};
use rayon::prelude::*;

use near_tie::NotNear;
use shape::{BLOCK, HEADS, INDEX_DIM, Pack, ROWS_PER_PACK, TOKENS, TOPK, selects};

/// 13 x 8,192 = 106,496 rows that depend on their scores.
const PACKS: u64 = 13;
const SEED: u64 = 0x5eed;

#[test]
fn f32_inputs_select_what_exact_scores_select() {
    agreement(DType::F32, Storage::F32, PACKS);
}

#[test]
fn bf16_inputs_select_what_exact_scores_select() {
    let full = std::env::var("M3_TIER").is_ok_and(|tier| tier == "full");
    agreement(DType::BF16, Storage::Bf16, if full { PACKS } else { 2 });
}

/// A pack's rows that depend on their scores, `[rows, topk]` of both sides, and what is wrong with rows that differ.
struct Compared {
    got: Vec<f64>,
    reference: Vec<f64>,
    differ: usize,
    unproven: Vec<(usize, NotNear)>,
}

fn agreement(dtype: DType, storage: Storage, packs: u64) {
    let backend = CpuBackend::default();
    let packs: Vec<Pack> = (SEED..SEED + packs)
        .into_par_iter()
        .map(|seed| Pack::normal(seed, dtype))
        .collect();
    // The backend has threads of its own, the reference has none.
    let ids: Vec<_> = packs.iter().map(|pack| pack.subject(&backend)).collect();
    let packs: Vec<Compared> = packs
        .par_iter()
        .zip(&ids)
        .map(|(pack, ids)| compare(pack, ids))
        .collect();
    let rows = packs.len() * ROWS_PER_PACK;
    let differ: usize = packs.iter().map(|pack| pack.differ).sum();
    println!(
        "{rows} rows of {dtype:?} inputs that depend on their scores: {differ} differ; \
         with 95 % confidence fewer than {:.4} % of all do",
        100.0 * upper_limit(differ) / rows as f64
    );
    for (number, pack) in packs.iter().enumerate() {
        let unproven = &pack.unproven;
        assert!(
            unproven.is_empty(),
            "pack {number}, no near-tie: {unproven:?}"
        );
    }
    let got: Vec<f64> = packs.iter().flat_map(|pack| pack.got.clone()).collect();
    let reference: Vec<f64> = packs
        .iter()
        .flat_map(|pack| pack.reference.clone())
        .collect();
    judge(storage, rows, &got, &reference);
}

fn compare(pack: &Pack, got: &[i32]) -> Compared {
    let exact = pack.exact();
    let mut compared = Compared {
        got: Vec::new(),
        reference: Vec::new(),
        differ: 0,
        unproven: Vec::new(),
    };
    for row in (0..HEADS * TOKENS).filter(|row| selects(row % TOKENS)) {
        let [ours, theirs] = [got, &exact.block_ids].map(|ids| &ids[row * TOPK..][..TOPK]);
        let widen = |ids: &[i32]| ids.iter().map(|&id| f64::from(id)).collect::<Vec<_>>();
        compared.got.extend(widen(ours));
        compared.reference.extend(widen(theirs));
        if ours != theirs {
            compared.differ += 1;
            let proof = near_tie::prove(pack, &exact.scores, row, ours, theirs);
            compared.unproven.extend(proof.err().map(|why| (row, why)));
        }
    }
    compared
}

fn judge(dtype: Storage, rows: usize, got: &[f64], reference: &[f64]) {
    let gates = gates::all(today()).expect("the gate files are sound");
    let name = format!("block_select::own_scores/h{HEADS}_d{INDEX_DIM}_b{BLOCK}_k{TOPK}");
    let case = m3_gate::Case {
        name: &name,
        suite: "selection",
        arch: "cpu",
        dtype,
    };
    let shape = [rows, TOPK];
    let side = |source, values| {
        Some(Operand {
            source,
            buffer: None,
            shape: &shape,
            values,
        })
    };
    let tensor = m3_gate::Tensor {
        name: "block_ids",
        operands: Operands {
            got: side("cpu", got),
            reference: side("reference", reference),
            twin: side("reference", reference),
            storage: Storage::I32,
        },
        decoder: None,
    };
    let verdicts = judge_case(&gates, &case, &[tensor]);
    assert!(!verdicts.is_empty(), "no gate judges {name}");
    for verdict in verdicts {
        assert_eq!(verdict.verdict, Verdict::Pass, "{verdict:#?}");
    }
}

/// Most events expected where `count` were seen, at 95 % confidence (Poisson): 3.0 for none, 4.74 for one.
fn upper_limit(count: usize) -> f64 {
    let at_most = |mean: f64| {
        let terms = (0..=count).scan(1.0, |term, k| {
            *term *= if k == 0 { 1.0 } else { mean / k as f64 };
            Some(*term)
        });
        (-mean).exp() * terms.sum::<f64>()
    };
    let (mut low, mut high) = (0.0, 10.0 + 3.0 * count as f64);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if at_most(middle) > 0.05 {
            low = middle;
        } else {
            high = middle;
        }
    }
    high
}

#[test]
fn the_limit_is_that_of_the_tables() {
    for (count, limit) in [(0, 2.996), (1, 4.744), (3, 7.754)] {
        assert!((upper_limit(count) - limit).abs() < 1e-3, "{count}");
    }
}

/// Whole numbers from -2 to 2: every product and sum is exact in f32.
fn small_integers(label: &str, seed: u64, len: usize) -> Vec<f64> {
    let inputs = Inputs::new(seed, "selection of ties");
    let values = inputs.integers(label, 5, len);
    values.into_iter().map(|x| f64::from(x) - 2.0).collect()
}

fn ties_agree(pack: &Pack) {
    let (got, exact) = (pack.subject(&CpuBackend::default()), pack.exact());
    let differs = |row: &usize| got[row * TOPK..][..TOPK] != exact.block_ids[row * TOPK..][..TOPK];
    let rows: Vec<usize> = (0..HEADS * TOKENS).filter(differs).collect();
    assert!(rows.is_empty(), "{} rows differ: {rows:?}", rows.len());
}

#[test]
fn tied_whole_number_scores_select_the_same_ids() {
    ties_agree(&Pack {
        dtype: DType::F32,
        index_q: small_integers("index_q", SEED, TOKENS * HEADS * INDEX_DIM),
        index_k: small_integers("index_k", SEED, TOKENS * INDEX_DIM),
    });
}

#[test]
fn duplicated_key_blocks_select_the_same_ids() {
    let distinct = 5;
    let block = small_integers("index_k", SEED, distinct * BLOCK * INDEX_DIM);
    let period = block.len();
    ties_agree(&Pack {
        dtype: DType::BF16,
        index_q: small_integers("index_q", SEED, TOKENS * HEADS * INDEX_DIM),
        index_k: (0..TOKENS * INDEX_DIM).map(|i| block[i % period]).collect(),
    });
}

#[test]
fn zero_queries_select_the_first_blocks_and_their_own() {
    let zero = |i: usize| if i.is_multiple_of(3) { -0.0 } else { 0.0 };
    let normal = Distribution::Normal { std: 1.0 };
    let pack = Pack {
        dtype: DType::F32,
        index_q: (0..TOKENS * HEADS * INDEX_DIM).map(zero).collect(),
        index_k: Inputs::new(SEED, "selection of ties").f64s(
            "index_k",
            normal,
            DType::F32,
            TOKENS * INDEX_DIM,
        ),
    };
    ties_agree(&pack);
    let ids = pack.subject(&CpuBackend::default());
    let last = &ids[(TOKENS - 1) * TOPK..][..TOPK];
    let mut expected: Vec<i32> = (0..TOPK as i32).collect();
    expected[TOPK - 1] = (TOKENS / BLOCK) as i32 - 1;
    assert_eq!(last, expected);
}
