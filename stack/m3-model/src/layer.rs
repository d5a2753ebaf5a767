//! A decoder layer: norm, attention, norm, MLP or mixture of experts. Which of each is data.

use m3_kernels::{Backend, Result, Tensor};
use m3_spec::config::{MlpKind, TextConfig};
use m3_spec::dtype::DType;

use crate::attention::{self, Attention};
use crate::context::Context;
use crate::mlp::{self, Mlp};
use crate::moe::{self, Moe};
use crate::norm::{self, Stream};
use crate::parameters::{Parameter, Sharding, Slice};

/// Weights of a layer.
pub struct Layer<B: Backend> {
    /// Before attention, `[H]`.
    pub input_norm: Parameter<B>,
    /// Attention block.
    pub attention: Attention<B>,
    /// Before the feed-forward block, `[H]`.
    pub post_attention_norm: Parameter<B>,
    /// Feed-forward block.
    pub feed_forward: FeedForward<B>,
    eps: f32,
}

/// The second half of a layer.
pub enum FeedForward<B: Backend> {
    /// Dense MLP.
    Dense(Box<Mlp<B>>),
    /// Mixture of experts.
    Moe(Box<Moe<B>>),
}

/// What the gradient of a layer reads. It may be dropped and rebuilt from the layer's input.
pub struct Saved<B: Backend> {
    before_attention: norm::Saved<B>,
    attention: attention::Saved<B>,
    before_feed_forward: norm::Saved<B>,
    feed_forward: SavedFeedForward<B>,
}

enum SavedFeedForward<B: Backend> {
    Dense(mlp::Saved<B>),
    Moe(Box<moe::Saved<B>>),
}

impl<B: Backend> Saved<B> {
    /// Blocks that the layer attended to, I32 `[index_heads, T, topk]`; none in a dense layer.
    pub fn block_ids(&self) -> Option<&Tensor<B>> {
        self.attention.block_ids.as_ref()
    }

    /// Experts I32 `[T, k]` and their weights F32 `[T, k]`; none in a dense layer.
    pub fn experts(&self) -> Option<(&Tensor<B>, &Tensor<B>)> {
        match &self.feed_forward {
            SavedFeedForward::Dense(_) => None,
            SavedFeedForward::Moe(saved) => Some((&saved.expert_ids, &saved.weights)),
        }
    }
}

impl<B: Backend> Layer<B> {
    /// Zero weights.
    pub(crate) fn zeros(
        backend: &B,
        config: &TextConfig,
        layer: usize,
        dtype: DType,
        gradients: bool,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        let norm = || Parameter::zeros(backend, dtype, &[hidden], hidden, gradients);
        let feed_forward = match config
            .moe
            .as_ref()
            .filter(|_| config.mlp[layer] == MlpKind::Moe)
        {
            Some(moe) => FeedForward::Moe(Box::new(Moe::zeros(
                backend, config, moe, layer, dtype, gradients,
            )?)),
            None => {
                let width = config.dense_intermediate_size;
                FeedForward::Dense(Box::new(Mlp::zeros(
                    backend, config, width, dtype, gradients,
                )?))
            }
        };
        Ok(Layer {
            input_norm: norm()?,
            attention: Attention::zeros(backend, config, layer, dtype, gradients)?,
            post_attention_norm: norm()?,
            feed_forward,
            eps: config.rms_norm_eps as f32,
        })
    }

    /// Every released tensor of the layer.
    pub(crate) fn slices(&self, prefix: &str, slices: &mut Vec<Slice<B>>) {
        let norm = |name: &str, parameter: &Parameter<B>| {
            parameter.whole(format!("{prefix}{name}.weight"), Sharding::Replicated, true)
        };
        slices.push(norm("input_layernorm", &self.input_norm));
        self.attention.slices(prefix, slices);
        slices.push(norm("post_attention_layernorm", &self.post_attention_norm));
        match &self.feed_forward {
            FeedForward::Dense(mlp) => mlp.slices(&format!("{prefix}mlp."), slices),
            FeedForward::Moe(moe) => moe.slices(prefix, slices),
        }
    }

    /// Writes the stream behind the layer into `out`, whose memory outlives [`Saved`].
    pub(crate) fn forward(
        &self,
        ctx: &mut Context<'_, B>,
        x: &Stream<B>,
        out: &Output<B>,
    ) -> Result<Saved<B>> {
        let [tokens, hidden] = [ctx.tokens(), x.residual.shape()[1]];
        let before_attention = norm::forward(ctx, x, None, &self.input_norm, self.eps)?;
        let y = ctx.activation([tokens, hidden])?;
        let attention = self.attention.forward(ctx, &before_attention.out, &y)?;
        let middle = Stream {
            residual: before_attention.residual.clone(),
            branch: Some(y),
        };
        let before_feed_forward = norm::forward(
            ctx,
            &middle,
            Some(&out.residual),
            &self.post_attention_norm,
            self.eps,
        )?;
        let (x, y) = (&before_feed_forward.out, &out.branch);
        let feed_forward = match &self.feed_forward {
            FeedForward::Dense(mlp) => SavedFeedForward::Dense(mlp.forward(ctx, x, y)?),
            FeedForward::Moe(moe) => SavedFeedForward::Moe(Box::new(moe.forward(ctx, x, y)?)),
        };
        Ok(Saved {
            before_attention,
            attention,
            before_feed_forward,
            feed_forward,
        })
    }

    /// Gradient of the stream before the layer, from the gradient `d_out` of the stream behind it.
    ///
    /// The gradient of a stream is that of its sum, which residual and branch share.
    pub(crate) fn backward(
        &self,
        ctx: &mut Context<'_, B>,
        saved: &Saved<B>,
        d_out: &Tensor<B>,
        dx: &Tensor<B>,
    ) -> Result<()> {
        let [tokens, hidden] = [ctx.tokens(), d_out.shape()[1]];
        let d_normed = ctx.activation([tokens, hidden])?;
        let d_middle = ctx.activation([tokens, hidden])?;
        let x = &saved.before_feed_forward.out;
        match (&self.feed_forward, &saved.feed_forward) {
            (FeedForward::Dense(mlp), SavedFeedForward::Dense(saved)) => {
                mlp.backward(ctx, x, saved, d_out, &d_normed, false)?;
            }
            (FeedForward::Moe(moe), SavedFeedForward::Moe(saved)) => {
                moe.backward(ctx, x, saved, d_out, &d_normed)?;
            }
            _ => unreachable!("a layer reads what its own forward pass saved"),
        }
        let weight = &self.post_attention_norm;
        norm::backward(
            ctx,
            &saved.before_feed_forward,
            weight,
            &d_normed,
            Some(d_out),
            &d_middle,
        )?;
        let x = &saved.before_attention.out;
        let d_normed = ctx.activation([tokens, hidden])?;
        self.attention
            .backward(ctx, x, &saved.attention, &d_middle, &d_normed)?;
        norm::backward(
            ctx,
            &saved.before_attention,
            &self.input_norm,
            &d_normed,
            Some(&d_middle),
            dx,
        )
    }
}

/// Memory for the stream behind a layer.
pub(crate) struct Output<B: Backend> {
    pub(crate) residual: Tensor<B>,
    pub(crate) branch: Tensor<B>,
}

impl<B: Backend> Output<B> {
    pub(crate) fn new(ctx: &mut Context<'_, B>, hidden: usize) -> Result<Self> {
        let tokens = ctx.tokens();
        Ok(Output {
            residual: ctx.activation([tokens, hidden])?,
            branch: ctx.activation([tokens, hidden])?,
        })
    }

    pub(crate) fn stream(&self) -> Stream<B> {
        Stream {
            residual: self.residual.clone(),
            branch: Some(self.branch.clone()),
        }
    }
}
