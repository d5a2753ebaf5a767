//! Documents, and what the backend makes of a pack of them.

use half::bf16;
use m3_kernels::backend::Backend;
use m3_kernels::cpu::CpuBackend;
use m3_kernels::launch::{self, Arch, AttentionConfig};
use m3_kernels::ops::{self, AttentionDims, attention_backward_workspace, map_capacity};
use m3_kernels::tensor::as_bytes;
use m3_kernels::{Result, Shape, Tensor};
use m3_spec::dtype::DType;
use m3_spec::inputs::{Distribution, Inputs};

pub type CpuTensor = Tensor<CpuBackend>;

/// Heads and blocks.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    pub q: usize,
    pub kv: usize,
    pub dim: usize,
    pub block: usize,
    pub topk: usize,
}

impl Heads {
    pub fn group(&self) -> usize {
        self.q / self.kv
    }

    pub fn scale(&self) -> f32 {
        (self.dim as f32).powf(-0.5)
    }

    pub fn config(&self) -> AttentionConfig {
        launch::attention(self.block, self.dim, self.group(), Arch::Cpu)
    }
}

/// Which keys a query sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    Whole,
    Causal,
    Blocks,
}

/// One sequence with everything that its rows depend on.
#[derive(Clone, Debug)]
pub struct Document {
    pub length: usize,
    /// `[length, Hq, D]`
    pub q: Vec<f32>,
    /// `[length, Hkv, D]`
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    /// `[length, Hq, D]`
    pub d_o: Vec<f32>,
    /// `[Hkv][length][topk]`
    pub ids: Vec<Vec<i32>>,
}

impl Document {
    /// Seeded values that bf16 holds exactly, and a random selection with the own block in it.
    pub fn new(name: &str, heads: Heads, length: usize) -> Self {
        let inputs = Inputs::new(7, name);
        let normal = |label, len| {
            let drawn = inputs.bf16s(label, Distribution::Normal { std: 1.0 }, len);
            drawn.into_iter().map(f32::from).collect()
        };
        let (q_len, kv_len) = (length * heads.q * heads.dim, length * heads.kv * heads.dim);
        let ids = (0..heads.kv).map(|head| random_ids(&inputs, heads, head, length));
        Document {
            length,
            q: normal("q", q_len),
            k: normal("k", kv_len),
            v: normal("v", kv_len),
            d_o: normal("d_o", q_len),
            ids: ids.collect(),
        }
    }

    /// The same document with every block selected that causality lets a query see.
    pub fn selecting_all(&self, heads: Heads) -> (Document, Heads) {
        let topk = self.length.div_ceil(heads.block).max(1);
        let row = |token: usize| {
            let own = token / heads.block;
            (0..topk).map(move |slot| if slot <= own { slot as i32 } else { -1 })
        };
        let ids: Vec<i32> = (0..self.length).flat_map(row).collect();
        let document = Document {
            ids: vec![ids; heads.kv],
            ..self.clone()
        };
        (document, Heads { topk, ..heads })
    }

    /// Its first `length` tokens.
    pub fn prefix(&self, heads: Heads, length: usize) -> Document {
        let cut = |rows: &[f32], width| rows[..length * width].to_vec();
        let ids = self
            .ids
            .iter()
            .map(|ids| ids[..length * heads.topk].to_vec());
        Document {
            length,
            q: cut(&self.q, heads.q * heads.dim),
            k: cut(&self.k, heads.kv * heads.dim),
            v: cut(&self.v, heads.kv * heads.dim),
            d_o: cut(&self.d_o, heads.q * heads.dim),
            ids: ids.collect(),
        }
    }

    /// Ids of a token and head, without the tail.
    pub fn blocks(&self, heads: Heads, head: usize, token: usize) -> Vec<usize> {
        let ids = &self.ids[head][token * heads.topk..][..heads.topk];
        let selected = ids.iter().take_while(|&&id| id >= 0);
        selected.map(|&id| id as usize).collect()
    }

    /// Whether a query sees a key.
    pub fn sees(&self, heads: Heads, rule: Rule, head: usize, query: usize, key: usize) -> bool {
        match rule {
            Rule::Whole => true,
            Rule::Causal => key <= query,
            Rule::Blocks => {
                key <= query
                    && self
                        .blocks(heads, head, query)
                        .contains(&(key / heads.block))
            }
        }
    }
}

fn random_ids(inputs: &Inputs, heads: Heads, head: usize, length: usize) -> Vec<i32> {
    let mut ids = Vec::new();
    for token in 0..length {
        let own = token / heads.block;
        let label = format!("ids {head} {token}");
        let keys = inputs.integers(&label, u32::MAX, own);
        let mut others: Vec<usize> = (0..own).collect();
        others.sort_by_key(|&block| keys[block]);
        others.truncate(heads.topk - 1);
        others.push(own);
        others.sort_unstable();
        let tail = std::iter::repeat(-1);
        ids.extend(
            others
                .into_iter()
                .map(|b| b as i32)
                .chain(tail)
                .take(heads.topk),
        );
    }
    ids
}

/// What the backend wrote for one document (or for the tokens outside all of them), widened.
#[derive(Clone, Debug)]
pub struct Results {
    pub o: Vec<f32>,
    pub lse: Vec<f32>,
    pub dq: Vec<f32>,
    pub dk: Vec<f32>,
    pub dv: Vec<f32>,
}

impl Results {
    /// Bits of everything, to be compared.
    pub fn bits(&self) -> [Vec<u32>; 5] {
        [&self.o, &self.lse, &self.dq, &self.dk, &self.dv].map(|x| bits(x))
    }
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// How operands lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    Dense,
    /// q, k, v and their gradients are slices of fused rows, ids a strided view; what lies between is poison.
    Fused,
}

/// A backend, and how a pack is handed to it.
pub struct Lab {
    pub backend: CpuBackend,
    pub dtype: DType,
    pub layout: Layout,
    pub heads: Heads,
    pub rule: Rule,
    pub config: AttentionConfig,
    /// Tokens of the pack behind the last document, filled with NaN.
    pub outside: usize,
}

impl Lab {
    pub fn new(dtype: DType, heads: Heads, rule: Rule) -> Self {
        Lab {
            backend: CpuBackend::new(2).unwrap(),
            dtype,
            layout: Layout::Dense,
            heads,
            rule,
            config: heads.config(),
            outside: 0,
        }
    }

    /// Forward and backward; one entry a document, and one for the tokens outside.
    pub fn run(&self, documents: &[&Document]) -> Vec<Results> {
        self.try_run(documents).unwrap()
    }

    pub fn try_run(&self, documents: &[&Document]) -> Result<Vec<Results>> {
        let Heads { q, kv, dim, .. } = self.heads;
        let tokens = documents.iter().map(|d| d.length).sum::<usize>() + self.outside;
        let gather = |rows: fn(&Document) -> &[f32], width: usize| {
            let mut all: Vec<f32> = documents.iter().flat_map(|d| rows(d)).copied().collect();
            all.resize(tokens * width, f32::NAN);
            all
        };
        let shapes = [[tokens, q, dim], [tokens, kv, dim], [tokens, kv, dim]];
        let [q_rows, k_rows, v_rows] = self.rows(shapes);
        self.put(&q_rows, &gather(|d| &d.q, q * dim));
        self.put(&k_rows, &gather(|d| &d.k, kv * dim));
        self.put(&v_rows, &gather(|d| &d.v, kv * dim));
        let d_o = self.tensor(self.dtype, shapes[0]);
        self.put(&d_o, &gather(|d| &d.d_o, q * dim));
        let o = self.tensor(self.dtype, shapes[0]);
        let lse = self.tensor(DType::F32, [tokens, q]);
        let [dq, dk, dv] = self.rows(shapes);
        let mut ends = vec![0];
        for document in documents {
            ends.push(ends[ends.len() - 1] + document.length as i32);
        }
        let cu_seqlens = self.ints(&ends, [ends.len()]);
        let dims = AttentionDims {
            tokens,
            q_heads: q,
            kv_heads: kv,
            head_dim: dim,
            sequences: documents.len(),
        };
        let needed = attention_backward_workspace(&dims, self.config);
        let operands = Operands {
            q: q_rows,
            k: k_rows,
            v: v_rows,
            d_o,
            cu_seqlens,
            o,
            lse,
            dq,
            dk,
            dv,
            workspace: self.tensor(DType::F32, [needed]),
            ids: self.ids(documents, tokens),
        };
        match self.rule {
            Rule::Blocks => self.sparse(&operands, &dims)?,
            _ => self.dense(&operands)?,
        }
        Ok(self.split(&operands, &ends, tokens))
    }

    fn dense(&self, x: &Operands) -> Result<()> {
        let (scale, config) = (self.heads.scale(), self.config);
        let causal = self.rule == Rule::Causal;
        let forward = ops::Attention {
            q: &x.q,
            k: &x.k,
            v: &x.v,
            cu_seqlens: &x.cu_seqlens,
            o: &x.o,
            lse: &x.lse,
            scale,
            causal,
            config,
        };
        self.backend.attention(&self.backend.stream(), &forward)?;
        let backward = ops::AttentionBackward {
            q: &x.q,
            k: &x.k,
            v: &x.v,
            cu_seqlens: &x.cu_seqlens,
            o: &x.o,
            lse: &x.lse,
            d_o: &x.d_o,
            dq: &x.dq,
            dk: &x.dk,
            dv: &x.dv,
            workspace: &x.workspace,
            scale,
            causal,
            config,
        };
        self.backend
            .attention_backward(&self.backend.stream(), &backward)
    }

    fn sparse(&self, x: &Operands, dims: &AttentionDims) -> Result<()> {
        let Heads {
            kv, block, topk, ..
        } = self.heads;
        let (scale, config) = (self.heads.scale(), self.config);
        let stream = self.backend.stream();
        let forward = ops::MsaAttention {
            q: &x.q,
            k: &x.k,
            v: &x.v,
            cu_seqlens: &x.cu_seqlens,
            block_ids: &x.ids,
            o: &x.o,
            lse: &x.lse,
            block,
            scale,
            config,
        };
        self.backend.msa_attention(&stream, &forward)?;
        let rows = map_capacity(dims.tokens, dims.sequences, block);
        let block_offsets = self.tensor(DType::I32, [dims.sequences + 1]);
        let row_offsets = self.tensor(DType::I32, [kv, rows + 1]);
        let queries = self.tensor(DType::I32, [kv, dims.tokens * topk]);
        let map = ops::TileMap {
            block_ids: &x.ids,
            cu_seqlens: &x.cu_seqlens,
            block_offsets: &block_offsets,
            row_offsets: &row_offsets,
            queries: &queries,
            block,
        };
        self.backend.tile_map(&stream, &map)?;
        let backward = ops::MsaAttentionBackward {
            q: &x.q,
            k: &x.k,
            v: &x.v,
            cu_seqlens: &x.cu_seqlens,
            block_ids: &x.ids,
            block_offsets: &block_offsets,
            row_offsets: &row_offsets,
            queries: &queries,
            o: &x.o,
            lse: &x.lse,
            d_o: &x.d_o,
            dq: &x.dq,
            dk: &x.dk,
            dv: &x.dv,
            workspace: &x.workspace,
            block,
            scale,
            config,
        };
        self.backend.msa_attention_backward(&stream, &backward)
    }

    /// Three row tensors: of their own, or slices of one fused row with gaps.
    fn rows(&self, shapes: [[usize; 3]; 3]) -> [CpuTensor; 3] {
        if self.layout == Layout::Dense {
            return shapes.map(|shape| self.tensor(self.dtype, shape));
        }
        let tokens = shapes[0][0];
        let widths = shapes.map(|[_, heads, dim]| heads * dim);
        let fused = self.tensor(self.dtype, [tokens, widths.iter().sum::<usize>() + 12]);
        let mut first = 0;
        [0, 1, 2].map(|i| {
            first += 3;
            let slice = fused.slice(1, first..first + widths[i]);
            first += widths[i];
            slice.split_last(shapes[i][2])
        })
    }

    /// Ids of the pack, −1 outside; in the fused layout a transposed slice of `[T, Hkv, topk + 1]`.
    fn ids(&self, documents: &[&Document], tokens: usize) -> CpuTensor {
        let Heads { kv, topk, .. } = self.heads;
        let mut all = Vec::new();
        for head in 0..kv {
            all.extend(documents.iter().flat_map(|d| &d.ids[head]).copied());
            all.resize((head + 1) * tokens * topk, -1);
        }
        if self.layout == Layout::Dense {
            return self.ints(&all, [kv, tokens, topk]);
        }
        let wide = self.tensor(DType::I32, [tokens, kv, topk + 1]);
        let view = wide.slice(2, 0..topk).transpose(0, 1);
        let stream = self.backend.stream();
        self.backend.upload(&stream, &view, as_bytes(&all)).unwrap();
        view
    }

    /// A tensor full of poison: NaN, or ids that no sequence has.
    pub fn tensor(&self, dtype: DType, shape: impl Into<Shape>) -> CpuTensor {
        let tensor = Tensor::zeros(&self.backend, dtype, shape).unwrap();
        match dtype {
            DType::I32 => {
                let poison = vec![i32::MAX; tensor.elements()];
                let stream = self.backend.stream();
                self.backend
                    .upload(&stream, &tensor, as_bytes(&poison))
                    .unwrap();
            }
            _ => self.put(&tensor, &vec![f32::NAN; tensor.elements()]),
        }
        tensor
    }

    pub fn ints(&self, values: &[i32], shape: impl Into<Shape>) -> CpuTensor {
        Tensor::from_slice(&self.backend, &self.backend.stream(), values, shape).unwrap()
    }

    pub fn put(&self, tensor: &CpuTensor, values: &[f32]) {
        let stream = self.backend.stream();
        let uploaded = match tensor.dtype() {
            DType::BF16 => {
                let narrow: Vec<bf16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
                self.backend.upload(&stream, tensor, as_bytes(&narrow))
            }
            _ => self.backend.upload(&stream, tensor, as_bytes(values)),
        };
        uploaded.unwrap();
    }

    pub fn get(&self, tensor: &CpuTensor) -> Vec<f32> {
        let stream = self.backend.stream();
        match tensor.dtype() {
            DType::BF16 => {
                let narrow: Vec<bf16> = tensor.to_vec(&self.backend, &stream).unwrap();
                narrow.into_iter().map(f32::from).collect()
            }
            _ => tensor.to_vec(&self.backend, &stream).unwrap(),
        }
    }

    fn split(&self, x: &Operands, ends: &[i32], tokens: usize) -> Vec<Results> {
        let all = [&x.o, &x.lse, &x.dq, &x.dk, &x.dv].map(|tensor| self.get(tensor));
        let mut bounds: Vec<usize> = ends.iter().map(|&end| end as usize).collect();
        bounds.push(tokens);
        let part = |x: &[f32], first: usize, end: usize| {
            let width = x.len() / tokens.max(1);
            x[first * width..end * width].to_vec()
        };
        let parts = bounds.windows(2).map(|pair| {
            let [o, lse, dq, dk, dv] = [0, 1, 2, 3, 4].map(|i| part(&all[i], pair[0], pair[1]));
            Results { o, lse, dq, dk, dv }
        });
        parts.collect()
    }
}

struct Operands {
    q: CpuTensor,
    k: CpuTensor,
    v: CpuTensor,
    d_o: CpuTensor,
    cu_seqlens: CpuTensor,
    o: CpuTensor,
    lse: CpuTensor,
    dq: CpuTensor,
    dk: CpuTensor,
    dv: CpuTensor,
    workspace: CpuTensor,
    ids: CpuTensor,
}
