//! The operations over a pack, on the CPU.

use m3_kernels::cpu::CpuBackend;
use m3_kernels::launch::AttentionConfig;
use m3_kernels::ops::{self, AttentionDims, attention_backward_workspace, map_capacity};
use m3_kernels::{Backend, Result, Shape, Tensor};
use m3_spec::dtype::DType;

use crate::pack::Pack;

/// q, k, v, d_o in f32 and a selection.
#[derive(Clone)]
pub struct Operands {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub d_o: Vec<f32>,
    pub block_ids: Vec<i32>,
}

impl Operands {
    /// The same for some tokens of the pack, in this order.
    pub fn gather(&self, pack: &Pack, tokens: &[usize]) -> Self {
        let (q_width, kv_width) = (
            pack.q_heads() * pack.head_dim,
            pack.kv_heads * pack.head_dim,
        );
        let rows = |values: &[f32], width: usize| {
            let row = |&token: &usize| &values[token * width..][..width];
            tokens.iter().flat_map(row).copied().collect()
        };
        let heads = self.block_ids.chunks_exact(pack.tokens() * pack.topk);
        let ids = |head: &[i32]| {
            let row = |&token: &usize| head[token * pack.topk..][..pack.topk].to_vec();
            tokens.iter().flat_map(row).collect::<Vec<_>>()
        };
        Operands {
            q: rows(&self.q, q_width),
            k: rows(&self.k, kv_width),
            v: rows(&self.v, kv_width),
            d_o: rows(&self.d_o, q_width),
            block_ids: heads.flat_map(ids).collect(),
        }
    }

    /// Normal values and the pack's own selection.
    pub fn normal(pack: &Pack) -> Self {
        let (q_width, kv_width) = (
            pack.q_heads() * pack.head_dim,
            pack.kv_heads * pack.head_dim,
        );
        Operands {
            q: pack.normal("q", q_width),
            k: pack.normal("k", kv_width),
            v: pack.normal("v", kv_width),
            d_o: pack.normal("d_o", q_width),
            block_ids: pack.selection(),
        }
    }
}

/// The transpose of a selection.
#[derive(Debug, PartialEq)]
pub struct Map {
    pub block_offsets: Vec<i32>,
    /// `[Hkv, R + 1]`
    pub row_offsets: Vec<i32>,
    /// `[Hkv, T · topk]`
    pub queries: Vec<i32>,
}

/// What attention writes, as bits where it is compared for identity.
pub struct Results {
    /// `[T, Hq, D]`
    pub o: Vec<f32>,
    /// `[T, Hq]`
    pub lse: Vec<f32>,
    /// `[T, Hq, D]`
    pub dq: Vec<f32>,
    /// `[T, Hkv, D]`
    pub dk: Vec<f32>,
    /// `[T, Hkv, D]`
    pub dv: Vec<f32>,
}

impl Results {
    /// Name, values and values a token of every tensor.
    pub fn tensors<'a>(&'a self, pack: &Pack) -> [(&'static str, &'a [f32], usize); 5] {
        let (q_heads, head_dim) = (pack.q_heads(), pack.head_dim);
        let kv_width = pack.kv_heads * head_dim;
        [
            ("o", &self.o, q_heads * head_dim),
            ("lse", &self.lse, q_heads),
            ("dq", &self.dq, q_heads * head_dim),
            ("dk", &self.dk, kv_width),
            ("dv", &self.dv, kv_width),
        ]
    }

    /// The bits of some tokens, of all tensors.
    pub fn bits(&self, pack: &Pack, tokens: std::ops::Range<usize>) -> Vec<u32> {
        let rows = |(_, values, width): (&str, &[f32], usize)| {
            let rows = &values[tokens.start * width..tokens.end * width];
            rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        self.tensors(pack).into_iter().flat_map(rows).collect()
    }
}

/// A pack's tensors on the device; outputs start as NaN, integers as a value that is no id.
pub struct Walk<'a> {
    backend: &'a CpuBackend,
    pack: &'a Pack,
    cu_seqlens: Tensor<CpuBackend>,
    block_ids: Tensor<CpuBackend>,
    map: [Tensor<CpuBackend>; 3],
}

impl<'a> Walk<'a> {
    pub fn new(backend: &'a CpuBackend, pack: &'a Pack, block_ids: &[i32]) -> Self {
        let ends = pack.cu_seqlens();
        let (tokens, sequences) = (pack.tokens(), ends.len() - 1);
        let rows = map_capacity(tokens, sequences, pack.block);
        let entries = tokens * pack.topk;
        Walk {
            backend,
            pack,
            cu_seqlens: given(backend, &ends, [ends.len()]),
            block_ids: given(backend, block_ids, [pack.kv_heads, tokens, pack.topk]),
            map: [
                poisoned(backend, DType::I32, [sequences + 1]),
                poisoned(backend, DType::I32, [pack.kv_heads, rows + 1]),
                poisoned(backend, DType::I32, [pack.kv_heads, entries]),
            ],
        }
    }

    /// The tile map.
    ///
    /// # Errors
    /// What the operation refuses.
    pub fn map(&self) -> Result<Map> {
        let [block_offsets, row_offsets, queries] = &self.map;
        let args = ops::TileMap {
            block_ids: &self.block_ids,
            cu_seqlens: &self.cu_seqlens,
            block_offsets,
            row_offsets,
            queries,
            block: self.pack.block,
        };
        let stream = self.backend.stream();
        self.backend.tile_map(&stream, &args)?;
        Ok(Map {
            block_offsets: block_offsets.to_vec(self.backend, &stream)?,
            row_offsets: row_offsets.to_vec(self.backend, &stream)?,
            queries: queries.to_vec(self.backend, &stream)?,
        })
    }

    /// Forward and backward.
    ///
    /// # Errors
    /// What an operation refuses.
    pub fn attention(&self, given_operands: &Operands, scale: f32) -> Result<Results> {
        let (backend, pack, stream) = (self.backend, self.pack, self.backend.stream());
        let (tokens, head_dim) = (pack.tokens(), pack.head_dim);
        let (q_shape, kv_shape) = (
            [tokens, pack.q_heads(), head_dim],
            [tokens, pack.kv_heads, head_dim],
        );
        let q = given(backend, &given_operands.q, q_shape);
        let k = given(backend, &given_operands.k, kv_shape);
        let v = given(backend, &given_operands.v, kv_shape);
        let d_o = given(backend, &given_operands.d_o, q_shape);
        let o = poisoned(backend, DType::F32, q_shape);
        let lse = poisoned(backend, DType::F32, [tokens, pack.q_heads()]);
        let config = self.config();
        let forward = ops::MsaAttention {
            q: &q,
            k: &k,
            v: &v,
            cu_seqlens: &self.cu_seqlens,
            block_ids: &self.block_ids,
            o: &o,
            lse: &lse,
            block: pack.block,
            scale,
            config,
        };
        backend.msa_attention(&stream, &forward)?;
        self.map()?;
        let dims = AttentionDims {
            tokens,
            q_heads: pack.q_heads(),
            kv_heads: pack.kv_heads,
            head_dim,
            sequences: self.cu_seqlens.elements() - 1,
        };
        let workspace = attention_backward_workspace(&dims, config);
        let workspace = poisoned(backend, DType::F32, [workspace]);
        let dq = poisoned(backend, DType::F32, q_shape);
        let [dk, dv] = [kv_shape; 2].map(|shape| poisoned(backend, DType::F32, shape));
        let [block_offsets, row_offsets, queries] = &self.map;
        let backward = ops::MsaAttentionBackward {
            q: &q,
            k: &k,
            v: &v,
            cu_seqlens: &self.cu_seqlens,
            block_ids: &self.block_ids,
            block_offsets,
            row_offsets,
            queries,
            o: &o,
            lse: &lse,
            d_o: &d_o,
            dq: &dq,
            dk: &dk,
            dv: &dv,
            workspace: &workspace,
            block: pack.block,
            scale,
            config,
        };
        backend.msa_attention_backward(&stream, &backward)?;
        let read = |tensor: &Tensor<CpuBackend>| tensor.to_vec(backend, &stream);
        Ok(Results {
            o: read(&o)?,
            lse: read(&lse)?,
            dq: read(&dq)?,
            dk: read(&dk)?,
            dv: read(&dv)?,
        })
    }

    /// o and lse of dense causal attention.
    ///
    /// # Errors
    /// What the operation refuses.
    pub fn dense(&self, operands: &Operands, scale: f32) -> Result<(Vec<f32>, Vec<f32>)> {
        let (backend, pack, stream) = (self.backend, self.pack, self.backend.stream());
        let q_shape = [pack.tokens(), pack.q_heads(), pack.head_dim];
        let kv_shape = [pack.tokens(), pack.kv_heads, pack.head_dim];
        let o = poisoned(backend, DType::F32, q_shape);
        let lse = poisoned(backend, DType::F32, [pack.tokens(), pack.q_heads()]);
        let args = ops::Attention {
            q: &given(backend, &operands.q, q_shape),
            k: &given(backend, &operands.k, kv_shape),
            v: &given(backend, &operands.v, kv_shape),
            cu_seqlens: &self.cu_seqlens,
            o: &o,
            lse: &lse,
            scale,
            causal: true,
            config: self.config(),
        };
        backend.attention(&stream, &args)?;
        Ok((o.to_vec(backend, &stream)?, lse.to_vec(backend, &stream)?))
    }

    fn config(&self) -> AttentionConfig {
        AttentionConfig {
            key_tile: self.pack.key_tile,
            query_tile: self.pack.query_tile,
            head_splits: self.pack.head_splits,
        }
    }
}

/// Attention with normal values' usual scale.
pub fn attention(backend: &CpuBackend, pack: &Pack, operands: &Operands) -> Results {
    let scale = (pack.head_dim as f32).powf(-0.5);
    Walk::new(backend, pack, &operands.block_ids)
        .attention(operands, scale)
        .expect("the pack is well formed")
}

fn given<E: m3_kernels::tensor::Element>(
    backend: &CpuBackend,
    values: &[E],
    shape: impl Into<Shape>,
) -> Tensor<CpuBackend> {
    Tensor::from_slice(backend, &backend.stream(), values, shape).expect("memory")
}

fn poisoned(backend: &CpuBackend, dtype: DType, shape: impl Into<Shape>) -> Tensor<CpuBackend> {
    let tensor = Tensor::zeros(backend, dtype, shape).expect("memory");
    let poison = if dtype == DType::I32 { 0x7f } else { 0xff };
    let bytes = vec![poison; tensor.elements() * dtype.size()];
    backend
        .upload(&backend.stream(), &tensor, &bytes)
        .expect("upload");
    tensor
}
