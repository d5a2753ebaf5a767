//! Faults of dense and block-sparse attention.

use super::dense::swap_heads;
use super::plant::{
    Plant, STREAM, Tensor, after, both, edit, edited, exchange, ints, plant, scratch, settings,
    store, values,
};
use super::{Fault, fault};
use m3_kernels::cpu::CpuBackend;
use m3_kernels::{Backend, Result, ops};

const DENSE: &[&str] = &["attention::*/tiny_g4_d32_b16"];
const CAUSAL: &[&str] = &["attention::*/tiny_g4_d32_b16", "attention::*/g5_d40_b8"];
const SPARSE: &[&str] = &["msa_attention::*/tiny_g4_d32_b16"];
const NARROW: &[&str] = &["msa_attention::*/g5_d40_b8"];

pub(super) fn faults() -> Vec<Fault> {
    let mut list = dense();
    list.extend(sparse());
    list
}

/// A query as another mask sees it.
struct Query {
    /// First token and end of its sequence, in the pack.
    sequence: [usize; 2],
    /// Its token, in the pack.
    token: usize,
    /// Its kv head.
    kv_head: usize,
}

/// o and lse written anew under another mask and another assignment of heads.
fn rewritten(
    b: &CpuBackend,
    args: &ops::Attention<'_, CpuBackend>,
    kv_head: impl Fn(usize) -> usize,
    visible: impl Fn(&Query, usize) -> bool,
) -> Result<()> {
    let [q, k, v] = [args.q, args.k, args.v].map(|tensor| values(b, tensor));
    let (q, k, v) = (q?, k?, v?);
    let ends: Vec<usize> = ints(b, args.cu_seqlens)?
        .iter()
        .map(|&x| x as usize)
        .collect();
    let (heads, width, kv_heads) = (args.q.shape()[1], args.q.shape()[2], args.k.shape()[1]);
    let (mut o, mut lse) = (vec![0.0; q.len()], vec![0.0; q.len() / width]);
    for pair in ends.windows(2) {
        for (token, head) in (pair[0]..pair[1]).flat_map(|t| (0..heads).map(move |h| (t, h))) {
            let query = Query {
                sequence: [pair[0], pair[1]],
                token,
                kv_head: kv_head(head),
            };
            let row = (token * heads + head) * width;
            let key = |j: usize| (j * kv_heads + query.kv_head) * width;
            let keys: Vec<usize> = (pair[0]..pair[1]).filter(|&j| visible(&query, j)).collect();
            let score = |&j: &usize| {
                let dot = q[row..row + width].iter().zip(&k[key(j)..key(j) + width]);
                f64::from(args.scale) * dot.map(|(a, b)| a * b).sum::<f64>()
            };
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
            lse[token * heads + head] = top + sum.ln();
            for (j, score) in keys.iter().zip(&scores) {
                let p = (score - top).exp() / sum;
                for c in 0..width {
                    o[row + c] += p * v[key(*j) + c];
                }
            }
        }
    }
    store(b, args.o, &o)?;
    store(b, args.lse, &lse)
}

fn masked(visible: impl Fn(&Query, usize) -> bool + Send + Sync + 'static) -> Plant {
    std::sync::Arc::new(
        move |b: &CpuBackend, call: m3_kernels::cpu::fault::Call<'_>| match call {
            m3_kernels::cpu::fault::Call::Attention(args) => {
                let group = args.q.shape()[1] / args.k.shape()[1];
                rewritten(b, args, |head| head / group, &visible)
            }
            other => other.run(b),
        },
    )
}

/// Boundaries of one sequence that is the whole pack.
fn merged(b: &CpuBackend, cu_seqlens: &Tensor) -> Result<Tensor> {
    let total = values(b, cu_seqlens)?.last().copied().unwrap_or(0.0);
    edited(b, cu_seqlens, |i, _| if i == 0 { 0.0 } else { total })
}

/// Gradients of the outputs with every head but the first of its group silent.
fn first_of_group(b: &CpuBackend, d_o: &Tensor, kv_heads: usize) -> Result<Tensor> {
    let (heads, width) = (d_o.shape()[1], d_o.shape()[2]);
    let group = heads / kv_heads;
    edited(b, d_o, |i, x| {
        if i / width % heads % group == 0 {
            x
        } else {
            0.0
        }
    })
}

fn last_rows(args_o: &Tensor) -> impl Fn(usize, f64) -> f64 + use<> {
    let row = args_o.elements() / args_o.shape()[0];
    let written = args_o.shape()[0] / 64 * 64 * row;
    move |i, x| if i < written { x } else { f64::NAN }
}

fn dense() -> Vec<Fault> {
    let mut list = vec![
        fault(
            "attention: mask off by one, the next key is seen",
            CAUSAL,
            masked(|query, key| key <= query.token + 1),
        ),
        fault(
            "attention: mask off by one, the own key is hidden",
            CAUSAL,
            masked(|query, key| key < query.token || query.token == query.sequence[0]),
        ),
        fault(
            "attention: keys beyond the last whole tile of 64 are not seen",
            CAUSAL,
            masked(|query, key| {
                let [start, end] = query.sequence;
                let whole = start + (end - start) / 64 * 64;
                key <= query.token && (key < whole || key == query.token)
            }),
        ),
        fault(
            "attention: documents of a pack see each other",
            DENSE,
            both(
                exchange!(Attention {
                    cu_seqlens: |b, args| merged(b, args.cu_seqlens)
                }),
                exchange!(AttentionBackward {
                    cu_seqlens: |b, args| merged(b, args.cu_seqlens)
                }),
            ),
        ),
        fault(
            "attention: causal flag ignored",
            CAUSAL,
            both(
                settings!(Attention {
                    causal: |_args| false
                }),
                settings!(AttentionBackward {
                    causal: |_args| false
                }),
            ),
        ),
        fault(
            "attention: causal where it must not be",
            &["attention::*/bidirectional_*"],
            settings!(Attention {
                causal: |_args| true
            }),
        ),
        fault(
            "attention: query heads dealt to kv heads in turn instead of in groups",
            DENSE,
            plant!(Attention, |b, args| {
                let kv_heads = args.k.shape()[1];
                rewritten(
                    b,
                    args,
                    |head| head % kv_heads,
                    |query, key| key <= query.token,
                )
            }),
        ),
    ];
    macro_rules! shared {
        ($forward:ident, $backward:ident, $cases:expr, $($words:literal),+ $(,)?) => {{
            let words: [&'static str; 12] = [$($words),+];
            let plants: [Plant; 12] = [
                both(
                    settings!($forward { scale: |args| args.scale * args.scale }),
                    settings!($backward { scale: |args| args.scale * args.scale }),
                ),
                settings!($forward { k: |args| args.v, v: |args| args.k }),
                after!($forward.lse, |_args| |_, x| x / std::f64::consts::LN_2),
                after!($forward.o, |args| last_rows(args.o)),
                after!($forward.o, |_args| |i, x| if i == 4321 { f64::NAN } else { x }),
                plant!($forward, |b, args| {
                    b.run_forward(args)?;
                    swap_heads(b, args.o)
                }),
                after!($backward.dq, |args| {
                    let scale = f64::from(args.scale);
                    move |_, x| x * scale
                }),
                plant!($backward, |b, args| {
                    b.run_backward(args)?;
                    let d_o = &first_of_group(b, args.d_o, args.k.shape()[1])?;
                    let dq = &scratch(b, args.dq)?;
                    b.run_backward(&ops::$backward { d_o, dq, ..*args })
                }),
                exchange!($backward { o: |b, args| edited(b, args.o, |_, _| 0.0) }),
                settings!($backward { dk: |args| args.dv, dv: |args| args.dk }),
                exchange!($backward { lse: |b, args| edited(b, args.lse, |_, x| x + 0.01) }),
                after!($backward.dk, |args| {
                    let row = args.dk.elements() / args.dk.shape()[0];
                    let end = args.dk.elements() - row;
                    move |i, x| if i < end { x } else { 0.0 }
                }),
            ];
            words.into_iter().zip(plants).map(|(words, plant)| fault(words, $cases, plant))
        }};
    }
    list.extend(shared!(
        Attention,
        AttentionBackward,
        DENSE,
        "attention: scale of 1/D",
        "attention: k and v exchanged",
        "attention: lse in base 2",
        "attention: rows beyond the last whole tile of 64 not written",
        "attention: one element is NaN",
        "attention: two heads of the output exchanged",
        "attention: dq scaled twice",
        "attention: dk and dv of a group's first head only, its slices not summed",
        "attention: dS without delta",
        "attention: dk and dv exchanged",
        "attention: probabilities of the backward pass 1 % low",
        "attention: dk of the last token zero",
    ));
    list.extend(shared!(
        MsaAttention,
        MsaAttentionBackward,
        SPARSE,
        "sparse attention: scale of 1/D",
        "sparse attention: k and v exchanged",
        "sparse attention: lse in base 2",
        "sparse attention: rows beyond the last whole tile of 64 not written",
        "sparse attention: one element is NaN",
        "sparse attention: two heads of the output exchanged",
        "sparse attention: dq scaled twice",
        "sparse attention: dk and dv of a group's first head only, its slices not summed",
        "sparse attention: dS without delta",
        "sparse attention: dk and dv exchanged",
        "sparse attention: probabilities of the backward pass 1 % low",
        "sparse attention: dk of the last token zero",
    ));
    list
}

/// Both kinds of attention under one name.
trait Run<Forward, Backward> {
    fn run_forward(&self, args: &Forward) -> Result<()>;
    fn run_backward(&self, args: &Backward) -> Result<()>;
}

impl Run<ops::Attention<'_, CpuBackend>, ops::AttentionBackward<'_, CpuBackend>> for CpuBackend {
    fn run_forward(&self, args: &ops::Attention<'_, CpuBackend>) -> Result<()> {
        self.attention(&STREAM, args)
    }
    fn run_backward(&self, args: &ops::AttentionBackward<'_, CpuBackend>) -> Result<()> {
        self.attention_backward(&STREAM, args)
    }
}

impl Run<ops::MsaAttention<'_, CpuBackend>, ops::MsaAttentionBackward<'_, CpuBackend>>
    for CpuBackend
{
    fn run_forward(&self, args: &ops::MsaAttention<'_, CpuBackend>) -> Result<()> {
        self.msa_attention(&STREAM, args)
    }
    fn run_backward(&self, args: &ops::MsaAttentionBackward<'_, CpuBackend>) -> Result<()> {
        self.msa_attention_backward(&STREAM, args)
    }
}

/// Block-sparse attention as masked dense attention, by which blocks a query chose.
fn chosen(
    b: &CpuBackend,
    args: &ops::MsaAttention<'_, CpuBackend>,
    visible: impl Fn(&Query, usize, &[i32], usize) -> bool,
) -> Result<()> {
    let ids = ints(b, args.block_ids)?;
    let (tokens, topk) = (args.block_ids.shape()[1], args.block_ids.shape()[2]);
    let ops::MsaAttention {
        q,
        k,
        v,
        cu_seqlens,
        o,
        lse,
        scale,
        config,
        ..
    } = *args;
    let dense = ops::Attention {
        q,
        k,
        v,
        cu_seqlens,
        o,
        lse,
        scale,
        causal: true,
        config,
    };
    let group = q.shape()[1] / k.shape()[1];
    rewritten(
        b,
        &dense,
        |head| head / group,
        |query, key| {
            let row = (query.kv_head * tokens + query.token) * topk;
            visible(query, key, &ids[row..row + topk], args.block)
        },
    )
}

fn sparse() -> Vec<Fault> {
    vec![
        fault(
            "sparse attention: no causal mask inside the own block",
            SPARSE,
            plant!(MsaAttention, |b, args| chosen(
                b,
                args,
                |query, key, ids, block| {
                    ids.contains(&(((key - query.sequence[0]) / block) as i32))
                }
            )),
        ),
        fault(
            "sparse attention: blocks anchored at the pack's start",
            SPARSE,
            plant!(MsaAttention, |b, args| chosen(
                b,
                args,
                |query, key, ids, block| {
                    let own = key / block == query.token / block;
                    let number = (key / block - query.sequence[0] / block) as i32;
                    key <= query.token && (own || ids.contains(&number))
                }
            )),
        ),
        fault(
            "sparse attention: the last partial block of a sequence dropped",
            SPARSE,
            plant!(MsaAttention, |b, args| chosen(
                b,
                args,
                |query, key, ids, block| {
                    let [start, end] = query.sequence;
                    let number = (key - start) / block;
                    let whole = number < (end - start) / block || key == query.token;
                    key <= query.token && whole && ids.contains(&(number as i32))
                }
            )),
        ),
        fault(
            "sparse attention: every query head reads the first kv head's blocks",
            SPARSE,
            plant!(MsaAttention, |b, args| {
                let row = args.block_ids.elements() / args.block_ids.shape()[0];
                let ids = values(b, args.block_ids)?;
                let block_ids = &edited(b, args.block_ids, |i, _| ids[i % row])?;
                b.msa_attention(&STREAM, &ops::MsaAttention { block_ids, ..*args })
            }),
        ),
        fault(
            "sparse attention: the last chosen block skipped by queries of two or more",
            SPARSE,
            plant!(MsaAttention, |b, args| chosen(
                b,
                args,
                |query, key, ids, block| {
                    let number = ((key - query.sequence[0]) / block) as i32;
                    let first = ids[0];
                    let last = ids.iter().copied().max().unwrap_or(first);
                    key <= query.token && ids.contains(&number) && (number != last || last == first)
                }
            )),
        ),
        fault(
            "sparse attention: dk and dv from the first two query tiles of a block only",
            &["msa_attention::*/m3_g16_d128_b128"],
            plant!(MsaAttentionBackward, |b, args| two_tiles(b, args)),
        ),
        fault(
            "sparse attention: dk and dv lack a block's last query",
            NARROW,
            plant!(MsaAttentionBackward, |b, args| {
                let keep = |list: &[i32]| list.len().saturating_sub(usize::from(list.len() > 1));
                shortened(b, args, keep)
            }),
        ),
    ]
}

fn two_tiles(b: &CpuBackend, args: &ops::MsaAttentionBackward<'_, CpuBackend>) -> Result<()> {
    shortened(b, args, |list| {
        let mut tiles: Vec<i32> = list.iter().map(|query| query / 64).collect();
        tiles.dedup();
        let last = tiles.get(1).or(tiles.first()).copied().unwrap_or(0);
        list.iter().filter(|&&query| query / 64 <= last).count()
    })
}

/// The backward pass with every block's list of queries cut to its first so many.
fn shortened(
    b: &CpuBackend,
    args: &ops::MsaAttentionBackward<'_, CpuBackend>,
    keep: impl Fn(&[i32]) -> usize,
) -> Result<()> {
    let (offsets, queries) = (ints(b, args.row_offsets)?, ints(b, args.queries)?);
    let heads = args.queries.shape()[0];
    let (per_head, capacity) = (offsets.len() / heads, queries.len() / heads);
    let (mut new_offsets, mut new_queries) = (Vec::new(), Vec::new());
    for head in 0..heads {
        let offsets = &offsets[head * per_head..][..per_head];
        let queries = &queries[head * capacity..][..capacity];
        let mut kept = Vec::new();
        new_offsets.push(0.0);
        for range in offsets.windows(2) {
            let list = &queries[range[0] as usize..range[1] as usize];
            kept.extend(list[..keep(list)].iter().map(|&query| f64::from(query)));
            new_offsets.push(kept.len() as f64);
        }
        kept.resize(capacity, -1.0);
        new_queries.extend(kept);
    }
    let (row_offsets, list) = (scratch(b, args.row_offsets)?, scratch(b, args.queries)?);
    store(b, &row_offsets, &new_offsets)?;
    edit(b, &list, |i, _| new_queries[i])?;
    let cut = ops::MsaAttentionBackward {
        row_offsets: &row_offsets,
        queries: &list,
        ..*args
    };
    b.msa_attention_backward(&STREAM, &cut)
}
