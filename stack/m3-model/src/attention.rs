//! The attention block, dense or block-sparse. Query, key, value and index projections lie in one fused weight, so that
//! one product serves all of them.

use m3_kernels::ops::{self, AttentionDims, attention_backward_workspace, map_capacity};
use m3_kernels::{Backend, Result, Tensor};
use m3_spec::config::{AttentionKind, IndexConfig, TextConfig};
use m3_spec::dtype::DType;

use crate::context::{Context, Placed};
use crate::linear;
use crate::parameters::{Parameter, Sharding, Slice};

/// Weights of the block.
pub struct Attention<B: Backend> {
    /// Rows `[q; k; v; index_q; index_k]`; the index rows are there in sparse layers alone and are not trained.
    pub qkv: Parameter<B>,
    /// `[H, Hq · D]`.
    pub o: Parameter<B>,
    /// `[D]`.
    pub q_norm: Parameter<B>,
    /// `[D]`.
    pub k_norm: Parameter<B>,
    /// The indexer, in sparse layers.
    pub indexer: Option<Indexer<B>>,
    layer: usize,
    sizes: Sizes,
}

/// What is the indexer's own: its norms, `[Di]` each, which are not trained.
pub struct Indexer<B: Backend> {
    /// Of the index queries.
    pub q_norm: Parameter<B>,
    /// Of the one index key head.
    pub k_norm: Parameter<B>,
    config: IndexConfig,
}

/// Extents and constants of the block.
#[derive(Clone)]
struct Sizes {
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
    eps: f32,
    /// In sparse layers.
    index: Option<IndexConfig>,
}

impl Sizes {
    fn q(&self) -> usize {
        self.q_heads * self.head_dim
    }

    fn kv(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Rows of the fused weight that are trained.
    fn trained(&self) -> usize {
        self.q() + 2 * self.kv()
    }

    /// Rows of the index queries; none in a dense layer.
    fn index_q(&self) -> usize {
        self.index
            .as_ref()
            .map_or(0, |index| index.num_heads * index.head_dim)
    }

    /// Rows of the one index key head; none in a dense layer.
    fn index_k(&self) -> usize {
        self.index.as_ref().map_or(0, |index| index.head_dim)
    }
}

/// What the gradient reads.
pub(crate) struct Saved<B: Backend> {
    fused: Tensor<B>,
    q: Normed<B>,
    k: Normed<B>,
    o: Tensor<B>,
    lse: Tensor<B>,
    /// Selected blocks, in sparse layers.
    pub(crate) block_ids: Option<Tensor<B>>,
}

/// Heads after norm and rotation, with what the gradient of both needs.
struct Normed<B: Backend> {
    out: Tensor<B>,
    rstd: Tensor<B>,
}

impl<B: Backend> Attention<B> {
    /// Zero weights.
    pub(crate) fn zeros(
        backend: &B,
        config: &TextConfig,
        layer: usize,
        dtype: DType,
        gradients: bool,
    ) -> Result<Self> {
        let sparse = config.attention[layer] == AttentionKind::Sparse;
        let index = config.index.as_ref().filter(|_| sparse);
        let sizes = Sizes {
            q_heads: config.num_q_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            scale: config.softmax_scale() as f32,
            eps: config.rms_norm_eps as f32,
            index: index.cloned(),
        };
        let index_rows = sizes.index_q() + sizes.index_k();
        let rows = sizes.trained() + index_rows;
        let hidden = config.hidden_size;
        let weight =
            |shape: &[usize], trained| Parameter::zeros(backend, dtype, shape, trained, gradients);
        let norm = |extent: usize| weight(&[extent], 0);
        let indexer = match index {
            Some(config) => Some(Indexer {
                q_norm: norm(config.head_dim)?,
                k_norm: norm(config.head_dim)?,
                config: config.clone(),
            }),
            None => None,
        };
        Ok(Attention {
            qkv: weight(&[rows, hidden], sizes.trained())?,
            o: weight(&[hidden, sizes.q()], hidden)?,
            q_norm: weight(&[sizes.head_dim], sizes.head_dim)?,
            k_norm: weight(&[sizes.head_dim], sizes.head_dim)?,
            indexer,
            layer,
            sizes,
        })
    }

    /// Every released tensor of the block.
    pub(crate) fn slices(&self, prefix: &str, slices: &mut Vec<Slice<B>>) {
        let name = |tensor: &str| format!("{prefix}self_attn.{tensor}.weight");
        let mut row = 0;
        let mut fused = |tensor: &str, rows: usize, sharding, trained| {
            row += rows;
            self.qkv
                .rows(name(tensor), row - rows..row, sharding, trained)
        };
        let sizes = &self.sizes;
        slices.push(fused("q_proj", sizes.q(), Sharding::Rows, true));
        slices.push(fused("k_proj", sizes.kv(), Sharding::Rows, true));
        slices.push(fused("v_proj", sizes.kv(), Sharding::Rows, true));
        slices.push(self.o.whole(name("o_proj"), Sharding::Columns, true));
        slices.push(
            self.q_norm
                .whole(name("q_norm"), Sharding::Replicated, true),
        );
        slices.push(
            self.k_norm
                .whole(name("k_norm"), Sharding::Replicated, true),
        );
        if let Some(indexer) = &self.indexer {
            slices.push(fused(
                "index_q_proj",
                sizes.index_q(),
                Sharding::Rows,
                false,
            ));
            slices.push(fused(
                "index_k_proj",
                sizes.index_k(),
                Sharding::Replicated,
                false,
            ));
            slices.push(
                indexer
                    .q_norm
                    .whole(name("index_q_norm"), Sharding::Replicated, false),
            );
            slices.push(
                indexer
                    .k_norm
                    .whole(name("index_k_norm"), Sharding::Replicated, false),
            );
        }
    }

    /// y `[T, H]` from the normalised rows x `[T, H]`.
    pub(crate) fn forward(
        &self,
        ctx: &mut Context<'_, B>,
        x: &Tensor<B>,
        y: &Tensor<B>,
    ) -> Result<Saved<B>> {
        let sizes = &self.sizes;
        let tokens = ctx.tokens();
        let fused = ctx.activation([tokens, self.qkv.value.shape()[0]])?;
        linear::forward(ctx, x, &self.qkv.value, &fused)?;
        let (q, k, v) = self.heads(&fused);
        let q = norm_rope(ctx, &q, &self.q_norm, sizes.eps)?;
        let k = norm_rope(ctx, &k, &self.k_norm, sizes.eps)?;
        let o = ctx.activation([tokens, sizes.q_heads, sizes.head_dim])?;
        let lse = ctx.alloc(DType::F32, [tokens, sizes.q_heads])?;
        let block_ids = match &self.indexer {
            Some(indexer) => Some(self.select(ctx, &fused, indexer)?),
            None => None,
        };
        let attend = Attend {
            q: &q.out,
            k: &k.out,
            v: &v,
            o: &o,
            lse: &lse,
        };
        match ctx.placed {
            None => self.attend_packed(ctx, &attend, &block_ids)?,
            Some(placed) => self.attend_cached(ctx, placed, &attend, &block_ids)?,
        }
        linear::forward(ctx, &o.reshape([tokens, sizes.q()]), &self.o.value, y)?;
        Ok(Saved {
            fused,
            q,
            k,
            o,
            lse,
            block_ids,
        })
    }

    fn attend_packed(
        &self,
        ctx: &Context<'_, B>,
        attend: &Attend<'_, B>,
        block_ids: &Option<Tensor<B>>,
    ) -> Result<()> {
        let &Attend { q, k, v, o, lse } = attend;
        let (scale, config) = (self.sizes.scale, ctx.constants.tiles);
        let cu_seqlens = &ctx.pack.cu_seqlens;
        let Some((indexer, block_ids)) = selection(&self.indexer, block_ids) else {
            let args = ops::Attention {
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
            return ctx.backend.attention(ctx.stream, &args);
        };
        let block = indexer.block_size;
        let args = ops::MsaAttention {
            q,
            k,
            v,
            cu_seqlens,
            block_ids,
            o,
            lse,
            block,
            scale,
            config,
        };
        ctx.backend.msa_attention(ctx.stream, &args)
    }

    /// Puts keys and values into the cache, then attends to all of the sequence that is there.
    fn attend_cached(
        &self,
        ctx: &Context<'_, B>,
        placed: Placed<'_, B>,
        attend: &Attend<'_, B>,
        block_ids: &Option<Tensor<B>>,
    ) -> Result<()> {
        let &Attend { q, k, v, o, lse } = attend;
        let pages = &placed.cache.layers[self.layer];
        page_write(ctx, placed, k, &pages.k)?;
        page_write(ctx, placed, v, &pages.v)?;
        let block = self
            .indexer
            .as_ref()
            .map_or(1, |indexer| indexer.config.block_size);
        let args = ops::PagedAttention {
            q,
            k_pages: &pages.k,
            v_pages: &pages.v,
            page_table: &placed.cache.page_table,
            slots: placed.slots,
            positions: &ctx.pack.positions,
            block_ids: block_ids.as_ref(),
            o,
            lse,
            block,
            scale: self.sizes.scale,
            config: ctx.constants.tiles,
        };
        ctx.backend.paged_attention(ctx.stream, &args)
    }

    /// dx `[T, H]` from dy `[T, H]`.
    pub(crate) fn backward(
        &self,
        ctx: &mut Context<'_, B>,
        x: &Tensor<B>,
        saved: &Saved<B>,
        dy: &Tensor<B>,
        dx: &Tensor<B>,
    ) -> Result<()> {
        let sizes = &self.sizes;
        let tokens = ctx.tokens();
        let d_o = ctx.activation([tokens, sizes.q()])?;
        linear::backward_input(ctx, dy, &self.o.value, &d_o, false)?;
        let o = saved.o.reshape([tokens, sizes.q()]);
        linear::backward_weight(ctx, dy, &o, self.o.grad.as_ref())?;

        let d_fused = ctx.activation([tokens, sizes.trained()])?;
        let (dq_raw, dk_raw, dv) = self.heads(&d_fused);
        let dq = ctx.activation([tokens, sizes.q_heads, sizes.head_dim])?;
        let dk = ctx.activation([tokens, sizes.kv_heads, sizes.head_dim])?;
        self.attend_backward(ctx, saved, &d_o.split_last(sizes.head_dim), [&dq, &dk, &dv])?;
        let (q, k, _) = self.heads(&saved.fused);
        norm_rope_backward(ctx, &q, &self.q_norm, &saved.q, &dq, &dq_raw)?;
        norm_rope_backward(ctx, &k, &self.k_norm, &saved.k, &dk, &dk_raw)?;

        let trained = self.qkv.value.slice(0, 0..sizes.trained());
        linear::backward_weight(ctx, &d_fused, x, self.qkv.grad.as_ref())?;
        linear::backward_input(ctx, &d_fused, &trained, dx, false)
    }

    fn attend_backward(
        &self,
        ctx: &mut Context<'_, B>,
        saved: &Saved<B>,
        d_o: &Tensor<B>,
        [dq, dk, dv]: [&Tensor<B>; 3],
    ) -> Result<()> {
        let sizes = &self.sizes;
        let sequences = ctx.pack.cu_seqlens.elements() - 1;
        let dims = AttentionDims {
            tokens: ctx.tokens(),
            q_heads: sizes.q_heads,
            kv_heads: sizes.kv_heads,
            head_dim: sizes.head_dim,
            sequences,
        };
        let (scale, config) = (sizes.scale, ctx.constants.tiles);
        let workspace = ctx.alloc(DType::F32, [attention_backward_workspace(&dims, config)])?;
        let (_, _, v) = self.heads(&saved.fused);
        let (q, k, o, lse) = (&saved.q.out, &saved.k.out, &saved.o, &saved.lse);
        let cu_seqlens = &ctx.pack.cu_seqlens;
        let Some((indexer, block_ids)) = selection(&self.indexer, &saved.block_ids) else {
            return ctx.backend.attention_backward(
                ctx.stream,
                &ops::AttentionBackward {
                    q,
                    k,
                    v: &v,
                    cu_seqlens,
                    o,
                    lse,
                    d_o,
                    dq,
                    dk,
                    dv,
                    workspace: &workspace,
                    scale,
                    causal: true,
                    config,
                },
            );
        };
        let map = TileMap::new(ctx, block_ids, indexer.block_size)?;
        ctx.backend.msa_attention_backward(
            ctx.stream,
            &ops::MsaAttentionBackward {
                q,
                k,
                v: &v,
                cu_seqlens,
                block_ids,
                block_offsets: &map.block_offsets,
                row_offsets: &map.row_offsets,
                queries: &map.queries,
                o,
                lse,
                d_o,
                dq,
                dk,
                dv,
                workspace: &workspace,
                block: indexer.block_size,
                scale,
                config,
            },
        )
    }

    /// Query, key and value heads of a fused row, or of its gradient.
    fn heads(&self, fused: &Tensor<B>) -> (Tensor<B>, Tensor<B>, Tensor<B>) {
        let (q, kv, head_dim) = (self.sizes.q(), self.sizes.kv(), self.sizes.head_dim);
        let part =
            |start: usize, width: usize| fused.slice(1, start..start + width).split_last(head_dim);
        (part(0, q), part(q, kv), part(q + kv, kv))
    }

    /// Blocks of every query and index head: the forced ones, or the indexer's own choice.
    fn select(
        &self,
        ctx: &mut Context<'_, B>,
        fused: &Tensor<B>,
        indexer: &Indexer<B>,
    ) -> Result<Tensor<B>> {
        if let Some(forced) = ctx.pack.replay.blocks.get(&self.layer) {
            return Ok(forced.clone());
        }
        let (sizes, config) = (&self.sizes, &indexer.config);
        let (tokens, start) = (ctx.tokens(), sizes.trained());
        let middle = start + sizes.index_q();
        let index_q = fused.slice(1, start..middle).split_last(config.head_dim);
        let index_k = fused
            .slice(1, middle..middle + sizes.index_k())
            .split_last(config.head_dim);
        let block_ids = ctx.alloc(DType::I32, [config.num_heads, tokens, config.topk_blocks])?;
        let start = ctx.arena.mark();
        let index_q = norm_rope(ctx, &index_q, &indexer.q_norm, sizes.eps)?.out;
        let index_k = norm_rope(ctx, &index_k, &indexer.k_norm, sizes.eps)?.out;
        let max_blocks = ctx.pack.longest.div_ceil(config.block_size);
        let scores = ctx.alloc(DType::F32, [config.num_heads, tokens, max_blocks])?;
        self.score(ctx, &index_q, &index_k, &scores, config.block_size)?;
        let select = ops::BlockSelect {
            scores: &scores,
            positions: &ctx.pack.positions,
            block_ids: &block_ids,
            block: config.block_size,
            init_blocks: config.init_blocks,
            local_blocks: config.local_blocks,
        };
        ctx.backend.block_select(ctx.stream, &select)?;
        // Operations of one stream run in order, so what only the selection needed can be handed out again.
        ctx.arena.reset(start);
        Ok(block_ids)
    }

    /// Scores of every visible block, against the pack or the cache.
    fn score(
        &self,
        ctx: &Context<'_, B>,
        index_q: &Tensor<B>,
        index_k: &Tensor<B>,
        scores: &Tensor<B>,
        block: usize,
    ) -> Result<()> {
        let pages = |placed: Placed<'_, B>| placed.cache.layers[self.layer].index_k.clone();
        if let (Some(placed), Some(index_k_pages)) = (ctx.placed, ctx.placed.and_then(pages)) {
            page_write(ctx, placed, index_k, &index_k_pages)?;
            let args = ops::PagedScore {
                index_q,
                index_k_pages: &index_k_pages,
                page_table: &placed.cache.page_table,
                slots: placed.slots,
                positions: &ctx.pack.positions,
                scores,
                block,
            };
            return ctx.backend.paged_score(ctx.stream, &args);
        }
        let cu_seqlens = &ctx.pack.cu_seqlens;
        let args = ops::MsaScore {
            index_q,
            index_k,
            cu_seqlens,
            scores,
            block,
        };
        ctx.backend.msa_score(ctx.stream, &args)
    }
}

/// Operands of an attention operation.
struct Attend<'a, B: Backend> {
    q: &'a Tensor<B>,
    k: &'a Tensor<B>,
    v: &'a Tensor<B>,
    o: &'a Tensor<B>,
    lse: &'a Tensor<B>,
}

fn page_write<B: Backend>(
    ctx: &Context<'_, B>,
    placed: Placed<'_, B>,
    rows: &Tensor<B>,
    pages: &Tensor<B>,
) -> Result<()> {
    let args = ops::PageWrite {
        rows,
        page_table: &placed.cache.page_table,
        slots: placed.slots,
        positions: &ctx.pack.positions,
        pages,
    };
    ctx.backend.page_write(ctx.stream, &args)
}

/// The indexer's configuration and the selected blocks of a sparse layer.
fn selection<'a, B: Backend>(
    indexer: &'a Option<Indexer<B>>,
    block_ids: &'a Option<Tensor<B>>,
) -> Option<(&'a IndexConfig, &'a Tensor<B>)> {
    Some((&indexer.as_ref()?.config, block_ids.as_ref()?))
}

/// The transpose of a selection.
struct TileMap<B: Backend> {
    block_offsets: Tensor<B>,
    row_offsets: Tensor<B>,
    queries: Tensor<B>,
}

impl<B: Backend> TileMap<B> {
    fn new(ctx: &mut Context<'_, B>, block_ids: &Tensor<B>, block: usize) -> Result<Self> {
        let shape = block_ids.shape();
        let (heads, tokens, topk) = (shape[0], shape[1], shape[2]);
        let sequences = ctx.pack.cu_seqlens.elements() - 1;
        let map = TileMap {
            block_offsets: ctx.alloc(DType::I32, [sequences + 1])?,
            row_offsets: ctx.alloc(
                DType::I32,
                [heads, map_capacity(tokens, sequences, block) + 1],
            )?,
            queries: ctx.alloc(DType::I32, [heads, tokens * topk])?,
        };
        let args = ops::TileMap {
            block_ids,
            cu_seqlens: &ctx.pack.cu_seqlens,
            block_offsets: &map.block_offsets,
            row_offsets: &map.row_offsets,
            queries: &map.queries,
            block,
        };
        ctx.backend.tile_map(ctx.stream, &args)?;
        Ok(map)
    }
}

fn norm_rope<B: Backend>(
    ctx: &mut Context<'_, B>,
    x: &Tensor<B>,
    weight: &Parameter<B>,
    eps: f32,
) -> Result<Normed<B>> {
    let shape = x.shape();
    let out = ctx.activation([shape[0], shape[1], shape[2]])?;
    let rstd = ctx.alloc(DType::F32, [shape[0], shape[1]])?;
    let args = ops::QkNormRope {
        x,
        weight: &weight.value,
        cos_sin: &ctx.constants.cos_sin,
        positions: &ctx.pack.positions,
        out: &out,
        rstd: &rstd,
        eps,
    };
    ctx.backend.qk_norm_rope(ctx.stream, &args)?;
    Ok(Normed { out, rstd })
}

fn norm_rope_backward<B: Backend>(
    ctx: &Context<'_, B>,
    x: &Tensor<B>,
    weight: &Parameter<B>,
    saved: &Normed<B>,
    d_out: &Tensor<B>,
    dx: &Tensor<B>,
) -> Result<()> {
    let Some(d_weight) = &weight.grad else {
        return Ok(());
    };
    let args = ops::QkNormRopeBackward {
        x,
        weight: &weight.value,
        cos_sin: &ctx.constants.cos_sin,
        positions: &ctx.pack.positions,
        rstd: &saved.rstd,
        d_out,
        dx,
        d_weight,
    };
    ctx.backend.qk_norm_rope_backward(ctx.stream, &args)
}
