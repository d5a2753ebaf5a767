//! The attention of a layer, from its normed input to its contribution to the stream: dense, or block-sparse over the
//! blocks that the layer's indexer chooses.

use crate::math::{axpy, index};
use crate::ops::{attention, block_select, linear, msa_attention, msa_score, qk_norm_rope};
use crate::{Precision, Rounding};
use m3_spec::config::IndexConfig;

/// Sizes and constants.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// H
    pub hidden: usize,
    /// Hq
    pub q_heads: usize,
    /// Hkv
    pub kv_heads: usize,
    /// D
    pub head_dim: usize,
    /// Dims of a head that rotate, also of an index head.
    pub rotary_dim: usize,
    /// Of the norms of q, k and the index.
    pub eps: f64,
}

/// Where the tokens of a pack stand.
#[derive(Clone, Copy, Debug)]
pub struct Pack<'a> {
    /// First token of each sequence, then the end of the last: `[B+1]`
    pub cu_seqlens: &'a [i32],
    /// Position of each token in its own sequence `[T]`.
    pub positions: &'a [i32],
    /// (cos, sin) pairs `[positions, rotary_dim / 2, 2]`
    pub cos_sin: &'a [f32],
}

/// Rules and frozen weights of the indexer.
#[derive(Clone, Copy, Debug)]
pub struct Indexer<'a> {
    /// Sizes and rules; one head for each KV head.
    pub config: &'a IndexConfig,
    /// `[Hi·Di, H]`
    pub w_q: &'a [f64],
    /// `[Di, H]`
    pub w_k: &'a [f64],
    /// `[Di]`
    pub q_norm: &'a [f64],
    /// `[Di]`
    pub k_norm: &'a [f64],
}

/// What the layer reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// Sizes and constants.
    pub params: Params,
    /// The pack.
    pub pack: Pack<'a>,
    /// Normed input `[T, H]`, also the indexer's.
    pub x: &'a [f64],
    /// `[Hq·D, H]`
    pub w_q: &'a [f64],
    /// `[Hkv·D, H]`
    pub w_k: &'a [f64],
    /// `[Hkv·D, H]`
    pub w_v: &'a [f64],
    /// `[H, Hq·D]`
    pub w_o: &'a [f64],
    /// `[D]`
    pub q_norm: &'a [f64],
    /// `[D]`
    pub k_norm: &'a [f64],
    /// Of a sparse layer; none makes the layer dense.
    pub indexer: Option<Indexer<'a>>,
    /// Blocks to use instead of the indexer's own `[Hi, T, topk]`.
    pub replay: Option<&'a [i32]>,
}

/// What the layer writes, and keeps for its backward.
#[derive(Clone, Debug)]
pub struct Output {
    /// q before its norm.
    pub q_proj: linear::Output,
    /// k before its norm.
    pub k_proj: linear::Output,
    /// v, which has no norm.
    pub v: linear::Output,
    /// q normed and rotated.
    pub q: qk_norm_rope::Output,
    /// k normed and rotated.
    pub k: qk_norm_rope::Output,
    /// Selection of a sparse layer `[Hi, T, topk]`.
    pub block_ids: Option<Vec<i32>>,
    /// Heads' outputs and LSE.
    pub heads: attention::Output,
    /// The layer's result `[T, H]`.
    pub o: linear::Output,
}

/// Gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct Grads<'a> {
    /// `[T, H]`
    pub dy: &'a [f64],
}

/// Gradients that leave. Weights' are fp32; the indexer has none.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// `[T, H]`
    pub dx: Vec<f64>,
    /// `[Hq·D, H]`
    pub dw_q: Vec<f64>,
    /// `[Hkv·D, H]`
    pub dw_k: Vec<f64>,
    /// `[Hkv·D, H]`
    pub dw_v: Vec<f64>,
    /// `[H, Hq·D]`
    pub dw_o: Vec<f64>,
    /// `[D]`
    pub dq_norm: Vec<f64>,
    /// `[D]`
    pub dk_norm: Vec<f64>,
}

/// Rounds where its ops do.
pub fn forward(inputs: &Inputs, rounding: &Rounding) -> Output {
    let Inputs {
        x,
        w_q,
        w_k,
        w_v,
        q_norm,
        k_norm,
        ..
    } = *inputs;
    let q_proj = linear::forward(&projection(inputs, x, w_q), rounding);
    let k_proj = linear::forward(&projection(inputs, x, w_k), rounding);
    let v = linear::forward(&projection(inputs, x, w_v), rounding);
    let q = qk_norm_rope::forward(&normed(inputs, &q_proj.y, q_norm), rounding);
    let k = qk_norm_rope::forward(&normed(inputs, &k_proj.y, k_norm), rounding);
    let block_ids = inputs.indexer.map(|indexer| match inputs.replay {
        Some(block_ids) => block_ids.to_vec(),
        None => select(inputs, &indexer, rounding),
    });
    let heads = match &block_ids {
        Some(ids) => msa_attention::forward(&sparse(inputs, &q.y, &k.y, &v.y, ids), rounding),
        None => attention::forward(&dense(inputs, &q.y, &k.y, &v.y), rounding),
    };
    let o = linear::forward(&projection(inputs, &heads.o, inputs.w_o), rounding);
    Output {
        q_proj,
        k_proj,
        v,
        q,
        k,
        block_ids,
        heads,
        o,
    }
}

/// The input feeds q, k and v: their shares of dx are fp32, summed and rounded once.
pub fn backward(inputs: &Inputs, output: &Output, grads: &Grads, rounding: &Rounding) -> Gradients {
    let Inputs {
        x,
        w_q,
        w_k,
        w_v,
        w_o,
        q_norm,
        k_norm,
        ..
    } = *inputs;
    let Output {
        q_proj,
        k_proj,
        v,
        q,
        k,
        block_ids,
        heads,
        o,
    } = output;

    let dy = linear::Grads { dy: grads.dy };
    let mut at = projection(inputs, &heads.o, w_o);
    at.params.dx = Precision::Storage;
    let o = linear::backward(&at, o, &dy, rounding);

    let d_o = attention::Grads { d_o: &o.dx };
    let heads = match block_ids {
        Some(ids) => {
            let at = sparse(inputs, &q.y, &k.y, &v.y, ids);
            msa_attention::backward(&at, heads, &d_o, rounding)
        }
        None => attention::backward(&dense(inputs, &q.y, &k.y, &v.y), heads, &d_o, rounding),
    };

    let dq = qk_norm_rope::Grads { dy: &heads.dq };
    let q = qk_norm_rope::backward(&normed(inputs, &q_proj.y, q_norm), q, &dq, rounding);
    let dk = qk_norm_rope::Grads { dy: &heads.dk };
    let k = qk_norm_rope::backward(&normed(inputs, &k_proj.y, k_norm), k, &dk, rounding);

    let project = |w, y, dy| {
        linear::backward(
            &projection(inputs, x, w),
            y,
            &linear::Grads { dy },
            rounding,
        )
    };
    let q_proj = project(w_q, q_proj, &q.dx);
    let k_proj = project(w_k, k_proj, &k.dx);
    let v = project(w_v, v, &heads.dv);
    let mut dx = q_proj.dx;
    axpy(&mut dx, 1.0, &k_proj.dx);
    axpy(&mut dx, 1.0, &v.dx);
    Gradients {
        dx: rounding.store_all(dx),
        dw_q: q_proj.dw,
        dw_k: k_proj.dw,
        dw_v: v.dw,
        dw_o: o.dw,
        dq_norm: q.dweight,
        dk_norm: k.dweight,
    }
}

/// The indexer's choice of blocks.
fn select(inputs: &Inputs, indexer: &Indexer, rounding: &Rounding) -> Vec<i32> {
    let config = indexer.config;
    let (index_heads, head_dim, block) = (config.num_heads, config.head_dim, config.block_size);
    let Pack {
        cu_seqlens,
        positions,
        ..
    } = inputs.pack;
    let tokens = positions.len();
    let max_blocks = positions
        .iter()
        .map(|&p| index(p) / block + 1)
        .max()
        .unwrap_or(0);
    let part = |w, norm| {
        let y = linear::forward(&projection(inputs, inputs.x, w), rounding).y;
        let mut at = normed(inputs, &y, norm);
        at.params.head_dim = head_dim;
        at.params.heads = y.len() / (tokens * head_dim);
        qk_norm_rope::forward(&at, rounding).y
    };
    let (iq, ik) = (
        part(indexer.w_q, indexer.q_norm),
        part(indexer.w_k, indexer.k_norm),
    );
    let params = msa_score::Params {
        tokens,
        index_heads,
        head_dim,
        block,
        max_blocks,
    };
    let at = msa_score::Inputs {
        params,
        iq: &iq,
        ik: &ik,
        cu_seqlens,
    };
    let scores = msa_score::forward(&at, rounding).scores;
    let params = block_select::Params {
        tokens,
        index_heads,
        block,
        max_blocks,
        topk: config.topk_blocks,
        init_blocks: config.init_blocks,
        local_blocks: config.local_blocks,
    };
    block_select::forward(&block_select::Inputs {
        params,
        scores: &scores,
        cu_seqlens,
    })
    .block_ids
}

/// A projection of the tokens' rows; its dx is one share of several.
fn projection<'a>(inputs: &Inputs, x: &'a [f64], w: &'a [f64]) -> linear::Inputs<'a> {
    let rows = inputs.pack.positions.len();
    let k = x.len() / rows;
    let (y, dx) = (Precision::Storage, Precision::Fp32);
    linear::Inputs {
        params: linear::Params {
            rows,
            n: w.len() / k,
            k,
            y,
            dx,
        },
        x,
        w,
    }
}

fn normed<'a>(inputs: &Inputs<'a>, x: &'a [f64], weight: &'a [f64]) -> qk_norm_rope::Inputs<'a> {
    let Params {
        head_dim,
        rotary_dim,
        eps,
        ..
    } = inputs.params;
    let Pack {
        positions, cos_sin, ..
    } = inputs.pack;
    let tokens = positions.len();
    let heads = x.len() / (tokens * head_dim);
    let params = qk_norm_rope::Params {
        tokens,
        heads,
        head_dim,
        rotary_dim,
        eps,
    };
    qk_norm_rope::Inputs {
        params,
        x,
        weight,
        cos_sin,
        positions,
    }
}

fn dense<'a>(
    inputs: &Inputs<'a>,
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
) -> attention::Inputs<'a> {
    let Params {
        q_heads,
        kv_heads,
        head_dim,
        ..
    } = inputs.params;
    let (tokens, scale) = (inputs.pack.positions.len(), scale(head_dim));
    let params = attention::Params {
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        scale,
        causal: true,
    };
    attention::Inputs {
        params,
        q,
        k,
        v,
        cu_seqlens: inputs.pack.cu_seqlens,
    }
}

fn sparse<'a>(
    inputs: &Inputs<'a>,
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
    block_ids: &'a [i32],
) -> msa_attention::Inputs<'a> {
    let Params {
        q_heads,
        kv_heads,
        head_dim,
        ..
    } = inputs.params;
    let (tokens, scale) = (inputs.pack.positions.len(), scale(head_dim));
    let config = inputs
        .indexer
        .expect("a sparse layer has an indexer")
        .config;
    let (block, topk) = (config.block_size, config.topk_blocks);
    let params = msa_attention::Params {
        tokens,
        q_heads,
        kv_heads,
        head_dim,
        scale,
        block,
        topk,
    };
    msa_attention::Inputs {
        params,
        q,
        k,
        v,
        block_ids,
        cu_seqlens: inputs.pack.cu_seqlens,
    }
}

fn scale(head_dim: usize) -> f64 {
    (head_dim as f64).powf(-0.5)
}
