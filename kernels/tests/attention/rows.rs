//! What a row's bits may depend on.

use m3_kernels::Error;
use m3_kernels::cpu::CpuBackend;
use m3_kernels::cpu::simd::{Isa, with_isa};
use m3_spec::dtype::DType;

use crate::lab::{Document, Heads, Lab, Layout, Results, Rule, bits};

const WIDE: Heads = Heads {
    q: 16,
    kv: 1,
    dim: 64,
    block: 128,
    topk: 2,
};
const NARROW: Heads = Heads {
    q: 6,
    kv: 2,
    dim: 32,
    block: 4,
    topk: 5,
};
const ODD: Heads = Heads {
    q: 2,
    kv: 2,
    dim: 8,
    block: 24,
    topk: 2,
};
const SHAPES: [Heads; 3] = [WIDE, NARROW, ODD];
const RULES: [Rule; 3] = [Rule::Whole, Rule::Causal, Rule::Blocks];
const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

fn each(mut check: impl FnMut(Lab, &Document)) {
    for heads in SHAPES {
        let document = Document::new("document", heads, 150);
        for rule in RULES {
            for dtype in DTYPES {
                check(Lab::new(dtype, heads, rule), &document);
            }
        }
    }
}

fn same(a: &Results, b: &Results, why: &str) {
    for (i, (a, b)) in a.bits().iter().zip(&b.bits()).enumerate() {
        let tensor = ["o", "lse", "dq", "dk", "dv"][i];
        assert!(a == b, "{tensor}: {why}");
    }
}

#[test]
fn a_document_alone_has_the_bits_it_has_in_a_pack_of_poison() {
    each(|mut lab, document| {
        let alone = &lab.run(&[document])[0];
        let mut poison = Document::new("poison", lab.heads, 37);
        for rows in [&mut poison.q, &mut poison.k, &mut poison.v, &mut poison.d_o] {
            let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
            rows.iter_mut()
                .zip(values.iter().cycle())
                .for_each(|(x, &value)| *x = value);
        }
        let empty = document.prefix(lab.heads, 0);
        lab.outside = 9;
        let pack = lab.run(&[&empty, &poison, document, &empty, &poison]);
        same(alone, &pack[2], "neighbours show");
        let outside = &pack[5];
        for zeros in [&outside.o, &outside.dq, &outside.dk, &outside.dv] {
            assert!(!zeros.is_empty() && bits(zeros).iter().all(|&bits| bits == 0));
        }
        assert!(outside.lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
    });
}

#[test]
fn a_query_has_the_same_bits_whatever_follows_it() {
    each(|lab, document| {
        if lab.rule == Rule::Whole {
            return;
        }
        let whole = &lab.run(&[document])[0];
        let (q, width) = (lab.heads.q, lab.heads.q * lab.heads.dim);
        for length in [1, 2, 24, 64, 65, 127, 128, 129, 149] {
            let cut = &lab.run(&[&document.prefix(lab.heads, length)])[0];
            assert_eq!(
                bits(&cut.o),
                bits(&whole.o[..length * width]),
                "o of {length}"
            );
            assert_eq!(
                bits(&cut.lse),
                bits(&whole.lse[..length * q]),
                "lse of {length}"
            );
            assert_eq!(
                bits(&cut.dq),
                bits(&whole.dq[..length * width]),
                "dq of {length}"
            );
        }
    });
}

#[test]
fn keys_that_a_query_does_not_see_may_be_poison() {
    each(|lab, document| {
        let heads = lab.heads;
        if lab.rule == Rule::Whole {
            return;
        }
        let clean = &lab.run(&[document])[0];
        let mut poisoned = document.clone();
        let bad = 100;
        let (q_width, kv_width) = (heads.q * heads.dim, heads.kv * heads.dim);
        for rows in [&mut poisoned.k, &mut poisoned.v] {
            rows[bad * kv_width..(bad + 1) * kv_width].fill(f32::NAN);
        }
        let got = &lab.run(&[&poisoned])[0];
        for token in 0..document.length {
            for kv_head in 0..heads.kv {
                let sees = document.sees(heads, lab.rule, kv_head, token, bad);
                let first = token * q_width + kv_head * heads.group() * heads.dim;
                let row = first..first + heads.group() * heads.dim;
                for (got, clean) in [(&got.o, &clean.o), (&got.dq, &clean.dq)] {
                    let (got, clean) = (&got[row.clone()], &clean[row.clone()]);
                    match sees {
                        true => assert!(got.iter().all(|x| x.is_nan())),
                        false => assert_eq!(bits(got), bits(clean), "token {token}"),
                    }
                }
            }
        }
    });
}

#[test]
fn a_poisoned_query_spoils_the_gradient_of_the_keys_it_sees_alone() {
    each(|lab, document| {
        let heads = lab.heads;
        let clean = &lab.run(&[document])[0];
        let mut poisoned = document.clone();
        let (bad, width) = (70, heads.q * heads.dim);
        poisoned.d_o[bad * width..(bad + 1) * width].fill(f32::NAN);
        let got = &lab.run(&[&poisoned])[0];
        for key in 0..document.length {
            for kv_head in 0..heads.kv {
                let first = (key * heads.kv + kv_head) * heads.dim;
                let row = first..first + heads.dim;
                let sees = document.sees(heads, lab.rule, kv_head, bad, key);
                for (got, clean) in [(&got.dk, &clean.dk), (&got.dv, &clean.dv)] {
                    let (got, clean) = (&got[row.clone()], &clean[row.clone()]);
                    match sees {
                        true => assert!(got.iter().all(|x| x.is_nan())),
                        false => assert_eq!(bits(got), bits(clean), "key {key}"),
                    }
                }
            }
        }
    });
}

#[test]
fn every_block_selected_is_dense_attention_bit_for_bit() {
    for heads in SHAPES {
        for dtype in DTYPES {
            let document = Document::new("all", heads, 290);
            let dense = &Lab::new(dtype, heads, Rule::Causal).run(&[&document])[0];
            let (all, heads) = document.selecting_all(heads);
            let sparse = &Lab::new(dtype, heads, Rule::Blocks).run(&[&all])[0];
            same(dense, sparse, "the selection shows");
        }
    }
}

#[test]
fn threads_do_not_show() {
    each(|mut lab, document| {
        let two = &lab.run(&[document, document])[1];
        lab.backend = CpuBackend::new(1).unwrap();
        same(two, &lab.run(&[document])[0], "threads show");
    });
}

#[test]
fn instruction_sets_do_not_show() {
    for heads in SHAPES {
        let document = Document::new("sets", heads, 60);
        for (rule, dtype) in [(Rule::Causal, DType::F32), (Rule::Blocks, DType::BF16)] {
            let lab = Lab::new(dtype, heads, rule);
            let on = |isa| with_isa(isa, || lab.run(&[&document]).remove(0));
            let portable = on(Isa::Portable);
            for isa in Isa::available() {
                same(&portable, &on(isa), "the instruction set shows");
            }
        }
    }
}

#[test]
fn slices_of_fused_rows_and_strided_ids_have_the_bits_of_dense_copies() {
    each(|mut lab, document| {
        let short = [1, 5, 32, 33].map(|length| document.prefix(lab.heads, length));
        let documents: Vec<&Document> = short.iter().chain([document]).collect();
        let dense = lab.run(&documents);
        lab.layout = Layout::Fused;
        for (dense, fused) in dense.iter().zip(&lab.run(&documents)) {
            same(dense, fused, "strides show");
        }
    });
}

#[test]
fn query_tiles_do_not_show_in_the_rows_of_queries() {
    each(|mut lab, document| {
        let tiled = &lab.run(&[document])[0];
        lab.config.query_tile = 1;
        let single = &lab.run(&[document])[0];
        assert_eq!(bits(&tiled.o), bits(&single.o));
        assert_eq!(bits(&tiled.lse), bits(&single.lse));
        assert_eq!(bits(&tiled.dq), bits(&single.dq));
    });
}

#[test]
fn a_block_that_nobody_selected_gets_gradients_of_plus_zero() {
    let heads = NARROW;
    let mut document = Document::new("unselected", heads, 60);
    // Everyone selects the own block but those of block 7, who select block 2 instead.
    for ids in &mut document.ids {
        for (token, ids) in ids.chunks_exact_mut(heads.topk).enumerate() {
            ids.fill(-1);
            ids[0] = if token / heads.block == 7 {
                2
            } else {
                (token / heads.block) as i32
            };
        }
    }
    let got = &Lab::new(DType::F32, heads, Rule::Blocks).run(&[&document])[0];
    let width = heads.block * heads.kv * heads.dim;
    for gradient in [&got.dk, &got.dv] {
        for (block, values) in gradient.chunks_exact(width).enumerate() {
            let zero = bits(values).iter().all(|&bits| bits == 0);
            assert_eq!(zero, block == 7, "block {block}");
        }
    }
}

#[test]
fn a_query_that_selected_nothing_is_zero() {
    let mut document = Document::new("nothing", NARROW, 20);
    for ids in &mut document.ids {
        ids[7 * NARROW.topk..8 * NARROW.topk].fill(-1);
    }
    let got = &Lab::new(DType::BF16, NARROW, Rule::Blocks).run(&[&document])[0];
    let width = NARROW.q * NARROW.dim;
    for rows in [&got.o, &got.dq] {
        assert!(
            bits(&rows[7 * width..8 * width])
                .iter()
                .all(|&bits| bits == 0)
        );
        assert!(rows.iter().all(|x| x.is_finite()));
    }
    assert!(
        got.lse[7 * NARROW.q..8 * NARROW.q]
            .iter()
            .all(|&lse| lse == f32::NEG_INFINITY)
    );
}

#[test]
fn a_selection_steers_its_own_kv_head_alone() {
    let document = Document::new("heads", NARROW, 80);
    let mut other = document.clone();
    other.ids[1] = Document::new("other", NARROW, 80).ids.remove(1);
    let lab = Lab::new(DType::F32, NARROW, Rule::Blocks);
    let (a, b) = (&lab.run(&[&document])[0], &lab.run(&[&other])[0]);
    let half = NARROW.group() * NARROW.dim;
    let heads = |x: &Results, kv_head: usize| -> Vec<u32> {
        let rows = x.o.chunks_exact(NARROW.q * NARROW.dim);
        rows.flat_map(|row| bits(&row[kv_head * half..(kv_head + 1) * half]))
            .collect()
    };
    assert_eq!(heads(a, 0), heads(b, 0));
    assert_ne!(heads(a, 1), heads(b, 1));
}

#[test]
fn packs_without_tokens_or_sequences_are_fine() {
    let empty = Document::new("empty", NARROW, 0);
    for rule in RULES {
        let mut lab = Lab::new(DType::F32, NARROW, rule);
        assert!(lab.run(&[&empty, &empty])[0].o.is_empty());
        assert!(lab.run(&[])[0].o.is_empty());
        lab.outside = 3;
        assert!(lab.run(&[])[0].o.iter().all(|&o| o == 0.0));
    }
}

#[test]
fn ids_that_address_no_visible_block_are_refused_by_place() {
    let document = Document::new("refused", NARROW, 40);
    let lab = Lab::new(DType::F32, NARROW, Rule::Blocks);
    // Token 9 of head 1 has own block 2.
    for (ids, slot) in [
        ([0, 1, 3, -1, -1], 2),
        ([0, 10, -1, -1, -1], 1),
        ([i32::MAX, -1, -1, -1, -1], 0),
        ([-2, -1, -1, -1, -1], 0),
        ([0, 0, 1, -1, -1], 1),
        ([1, 0, -1, -1, -1], 1),
        ([0, -1, 2, -1, -1], 2),
    ] {
        let mut bad = document.clone();
        bad.ids[1][9 * 5..10 * 5].copy_from_slice(&ids);
        match lab.try_run(&[&bad]) {
            Err(Error::Index {
                tensor,
                index,
                value,
                ..
            }) => {
                assert_eq!((tensor, index), ("block_ids", (40 + 9) * 5 + slot));
                assert_eq!(value, i64::from(ids[slot]));
            }
            other => panic!("{ids:?} gave {:?}", other.map(|results| results.len())),
        }
    }
}
