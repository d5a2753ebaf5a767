use m3_kernels::ops::{self, map_capacity};
use m3_kernels::{Backend, Result};
use m3_reference::ops::{block_select, msa_score, tile_map};
use m3_spec::dtype::DType;

use super::List;
use crate::lab::{Lab, cu_seqlens, positions};

/// Index heads, blocks and documents of a case.
#[derive(Clone, Copy)]
struct Shape {
    lengths: &'static [usize],
    heads: usize,
    head_dim: usize,
    block: usize,
    topk: usize,
    init_blocks: usize,
    local_blocks: usize,
}

pub(super) fn add<B: Backend>(list: &mut List<B>) {
    let m3 = Shape {
        lengths: &[700, 1, 0, 129],
        heads: 4,
        head_dim: 128,
        block: 128,
        topk: 3,
        init_blocks: 0,
        local_blocks: 1,
    };
    let narrow = Shape {
        lengths: &[131, 64],
        head_dim: 32,
        block: 4,
        topk: 6,
        heads: 2,
        ..m3
    };
    let forced = Shape {
        init_blocks: 1,
        local_blocks: 2,
        topk: 4,
        block: 16,
        ..narrow
    };
    let free = Shape {
        local_blocks: 0,
        ..forced
    };
    for (variant, shape) in [("m3_b128", m3), ("b4_k6", narrow)] {
        list.both("msa_score", variant, move |lab| score(lab, shape));
    }
    for (variant, shape) in [
        ("m3_b128", m3),
        ("b4_k6", narrow),
        ("init1_local2", forced),
        ("init1_local0", free),
    ] {
        list.one("block_select", variant, DType::F32, move |lab| {
            select(lab, shape, false)
        });
    }
    list.one("block_select", "ties", DType::F32, move |lab| {
        select(lab, narrow, true)
    });
    for (variant, shape) in [("m3_b128", m3), ("b4_k6", narrow)] {
        list.one("tile_map", variant, DType::F32, move |lab| map(lab, shape));
    }
}

impl Shape {
    fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    fn max_blocks(&self) -> usize {
        self.lengths
            .iter()
            .max()
            .copied()
            .unwrap_or(0)
            .div_ceil(self.block)
    }

    fn select_params(&self) -> block_select::Params {
        block_select::Params {
            tokens: self.tokens(),
            index_heads: self.heads,
            block: self.block,
            max_blocks: self.max_blocks(),
            topk: self.topk,
            init_blocks: self.init_blocks,
            local_blocks: self.local_blocks,
        }
    }
}

fn score<B: Backend>(lab: &mut Lab<'_, B>, shape: Shape) -> Result<()> {
    let (tokens, heads, head_dim) = (shape.tokens(), shape.heads, shape.head_dim);
    let max_blocks = shape.max_blocks() + 1;
    let index_q = lab.normal("index_q", 1.0, [tokens, heads, head_dim])?;
    let index_k = lab.normal("index_k", 1.0, [tokens, 1, head_dim])?;
    let ends = cu_seqlens(shape.lengths);
    let device_ends = lab.ints(&ends, [ends.len()])?;
    lab.packed(&ends, shape.block);
    let scores = lab.output(DType::F32, [heads, tokens, max_blocks])?;
    let args = ops::MsaScore {
        index_q: &index_q.device,
        index_k: &index_k.device,
        cu_seqlens: &device_ends,
        scores: &scores,
        block: shape.block,
    };
    lab.backend.msa_score(&lab.stream, &args)?;
    let params = msa_score::Params {
        tokens,
        index_heads: heads,
        head_dim,
        block: shape.block,
        max_blocks,
    };
    let inputs = msa_score::Inputs {
        params,
        iq: &index_q.host,
        ik: &index_k.host,
        cu_seqlens: &ends,
    };
    let [exact, twin] =
        [lab.exact(), lab.twin()].map(|rounding| msa_score::forward(&inputs, &rounding).scores);
    lab.judge("scores", &scores, exact, twin)
}

fn select<B: Backend>(lab: &mut Lab<'_, B>, shape: Shape, ties: bool) -> Result<()> {
    let extents = [shape.heads, shape.tokens(), shape.max_blocks()];
    let mut scores = lab.normal_f32("scores", 1.0, extents)?;
    if ties {
        // Few distinct values, both zeros, NaN and infinities: every tie rule is needed.
        let values = [
            0.0,
            -0.0,
            1.0,
            1.0,
            -1.0,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
        ];
        let picks = lab.integers("picks", values.len() as u32, scores.host.len());
        let chosen = picks.iter().map(|&pick| values[pick as usize]).collect();
        scores = lab.given(chosen, DType::F32, extents)?;
    }
    let ends = cu_seqlens(shape.lengths);
    let rows = positions(shape.lengths);
    let device_positions = lab.ints(&rows, [rows.len()])?;
    lab.packed(&ends, shape.block);
    let block_ids = lab.output(DType::I32, [shape.heads, shape.tokens(), shape.topk])?;
    let args = ops::BlockSelect {
        scores: &scores.device,
        positions: &device_positions,
        block_ids: &block_ids,
        block: shape.block,
        init_blocks: shape.init_blocks,
        local_blocks: shape.local_blocks,
    };
    lab.backend.block_select(&lab.stream, &args)?;
    let params = shape.select_params();
    let inputs = block_select::Inputs {
        params,
        scores: &scores.host,
        cu_seqlens: &ends,
    };
    lab.judge_ids(
        "block_ids",
        &block_ids,
        &block_select::forward(&inputs).block_ids,
    )
}

fn map<B: Backend>(lab: &mut Lab<'_, B>, shape: Shape) -> Result<()> {
    let (tokens, heads) = (shape.tokens(), shape.heads);
    let scores = lab.normal_f32("scores", 1.0, [heads, tokens, shape.max_blocks()])?;
    let ends = cu_seqlens(shape.lengths);
    let params = shape.select_params();
    let inputs = block_select::Inputs {
        params,
        scores: &scores.host,
        cu_seqlens: &ends,
    };
    let selection = block_select::forward(&inputs).block_ids;

    let sequences = shape.lengths.len();
    let rows = map_capacity(tokens, sequences, shape.block);
    let block_ids = lab.ints(&selection, [heads, tokens, shape.topk])?;
    let device_ends = lab.ints(&ends, [ends.len()])?;
    lab.packed(&ends, shape.block);
    let block_offsets = lab.output(DType::I32, [sequences + 1])?;
    let row_offsets = lab.output(DType::I32, [heads, rows + 1])?;
    let queries = lab.output(DType::I32, [heads, tokens * shape.topk])?;
    let args = ops::TileMap {
        block_ids: &block_ids,
        cu_seqlens: &device_ends,
        block_offsets: &block_offsets,
        row_offsets: &row_offsets,
        queries: &queries,
        block: shape.block,
    };
    lab.backend.tile_map(&lab.stream, &args)?;

    let params = tile_map::Params {
        tokens,
        index_heads: heads,
        block: shape.block,
        topk: shape.topk,
    };
    let inputs = tile_map::Inputs {
        params,
        block_ids: &selection,
        cu_seqlens: &ends,
    };
    let expected = expected_map(&inputs, shape.lengths, rows);
    lab.judge_ids("block_offsets", &block_offsets, &expected.block_offsets)?;
    lab.judge_ids("row_offsets", &row_offsets, &expected.row_offsets)?;
    lab.judge_ids("queries", &queries, &expected.queries)
}

/// The transpose of a selection, out of the reference's set of (query, key) pairs.
struct Map {
    block_offsets: Vec<i32>,
    row_offsets: Vec<i32>,
    queries: Vec<i32>,
}

fn expected_map(inputs: &tile_map::Inputs<'_>, lengths: &[usize], rows: usize) -> Map {
    let params = inputs.params;
    let blocks: Vec<usize> = lengths
        .iter()
        .map(|length| length.div_ceil(params.block))
        .collect();
    let block_offsets = cu_seqlens(&blocks);
    let (mut row_offsets, mut queries) = (Vec::new(), Vec::new());
    for head in 0..params.index_heads {
        let mut lists = vec![Vec::new(); rows];
        for (sequence, range) in inputs.cu_seqlens.windows(2).enumerate() {
            for token in range[0] as usize..range[1] as usize {
                let keys = tile_map::keys_of(inputs, head, token);
                let mut chosen: Vec<usize> = keys
                    .iter()
                    .map(|key| (key - range[0] as usize) / params.block)
                    .collect();
                chosen.dedup();
                for block in chosen {
                    lists[block_offsets[sequence] as usize + block].push(token as i32);
                }
            }
        }
        let lengths: Vec<usize> = lists.iter().map(Vec::len).collect();
        row_offsets.extend(cu_seqlens(&lengths));
        queries.extend(lists.concat());
        queries.resize((head + 1) * params.tokens * params.topk, -1);
    }
    Map {
        block_offsets,
        row_offsets,
        queries,
    }
}
