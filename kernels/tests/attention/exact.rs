//! Values against the f64 model.

use m3_spec::dtype::DType;

use crate::lab::{Document, Heads, Lab, Layout, Rule};
use crate::model::{attention, distance};

fn heads(q: usize, kv: usize, dim: usize, block: usize, topk: usize) -> Heads {
    Heads {
        q,
        kv,
        dim,
        block,
        topk,
    }
}

/// Bounds of decision 6: f32 from given inputs, bf16 forward, bf16 gradients.
const F32: f64 = 1e-5;
const BF16: f64 = 6e-3;
const BF16_GRADIENT: f64 = 8e-3;

fn agrees(heads: Heads, rule: Rule, lengths: &[usize]) {
    let name = |length| format!("{heads:?} {length}");
    let documents: Vec<Document> = lengths
        .iter()
        .map(|&n| Document::new(&name(n), heads, n))
        .collect();
    let documents: Vec<&Document> = documents.iter().collect();
    for (dtype, layout) in [(DType::F32, Layout::Dense), (DType::BF16, Layout::Fused)] {
        let lab = Lab {
            layout,
            ..Lab::new(dtype, heads, rule)
        };
        for (document, got) in documents.iter().zip(lab.run(&documents)) {
            let exact = attention(document, heads, rule);
            let (forward, backward) = match dtype {
                DType::F32 => (F32, F32),
                _ => (BF16, BF16_GRADIENT),
            };
            for (tensor, error, bound) in [
                ("o", distance(&got.o, &exact.o), forward),
                ("lse", distance(&got.lse, &exact.lse), F32),
                ("dq", distance(&got.dq, &exact.dq), backward),
                ("dk", distance(&got.dk, &exact.dk), backward),
                ("dv", distance(&got.dv, &exact.dv), backward),
            ] {
                let case = format!("{tensor} {dtype:?} {heads:?} {rule:?} {}", document.length);
                assert!(error <= bound, "{case}: {error:e} > {bound:e}");
            }
        }
    }
}

#[test]
fn the_published_shape_agrees_at_every_edge_of_a_block() {
    agrees(
        heads(16, 1, 128, 128, 2),
        Rule::Blocks,
        &[1, 127, 128, 129, 0, 300],
    );
}

#[test]
fn blocks_narrower_than_a_tile_agree() {
    agrees(heads(3, 1, 256, 4, 6), Rule::Blocks, &[1, 3, 4, 5, 0, 90]);
    agrees(heads(6, 2, 64, 8, 3), Rule::Blocks, &[127, 8, 33]);
    agrees(heads(2, 2, 64, 16, 2), Rule::Blocks, &[65, 16]);
}

#[test]
fn blocks_that_do_not_divide_a_tile_agree() {
    agrees(heads(4, 4, 8, 24, 2), Rule::Blocks, &[100, 23, 25]);
    agrees(heads(16, 1, 64, 24, 3), Rule::Blocks, &[129]);
}

#[test]
fn blocks_wider_than_a_tile_agree() {
    // Heads of 256 channels have tiles of 64 keys.
    let wide = heads(2, 1, 256, 128, 2);
    assert!(wide.config().key_tile < wide.block);
    agrees(wide, Rule::Blocks, &[129, 280]);
}

#[test]
fn dense_rows_agree_causal_and_bidirectional() {
    for rule in [Rule::Causal, Rule::Whole] {
        agrees(heads(3, 1, 128, 128, 1), rule, &[1, 127, 128, 129, 0]);
        agrees(heads(16, 1, 8, 8, 1), rule, &[70]);
        agrees(heads(4, 2, 72, 64, 1), rule, &[100]);
    }
}

#[test]
fn padded_keys_past_the_end_of_a_block_get_no_weight() {
    // 129 keys with equal scores of −8 and values of 1: anything that slips in from behind the end lowers o.
    let heads = heads(1, 1, 8, 128, 2);
    let mut document = Document::new("padded", heads, 129);
    document.q.fill(1.0);
    document.k.fill(-8.0 / (8.0 * heads.scale()));
    document.v.fill(1.0);
    for (dtype, rule) in [(DType::F32, Rule::Causal), (DType::BF16, Rule::Blocks)] {
        let results = Lab::new(dtype, heads, rule).run(&[&document]);
        assert!(results[0].o.iter().all(|&o| o == 1.0), "{:?}", results[0].o);
        assert!((results[0].lse[128] - (129_f32.ln() - 8.0)).abs() <= 0.1);
    }
}

#[test]
fn a_row_whose_keys_all_score_minus_infinity_is_zero_and_its_neighbour_unchanged() {
    let heads = heads(2, 1, 8, 4, 1);
    let document = Document::new("masked", heads, 3);
    let mut masked = document.clone();
    // Head 0 of every token scores −inf against every key; head 1 is a normal row beside it.
    masked.k.fill(1.0);
    let mut normal = masked.clone();
    for token in 0..3 {
        masked.q[token * 16..token * 16 + 8].fill(f32::NEG_INFINITY);
        normal.q[token * 16..token * 16 + 8].fill(1.0);
    }
    for rule in [Rule::Causal, Rule::Whole, Rule::Blocks] {
        let lab = Lab::new(DType::F32, heads, rule);
        let (got, beside) = (lab.run(&[&masked]), lab.run(&[&normal]));
        for token in 0..3 {
            let (empty, full) = (token * 16..token * 16 + 8, token * 16 + 8..token * 16 + 16);
            assert!(got[0].o[empty.clone()].iter().all(|o| o.to_bits() == 0));
            assert!(got[0].dq[empty].iter().all(|&x| x == 0.0));
            assert_eq!(got[0].lse[token * 2], f32::NEG_INFINITY);
            assert_eq!(got[0].o[full.clone()], beside[0].o[full.clone()]);
            assert_eq!(got[0].dq[full.clone()], beside[0].dq[full]);
        }
    }
}

#[test]
fn a_query_with_one_visible_key_has_a_gradient_of_exactly_zero() {
    let heads = heads(16, 1, 128, 128, 1);
    let document = Document::new("one key", heads, 1);
    for (dtype, rule) in [(DType::F32, Rule::Causal), (DType::BF16, Rule::Blocks)] {
        let got = &Lab::new(dtype, heads, rule).run(&[&document])[0];
        assert!(got.dq.iter().chain(&got.dk).all(|&x| x == 0.0));
    }
}
