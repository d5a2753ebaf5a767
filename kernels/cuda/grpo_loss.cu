// Clipped policy loss of tokens, its gradient, and the sums, in a fixed order.
#include "common.cuh"

#define THREADS 256
// |log ratio| beyond which the ratio no longer grows, so that it stays finite.
#define LOG_RATIO_LIMIT 20.0f

// Keeps a NaN, which must reach the loss and be seen.
__device__ __forceinline__ float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// partial[block][3]: loss, ppo_kl, clip fraction of the block's tokens.
extern "C" __global__ void grpo_tokens(const float* log_prob, const float* old_log_prob, const float* advantage,
                                       const float* weight, float* d_log_prob, float* partial, i64 tokens,
                                       float eps_low, float eps_high) {
    i64 t = (i64)blockIdx.x * THREADS + threadIdx.x;
    float sums[3] = {0.0f, 0.0f, 0.0f};
    // A token of weight 0 is not read: what it holds reaches no sum, a NaN included.
    if (t < tokens && weight[t] != 0.0f) {
        float w = weight[t], a = advantage[t], d = old_log_prob[t] - log_prob[t];
        float ratio = expf(clamp(-d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT));
        float plain = -ratio * a, bounded = -clamp(ratio, 1.0f - eps_low, 1.0f + eps_high) * a;
        bool clipped = bounded > plain;
        bool saturated = d > LOG_RATIO_LIMIT || d < -LOG_RATIO_LIMIT;
        sums[0] = w * (clipped ? bounded : plain);
        sums[1] = w * d;
        sums[2] = clipped ? w : 0.0f;
        d_log_prob[t] = clipped || saturated ? 0.0f : w * plain;
    } else if (t < tokens) {
        d_log_prob[t] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        float sum = block_sum(sums[i]);
        if (threadIdx.x == 0) partial[(i64)blockIdx.x * 3 + i] = sum;
    }
}

// One block; thread t adds the partial sums t, t + 256, … in order.
extern "C" __global__ void grpo_sums(const float* partial, i64 blocks, float* loss, float* stats) {
    float sums[3] = {0.0f, 0.0f, 0.0f};
    for (i64 b = threadIdx.x; b < blocks; b += THREADS)
#pragma unroll
        for (int i = 0; i < 3; ++i) sums[i] += partial[b * 3 + i];
#pragma unroll
    for (int i = 0; i < 3; ++i) sums[i] = block_sum(sums[i]);
    if (threadIdx.x != 0) return;
    loss[0] = sums[0];
    stats[0] = sums[1];
    stats[1] = sums[2];
}
