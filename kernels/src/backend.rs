//! The contract both backends keep.
//!
//! An operation takes a stream and a struct of operands from [`crate::ops`] and only enqueues. No signature holds host
//! data: what varies from step to step (cu_seqlens, ids, routes, learning rate, temperature, …) lies in buffers, what
//! never varies during a run (eps, softmax scale, clip limits) is a plain field, so a whole step can be captured in a
//! CUDA graph. Only [`Backend::upload`], [`Backend::download`] and [`Backend::sync`] cross to the host.
//!
//! Promises of every default path: same inputs, same bits, whatever the thread count or batch neighbours; no float
//! atomics; a fixed reduction order; a row's bits depend on its own inputs alone.

use crate::error::Result;
use crate::launch::Arch;
use crate::ops;
use crate::tensor::Tensor;

/// Every operation, once: documentation, method, operands, and the file stem that implements it in each backend.
macro_rules! for_each_operation {
    ($then:ident) => {
        $then! {
            /// Strided copy with a cast; one rounding where the destination is narrower.
            copy: Copy in elementwise,
            /// Every element set to one value.
            fill: Fill in elementwise,
            /// `target += source` in fp32.
            accumulate: Accumulate in elementwise,
            /// Position-keyed digest of a tensor's bits.
            digest: Digest in elementwise,
            /// Rows of the embedding table.
            embedding: Embedding in embedding,
            /// Gradient of the embedding table.
            embedding_backward: EmbeddingBackward in embedding,
            /// Matrix product of strided operands.
            gemm: Gemm in linear,
            /// Residual add and gemma RMSNorm.
            rms_norm: RmsNorm in rms_norm,
            /// Gradient of residual add and norm.
            rms_norm_backward: RmsNormBackward in rms_norm,
            /// Per-head gemma norm and partial rotary embedding.
            qk_norm_rope: QkNormRope in qk_norm_rope,
            /// Gradient of per-head norm and rotary embedding.
            qk_norm_rope_backward: QkNormRopeBackward in qk_norm_rope,
            /// Dense grouped-query attention over packed sequences.
            attention: Attention in attention,
            /// Gradient of dense attention.
            attention_backward: AttentionBackward in attention,
            /// Block maxima of the index scores.
            msa_score: MsaScore in msa_score,
            /// The k best blocks of every query and index head.
            block_select: BlockSelect in block_select,
            /// Queries of every key block: the transpose of a selection.
            tile_map: TileMap in tile_map,
            /// Block-sparse attention over a selection.
            msa_attention: MsaAttention in msa_attention,
            /// Gradient of block-sparse attention.
            msa_attention_backward: MsaAttentionBackward in msa_attention,
            /// Rows written into the pages of a cache.
            page_write: PageWrite in paged,
            /// Attention of rows over their cached sequence.
            paged_attention: PagedAttention in paged,
            /// Block maxima of rows against their cached index keys.
            paged_score: PagedScore in paged,
            /// Clamped SwiGLU with the +1 offset.
            swigluoai: Swigluoai in swigluoai,
            /// Gradient of the activation.
            swigluoai_backward: SwigluoaiBackward in swigluoai,
            /// Expert ids of every token.
            router_select: RouterSelect in router,
            /// Weights of given expert ids.
            router_weights: RouterWeights in router,
            /// Gradient of the router's logits.
            router_backward: RouterBackward in router,
            /// Rows of every expert, from the ids.
            moe_plan: MoePlan in moe_permute,
            /// Token rows gathered in expert order.
            moe_permute: MoePermute in moe_permute,
            /// Gradient of the gather.
            moe_permute_backward: MoePermuteBackward in moe_permute,
            /// One product per expert over its own rows.
            grouped_gemm: GroupedGemm in grouped_gemm,
            /// Weight gradients of every expert.
            grouped_gemm_weights: GroupedGemmWeights in grouped_gemm,
            /// Weighted sum of expert rows and the shared expert.
            moe_combine: MoeCombine in moe_combine,
            /// Gradient of the weighted sum.
            moe_combine_backward: MoeCombineBackward in moe_combine,
            /// Log-probabilities of target tokens through the language-model head.
            log_prob: LogProb in log_prob,
            /// Gradient of the log-probabilities.
            log_prob_backward: LogProbBackward in log_prob,
            /// One sampled token per row.
            sample: Sample in sample,
            /// Clipped policy-gradient loss and its gradient.
            grpo_loss: GrpoLoss in grpo_loss,
            /// Squares of all elements, summed in a fixed order.
            sum_squares: SumSquares in adamw,
            /// Global gradient norm and clip coefficient from the sums of squares of the slices.
            clip_coefficient: ClipCoefficient in adamw,
            /// One AdamW step on a slice.
            adamw: AdamW in adamw,
        }
    };
}
pub(crate) use for_each_operation;

macro_rules! declare {
    ($($(#[$doc:meta])* $name:ident: $args:ident in $module:ident,)*) => {
        /// A device that runs the model's operations.
        pub trait Backend: Send + Sync + Sized + 'static {
            /// Reference-counted device memory.
            type Buffer: Clone + Send + Sync;
            /// An ordered queue of operations.
            type Stream: Send + Sync;

            /// Name for records.
            fn name(&self) -> String;

            /// Architecture that launch configurations are looked up for.
            fn arch(&self) -> Arch;

            /// A queue. Operations of one stream run in order.
            fn stream(&self) -> Self::Stream;

            /// Zero-filled memory.
            ///
            /// # Errors
            /// [`crate::Error::OutOfMemory`] with the size asked for.
            fn alloc(&self, bytes: usize) -> Result<Self::Buffer>;

            /// Size of a buffer, in bytes.
            fn buffer_bytes(buffer: &Self::Buffer) -> usize;

            /// Identity of a buffer: equal exactly when two handles share memory.
            fn buffer_id(buffer: &Self::Buffer) -> usize;

            /// Copies host bytes, row-major, into `target`.
            ///
            /// # Errors
            /// [`crate::Error::Argument`] when the number of bytes differs.
            fn upload(&self, stream: &Self::Stream, target: &Tensor<Self>, bytes: &[u8]) -> Result<()>;

            /// Waits for the stream and copies `source`, row-major, into host bytes.
            ///
            /// # Errors
            /// [`crate::Error::Argument`] when the number of bytes differs; what an earlier operation failed with.
            fn download(
                &self,
                stream: &Self::Stream,
                source: &Tensor<Self>,
                bytes: &mut [u8],
            ) -> Result<()>;

            /// Waits for everything enqueued so far.
            ///
            /// # Errors
            /// What an earlier operation failed with.
            fn sync(&self, stream: &Self::Stream) -> Result<()>;

            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// What the check of the operands refuses, or what the device reports.
                fn $name(&self, stream: &Self::Stream, args: &ops::$args<'_, Self>) -> Result<()>;
            )*
        }
    };
}
for_each_operation!(declare);
