//! One pack of one document, and what both sides select in it.

use m3_kernels::cpu::CpuBackend;
use m3_kernels::{Backend, Tensor, ops};
use m3_reference::Rounding;
use m3_reference::ops::{block_select, msa_score};
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};

/// Index heads.
pub const HEADS: usize = 4;
/// Channels of an index head.
pub const INDEX_DIM: usize = 128;
/// Keys of a block.
pub const BLOCK: usize = 128;
/// Blocks of a query.
pub const TOPK: usize = 16;
/// Tokens of a pack.
pub const TOKENS: usize = 4096;
/// Blocks of a pack.
pub const BLOCKS: usize = TOKENS / BLOCK;
/// Rows that depend on their scores.
pub const ROWS_PER_PACK: usize = HEADS * (TOKENS - TOPK * BLOCK);

/// True for a query that sees more blocks than it selects.
pub fn selects(token: usize) -> bool {
    token / BLOCK >= TOPK
}

/// Index queries `[T, Hi, Di]` and keys `[T, Di]`, representable in `dtype`.
pub struct Pack {
    /// Storage of both.
    pub dtype: DType,
    /// Index queries.
    pub index_q: Vec<f64>,
    /// Index keys.
    pub index_k: Vec<f64>,
}

/// The reference's scores `[Hi, T, blocks]` in f64, and its ids `[Hi, T, topk]`.
pub struct Exact {
    pub scores: Vec<f64>,
    pub block_ids: Vec<i32>,
}

impl Pack {
    /// Normal inputs.
    pub fn normal(seed: u64, dtype: DType) -> Self {
        let inputs = Inputs::new(seed, "selection agreement");
        let draw = |label, len| inputs.f64s(label, Distribution::Normal { std: 1.0 }, dtype, len);
        Pack {
            dtype,
            index_q: draw("index_q", TOKENS * HEADS * INDEX_DIM),
            index_k: draw("index_k", TOKENS * INDEX_DIM),
        }
    }

    /// Index query of a row `[Hi, T]`.
    pub fn query(&self, row: usize) -> &[f64] {
        let (head, token) = (row / TOKENS, row % TOKENS);
        &self.index_q[(token * HEADS + head) * INDEX_DIM..][..INDEX_DIM]
    }

    /// Index key of a token.
    pub fn key(&self, token: usize) -> &[f64] {
        &self.index_k[token * INDEX_DIM..][..INDEX_DIM]
    }

    /// Ids of the reference, from scores that are never rounded.
    pub fn exact(&self) -> Exact {
        let cu_seqlens = [0, TOKENS as i32];
        let params = msa_score::Params {
            tokens: TOKENS,
            index_heads: HEADS,
            head_dim: INDEX_DIM,
            block: BLOCK,
            max_blocks: BLOCKS,
        };
        let inputs = msa_score::Inputs {
            params,
            iq: &self.index_q,
            ik: &self.index_k,
            cu_seqlens: &cu_seqlens,
        };
        let scores = msa_score::forward(&inputs, &Rounding::Exact).scores;
        let params = block_select::Params {
            tokens: TOKENS,
            index_heads: HEADS,
            block: BLOCK,
            max_blocks: BLOCKS,
            topk: TOPK,
            init_blocks: 0,
            local_blocks: 1,
        };
        let inputs = block_select::Inputs {
            params,
            scores: &scores,
            cu_seqlens: &cu_seqlens,
        };
        let block_ids = block_select::forward(&inputs).block_ids;
        Exact { scores, block_ids }
    }

    /// Ids of the kernels, from their own f32 scores.
    pub fn subject(&self, backend: &CpuBackend) -> Vec<i32> {
        let stream = backend.stream();
        let [index_q, index_k] = [(&self.index_q, HEADS), (&self.index_k, 1)]
            .map(|(values, heads)| self.upload(backend, values, [TOKENS, heads, INDEX_DIM]));
        let int = |values: &[i32]| {
            Tensor::from_slice(backend, &stream, values, [values.len()]).expect("memory")
        };
        let cu_seqlens = int(&[0, TOKENS as i32]);
        let positions = int(&(0..TOKENS as i32).collect::<Vec<_>>());
        let zeros =
            |dtype, shape: [usize; 3]| Tensor::zeros(backend, dtype, shape).expect("memory");
        let scores = zeros(DType::F32, [HEADS, TOKENS, BLOCKS]);
        let block_ids = zeros(DType::I32, [HEADS, TOKENS, TOPK]);
        let score = ops::MsaScore {
            index_q: &index_q,
            index_k: &index_k,
            cu_seqlens: &cu_seqlens,
            scores: &scores,
            block: BLOCK,
        };
        backend.msa_score(&stream, &score).expect("scored");
        let select = ops::BlockSelect {
            scores: &scores,
            positions: &positions,
            block_ids: &block_ids,
            block: BLOCK,
            init_blocks: 0,
            local_blocks: 1,
        };
        backend.block_select(&stream, &select).expect("selected");
        block_ids.to_vec(backend, &stream).expect("read")
    }

    fn upload(
        &self,
        backend: &CpuBackend,
        values: &[f64],
        shape: [usize; 3],
    ) -> Tensor<CpuBackend> {
        let stream = backend.stream();
        let tensor = if self.dtype == DType::BF16 {
            let values: Vec<_> = values.iter().map(|&x| half::bf16::from_f64(x)).collect();
            Tensor::from_slice(backend, &stream, &values, shape)
        } else {
            let values: Vec<_> = values.iter().map(|&x| x as f32).collect();
            Tensor::from_slice(backend, &stream, &values, shape)
        };
        tensor.expect("memory")
    }
}
