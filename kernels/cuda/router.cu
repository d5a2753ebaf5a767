// Choice and weights of the experts of a token. One warp per token.
#include "common.cuh"

#define WARPS 8

// Order of scores: NaN below every number, then by value; of equal ones the lower id is better.
__device__ __forceinline__ bool better(float a, int a_id, float b, int b_id) {
    bool a_nan = a != a, b_nan = b != b;
    if (a_nan != b_nan) return b_nan;
    if (!a_nan && a != b) return a > b;
    return a_id < b_id;
}

// k rounds of a maximum below the last one chosen; then ids in ascending order by their rank.
extern "C" __global__ void router_select(const float* logits, const float* bias, int* expert_ids, int tokens,
                                         int experts, int topk) {
    extern __shared__ int chosen[];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 t = (i64)blockIdx.x * WARPS + warp;
    if (t >= tokens) return;
    int* of_token = chosen + warp * topk;
    const float* row = logits + t * experts;
    float last = 0.0f;
    int last_id = -1;
    for (int k = 0; k < topk; ++k) {
        float best = 0.0f;
        int best_id = -1;
        for (int e = lane; e < experts; e += 32) {
            float score = sigmoid(row[e]) + bias[e];
            bool left = last_id < 0 || better(last, last_id, score, e);
            if (left && (best_id < 0 || better(score, e, best, best_id))) best = score, best_id = e;
        }
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) {
            float other = __shfl_xor_sync(FULL_WARP, best, step);
            int other_id = __shfl_xor_sync(FULL_WARP, best_id, step);
            if (other_id >= 0 && (best_id < 0 || better(other, other_id, best, best_id)))
                best = other, best_id = other_id;
        }
        last = best, last_id = best_id;
        if (lane == 0) of_token[k] = best_id;
    }
    __syncwarp();
    for (int k = lane; k < topk; k += 32) {
        int rank = 0;
        for (int other = 0; other < topk; ++other) rank += of_token[other] < of_token[k];
        expert_ids[t * topk + rank] = of_token[k];
    }
}

// Ids of a token: in range and ascending.
__device__ __forceinline__ bool valid(const int* ids, int topk, int experts, i64 t, Fault* fault, u32 site) {
    int lower = 0;
    for (int j = 0; j < topk; ++j) {
        if (!in_range(fault, site, t * topk + j, ids[j], lower, experts)) return false;
        lower = ids[j] + 1;
    }
    return true;
}

extern "C" __global__ void router_weights(const float* logits, const int* expert_ids, float* weights, int tokens,
                                          int experts, int topk, Fault* fault, u32 site) {
    i64 t = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= tokens) return;
    const int* ids = expert_ids + t * topk;
    if (!valid(ids, topk, experts, t, fault, site)) return;
    float sum = 0.0f;
    for (int j = 0; j < topk; ++j) sum += sigmoid(logits[t * experts + ids[j]]);
    for (int j = 0; j < topk; ++j) weights[t * topk + j] = sigmoid(logits[t * experts + ids[j]]) / sum;
}

extern "C" __global__ void router_backward(const float* logits, const int* expert_ids, const float* d_weights,
                                           float* d_logits, int tokens, int experts, int topk, Fault* fault,
                                           u32 site) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 t = (i64)blockIdx.x * WARPS + warp;
    if (t >= tokens) return;
    const float* row = logits + t * experts;
    const int* ids = expert_ids + t * topk;
    for (int e = lane; e < experts; e += 32) d_logits[t * experts + e] = 0.0f;
    __syncwarp();
    if (lane != 0 || !valid(ids, topk, experts, t, fault, site)) return;
    float sum = 0.0f, mean = 0.0f;
    for (int j = 0; j < topk; ++j) sum += sigmoid(row[ids[j]]);
    for (int j = 0; j < topk; ++j) mean += sigmoid(row[ids[j]]) / sum * d_weights[t * topk + j];
    for (int j = 0; j < topk; ++j) {
        // s·(1 − s), without the cancellation of a saturated s.
        float slope = sigmoid(row[ids[j]]) * sigmoid(-row[ids[j]]);
        d_logits[t * experts + ids[j]] = (d_weights[t * topk + j] - mean) / sum * slope;
    }
}
