use m3_kernels::launch::{self, AttentionConfig};
use m3_kernels::ops::{self, AttentionDims, attention_backward_workspace, map_capacity};
use m3_kernels::{Backend, Result, Tensor};
use m3_reference::ops::{attention as dense, block_select, msa_attention as sparse};
use m3_spec::dtype::DType;

use super::List;
use crate::lab::{Given, Lab, cu_seqlens};

/// Heads, blocks and documents of a case.
#[derive(Clone, Copy)]
struct Shape {
    lengths: &'static [usize],
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    block: usize,
    topk: usize,
}

impl Shape {
    const fn new(
        lengths: &'static [usize],
        [q_heads, kv_heads, head_dim]: [usize; 3],
        [block, topk]: [usize; 2],
    ) -> Self {
        Shape {
            lengths,
            q_heads,
            kv_heads,
            head_dim,
            block,
            topk,
        }
    }

    fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    fn scale(&self) -> f32 {
        (self.head_dim as f64).powf(-0.5) as f32
    }

    fn tiles<B: Backend>(&self, backend: &B) -> AttentionConfig {
        launch::attention(
            self.block,
            self.head_dim,
            self.q_heads / self.kv_heads,
            backend.arch(),
        )
    }
}

/// The published head shapes and the edges of the general path, at lengths that cross blocks and tiles.
const SHAPES: [(&str, Shape); 7] = [
    (
        "m3_g16_d128_b128",
        Shape::new(&[129, 1, 300], [16, 1, 128], [128, 2]),
    ),
    (
        "qsa_g12_d256_b4",
        Shape::new(&[67, 0, 5], [12, 1, 256], [4, 6]),
    ),
    (
        "tiny_g4_d32_b16",
        Shape::new(&[127, 128, 16, 17], [16, 4, 32], [16, 4]),
    ),
    (
        "echo_g2_d32_b4",
        Shape::new(&[11, 11, 11, 10, 64], [4, 2, 32], [4, 2]),
    ),
    (
        "g1_d8_b24",
        Shape::new(&[100, 0, 0, 61], [8, 8, 8], [24, 2]),
    ),
    ("g3_d72_b64", Shape::new(&[193], [6, 2, 72], [64, 2])),
    ("g5_d40_b8", Shape::new(&[90, 33], [5, 1, 40], [8, 3])),
];

pub(super) fn add<B: Backend>(list: &mut List<B>) {
    for (variant, shape) in SHAPES {
        list.both("attention", variant, move |lab| run_dense(lab, shape, true));
    }
    let bidirectional = Shape::new(&[80, 45], [4, 2, 80], [128, 1]);
    list.both("attention", "bidirectional_g2_d80", move |lab| {
        run_dense(lab, bidirectional, false)
    });
    for (variant, shape) in SHAPES {
        list.both("msa_attention", variant, move |lab| run_sparse(lab, shape));
    }
}

/// q, k, v and d_o; k and v are slices of one fused row on the device.
struct Operands<B: Backend> {
    q: Given<B>,
    k: Given<B>,
    v: Given<B>,
    d_o: Given<B>,
    kv: Vec<Tensor<B>>,
    cu_seqlens: Vec<i32>,
    cu_seqlens_device: Tensor<B>,
}

impl<B: Backend> Operands<B> {
    fn new(lab: &mut Lab<'_, B>, shape: &Shape) -> Result<Self> {
        let (tokens, head_dim) = (shape.tokens(), shape.head_dim);
        let q = lab.normal("q", 1.0, [tokens, shape.q_heads, head_dim])?;
        let k = lab.normal("k", 1.0, [tokens, shape.kv_heads, head_dim])?;
        let v = lab.normal("v", 1.0, [tokens, shape.kv_heads, head_dim])?;
        let d_o = lab.normal("d_o", 1.0, [tokens, shape.q_heads, head_dim])?;
        let kv = lab.fuse(&[&k, &v])?;
        // Unused entries repeat the last value.
        let mut ends = cu_seqlens(shape.lengths);
        ends.extend([*ends.last().unwrap_or(&0); 2]);
        let device = lab.ints(&ends, [ends.len()])?;
        lab.packed(&ends, shape.block);
        Ok(Operands {
            q,
            k,
            v,
            d_o,
            kv,
            cu_seqlens: ends,
            cu_seqlens_device: device,
        })
    }
}

/// What the subject writes.
struct Results<B: Backend> {
    o: Tensor<B>,
    lse: Tensor<B>,
    dq: Tensor<B>,
    dk: Tensor<B>,
    dv: Tensor<B>,
    workspace: Tensor<B>,
}

impl<B: Backend> Results<B> {
    fn new(lab: &Lab<'_, B>, shape: &Shape, sequences: usize) -> Result<Self> {
        let (tokens, head_dim) = (shape.tokens(), shape.head_dim);
        let (q_heads, kv_heads) = (shape.q_heads, shape.kv_heads);
        let dims = AttentionDims {
            tokens,
            q_heads,
            kv_heads,
            head_dim,
            sequences,
        };
        let workspace = attention_backward_workspace(&dims, shape.tiles(lab.backend));
        let width = kv_heads * head_dim;
        let fused = lab.output(lab.storage, [tokens, 2 * width])?;
        Ok(Results {
            o: lab.output(lab.storage, [tokens, q_heads, head_dim])?,
            lse: lab.output(DType::F32, [tokens, q_heads])?,
            dq: lab.output(lab.storage, [tokens, q_heads, head_dim])?,
            dk: fused.slice(1, 0..width).split_last(head_dim),
            dv: fused.slice(1, width..2 * width).split_last(head_dim),
            workspace: lab.output(DType::F32, [workspace])?,
        })
    }

    fn judge(
        &self,
        lab: &mut Lab<'_, B>,
        exact: (dense::Output, dense::Gradients),
        twin: (dense::Output, dense::Gradients),
    ) -> Result<()> {
        lab.judge("o", &self.o, exact.0.o, twin.0.o)?;
        lab.judge("lse", &self.lse, exact.0.lse, twin.0.lse)?;
        lab.judge("dv", &self.dv, exact.1.dv, twin.1.dv)?;
        lab.judge("dq", &self.dq, exact.1.dq, twin.1.dq)?;
        lab.judge("dk", &self.dk, exact.1.dk, twin.1.dk)
    }
}

fn run_dense<B: Backend>(lab: &mut Lab<'_, B>, shape: Shape, causal: bool) -> Result<()> {
    let given = Operands::new(lab, &shape)?;
    let results = Results::new(lab, &shape, given.cu_seqlens.len() - 1)?;
    let (scale, config) = (shape.scale(), shape.tiles(lab.backend));
    let forward = ops::Attention {
        q: &given.q.device,
        k: &given.kv[0],
        v: &given.kv[1],
        cu_seqlens: &given.cu_seqlens_device,
        o: &results.o,
        lse: &results.lse,
        scale,
        causal,
        config,
    };
    lab.backend.attention(&lab.stream, &forward)?;
    let backward = ops::AttentionBackward {
        q: &given.q.device,
        k: &given.kv[0],
        v: &given.kv[1],
        cu_seqlens: &given.cu_seqlens_device,
        o: &results.o,
        lse: &results.lse,
        d_o: &given.d_o.device,
        dq: &results.dq,
        dk: &results.dk,
        dv: &results.dv,
        workspace: &results.workspace,
        scale,
        causal,
        config,
    };
    lab.backend.attention_backward(&lab.stream, &backward)?;

    let params = dense::Params {
        tokens: shape.tokens(),
        q_heads: shape.q_heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        scale: f64::from(scale),
        causal,
    };
    let inputs = dense::Inputs {
        params,
        q: &given.q.host,
        k: &given.k.host,
        v: &given.v.host,
        cu_seqlens: &given.cu_seqlens,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = dense::forward(&inputs, &rounding);
        let grads = dense::Grads {
            d_o: &given.d_o.host,
        };
        let gradients = dense::backward(&inputs, &output, &grads, &rounding);
        (output, gradients)
    });
    results.judge(lab, exact, twin)
}

fn run_sparse<B: Backend>(lab: &mut Lab<'_, B>, shape: Shape) -> Result<()> {
    let given = Operands::new(lab, &shape)?;
    let sequences = given.cu_seqlens.len() - 1;
    let results = Results::new(lab, &shape, sequences)?;
    let (scale, config) = (shape.scale(), shape.tiles(lab.backend));
    let selection = random_selection(lab, &shape, &given.cu_seqlens)?;
    let selection_shape = [shape.kv_heads, shape.tokens(), shape.topk];
    let block_ids = lab.ints(&selection, selection_shape)?;
    let forward = ops::MsaAttention {
        q: &given.q.device,
        k: &given.kv[0],
        v: &given.kv[1],
        cu_seqlens: &given.cu_seqlens_device,
        block_ids: &block_ids,
        o: &results.o,
        lse: &results.lse,
        block: shape.block,
        scale,
        config,
    };
    lab.backend.msa_attention(&lab.stream, &forward)?;
    let rows = map_capacity(shape.tokens(), sequences, shape.block);
    let block_offsets = lab.output(DType::I32, [sequences + 1])?;
    let row_offsets = lab.output(DType::I32, [shape.kv_heads, rows + 1])?;
    let queries = lab.output(DType::I32, [shape.kv_heads, shape.tokens() * shape.topk])?;
    let map = ops::TileMap {
        block_ids: &block_ids,
        cu_seqlens: &given.cu_seqlens_device,
        block_offsets: &block_offsets,
        row_offsets: &row_offsets,
        queries: &queries,
        block: shape.block,
    };
    lab.backend.tile_map(&lab.stream, &map)?;
    let backward = ops::MsaAttentionBackward {
        q: &given.q.device,
        k: &given.kv[0],
        v: &given.kv[1],
        cu_seqlens: &given.cu_seqlens_device,
        block_ids: &block_ids,
        block_offsets: &block_offsets,
        row_offsets: &row_offsets,
        queries: &queries,
        o: &results.o,
        lse: &results.lse,
        d_o: &given.d_o.device,
        dq: &results.dq,
        dk: &results.dk,
        dv: &results.dv,
        workspace: &results.workspace,
        block: shape.block,
        scale,
        config,
    };
    lab.backend.msa_attention_backward(&lab.stream, &backward)?;

    let params = sparse::Params {
        tokens: shape.tokens(),
        q_heads: shape.q_heads,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        scale: f64::from(scale),
        block: shape.block,
        topk: shape.topk,
    };
    let inputs = sparse::Inputs {
        params,
        q: &given.q.host,
        k: &given.k.host,
        v: &given.v.host,
        block_ids: &selection,
        cu_seqlens: &given.cu_seqlens,
    };
    let [exact, twin] = [lab.exact(), lab.twin()].map(|rounding| {
        let output = sparse::forward(&inputs, &rounding);
        let grads = sparse::Grads {
            d_o: &given.d_o.host,
        };
        let gradients = sparse::backward(&inputs, &output, &grads, &rounding);
        (output, gradients)
    });
    results.judge(lab, exact, twin)
}

/// The selection that random scores lead to, own block always in.
fn random_selection<B: Backend>(
    lab: &mut Lab<'_, B>,
    shape: &Shape,
    cu_seqlens: &[i32],
) -> Result<Vec<i32>> {
    let longest = shape.lengths.iter().max().copied().unwrap_or(0);
    let max_blocks = longest.div_ceil(shape.block);
    let scores = lab.normal_f32("scores", 1.0, [shape.kv_heads, shape.tokens(), max_blocks])?;
    let params = block_select::Params {
        tokens: shape.tokens(),
        index_heads: shape.kv_heads,
        block: shape.block,
        max_blocks,
        topk: shape.topk,
        init_blocks: 0,
        local_blocks: 1,
    };
    let inputs = block_select::Inputs {
        params,
        scores: &scores.host,
        cu_seqlens,
    };
    Ok(block_select::forward(&inputs).block_ids)
}
