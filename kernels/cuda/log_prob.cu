// What stands around the products of the language-model head: sums over a chunk of the vocabulary, gradients of logits.
#include "common.cuh"

#define THREADS 256

// Sums of a row over the chunks so far: largest tempered logit m, Σ exp(z − m), Σ exp(z − m)·(z − m), z of the target.
struct Sums {
    float largest, exps, weighted, target;
};

__device__ __forceinline__ float block_max(float x) {
    __shared__ float of_warp[32];
    // A NaN wins, so that it reaches the result and is seen.
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        float other = __shfl_xor_sync(FULL_WARP, x, step);
        if (other > x || other != other) x = other;
    }
    __syncthreads();
    if ((threadIdx.x & 31) == 0) of_warp[threadIdx.x >> 5] = x;
    __syncthreads();
    x = of_warp[0];
    for (int w = 1; w < THREADS / 32; ++w)
        if (of_warp[w] > x || of_warp[w] != of_warp[w]) x = of_warp[w];
    return x;
}

// One block per row: the chunk's sums, merged into those of the chunks before it.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_sums(const float* logits, int width, int first_id,
                                                                 int vocab, const int* targets,
                                                                 const float* temperature, Sums* sums, Fault* fault,
                                                                 u32 site, u32 temperature_site) {
    i64 t = blockIdx.x;
    const float* row = logits + t * width;
    int target = targets[t];
    float heat = temperature[0];
    if (first_id == 0 && threadIdx.x == 0) {
        in_range(fault, site, t, target, -0x80000000ll, vocab);
        if (!(heat > 0.0f && isfinite(heat))) in_range(fault, temperature_site, 0, (i64)floorf(heat), 1, 1);
    }
    if (target < 0) return;
    float largest = minus_infinity();
    for (int i = threadIdx.x; i < width; i += THREADS) {
        float z = row[i] / heat;
        if (z > largest || z != z) largest = z;
    }
    largest = block_max(largest);
    float exps = 0.0f, weighted = 0.0f;
    for (int i = threadIdx.x; i < width; i += THREADS) {
        float below = row[i] / heat - largest, e = expf(below);
        exps += e;
        // A logit of -inf has weight 0, not NaN.
        if (e != 0.0f) weighted += e * below;
    }
    exps = block_sum(exps);
    weighted = block_sum(weighted);
    if (threadIdx.x != 0) return;
    Sums now = {largest, exps, weighted, 0.0f};
    if (first_id > 0) {
        Sums before = sums[t];
        float m = now.largest > before.largest || now.largest != now.largest ? now.largest : before.largest;
        float was = before.largest - m, is = now.largest - m, scale_was = expf(was), scale_is = expf(is);
        // A part that lies infinitely far below adds 0.
        float weighted_was = scale_was != 0.0f ? scale_was * (before.weighted + before.exps * was) : 0.0f;
        float weighted_is = scale_is != 0.0f ? scale_is * (now.weighted + now.exps * is) : 0.0f;
        now.largest = m;
        now.exps = scale_was * before.exps + scale_is * now.exps;
        now.weighted = weighted_was + weighted_is;
        now.target = before.target;
    }
    int at = target - first_id;
    if (at >= 0 && at < width) now.target = row[at] / heat;
    sums[t] = now;
}

extern "C" __global__ void finish(const Sums* sums, const int* targets, int tokens, float* log_prob, float* lse,
                                  float* entropy) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= tokens) return;
    float out[3] = {0.0f, 0.0f, 0.0f};
    if (targets[t] >= 0) {
        Sums s = sums[t];
        float log_exps = logf(s.exps);
        out[0] = s.target - s.largest - log_exps;
        out[1] = s.largest + log_exps;
        out[2] = log_exps - s.weighted / s.exps;
    }
    log_prob[t] = out[0], lse[t] = out[1], entropy[t] = out[2];
}

// Rows of a block of tokens; zeros where there is no target, so that what such a row holds reaches no product.
template <typename T>
__device__ void scored_rows(const T* x, i64 x_row, const int* targets, T* out, int hidden) {
    i64 t = blockIdx.x;
    bool scored = targets[t] >= 0;
    for (int column = threadIdx.x; column < hidden; column += THREADS)
        out[t * hidden + column] = scored ? x[t * x_row + column] : narrow<T>(0.0f);
}
extern "C" __global__ void scored_rows_f32(const float* x, i64 x_row, const int* targets, float* out, int hidden) {
    scored_rows(x, x_row, targets, out, hidden);
}
extern "C" __global__ void scored_rows_bf16(const bf16* x, i64 x_row, const int* targets, bf16* out, int hidden) {
    scored_rows(x, x_row, targets, out, hidden);
}

// d_logits = d · (1[target] − softmax) / temperature, rounded once.
template <typename T>
__device__ void logit_gradients(const float* logits, int width, int first_id, int vocab, const int* targets,
                                const float* temperature, const float* lse, const float* d_log_prob, T* out,
                                Fault* fault, u32 site) {
    i64 t = blockIdx.x;
    int target = targets[t];
    float heat = temperature[0];
    bool scored = target >= 0 && in_range(fault, site, t, target, 0, vocab);
    float d = scored ? d_log_prob[t] : 0.0f, of_row = scored ? lse[t] : 0.0f;
    int i = blockIdx.y * THREADS + threadIdx.x;
    if (i >= width) return;
    float p = expf(logits[t * width + i] / heat - of_row);
    float hit = first_id + i == target ? 1.0f : 0.0f;
    out[t * width + i] = narrow<T>(scored ? d * (hit - p) / heat : 0.0f);
}
#define GRADIENTS(SUFFIX, T)                                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS) logit_gradients_##SUFFIX(                                    \
        const float* logits, int width, int first_id, int vocab, const int* targets, const float* temperature,         \
        const float* lse, const float* d_log_prob, T* out, Fault* fault, u32 site) {                                   \
        logit_gradients(logits, width, first_id, vocab, targets, temperature, lse, d_log_prob, out, fault, site);      \
    }
GRADIENTS(f32, float)
GRADIENTS(bf16, bf16)

// Rows of the summed gradient, rounded once; zeros where there is no target.
template <typename T>
__device__ void round_rows(const float* sum, const int* targets, T* dx, i64 dx_row, int hidden) {
    i64 t = blockIdx.x;
    bool scored = targets[t] >= 0;
    for (int column = threadIdx.x; column < hidden; column += THREADS)
        dx[t * dx_row + column] = narrow<T>(scored ? sum[t * hidden + column] : 0.0f);
}
extern "C" __global__ void round_rows_f32(const float* sum, const int* targets, float* dx, i64 dx_row, int hidden) {
    round_rows(sum, targets, dx, dx_row, hidden);
}
extern "C" __global__ void round_rows_bf16(const float* sum, const int* targets, bf16* dx, i64 dx_row, int hidden) {
    round_rows(sum, targets, dx, dx_row, hidden);
}
