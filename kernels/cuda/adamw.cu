// Sums of squares, the clip coefficient and the AdamW step.
#include "common.cuh"

#define THREADS 256
// Elements that one block squares: a function of nothing, so the order of the sum depends on the length alone.
#define BLOCK_ELEMENTS 16384

template <typename T> __device__ void squares(View source, i64 elements, float* partial) {
    bool dense = source.extents[0] * source.extents[1] * source.extents[2] == 1 && source.strides[3] == 1;
    const T* p = (const T*)source.data;
    bool vector = dense && aligned16(p);
    i64 first = (i64)blockIdx.x * BLOCK_ELEMENTS, end = min(first + BLOCK_ELEMENTS, elements);
    float sum = 0.0f;
    for (i64 at = first + 8 * threadIdx.x; at < end; at += 8 * THREADS) {
        int count = (int)min((i64)8, end - at);
        float v[8];
        if (dense) {
            load8(p + at, vector, count, v);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = i < count ? widen(p[element_of(source, at + i)]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += v[i] * v[i];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

extern "C" __global__ void squares_f32(View source, i64 elements, float* partial) {
    squares<float>(source, elements, partial);
}
extern "C" __global__ void squares_bf16(View source, i64 elements, float* partial) {
    squares<bf16>(source, elements, partial);
}

// One block; thread t adds the values t, t + 256, … in order.
__device__ __forceinline__ float ordered_sum(const float* values, i64 count) {
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < count; i += THREADS) sum += values[i];
    return block_sum(sum);
}

extern "C" __global__ void sum_squares(const float* partial, i64 blocks, float* sum) {
    float total = ordered_sum(partial, blocks);
    if (threadIdx.x == 0) sum[0] = total;
}

extern "C" __global__ void clip_coefficient(const float* sums, i64 slices, float* norm, float* coefficient,
                                            int* finite, float max_norm) {
    float length = sqrtf(ordered_sum(sums, slices));
    if (threadIdx.x != 0) return;
    float factor = max_norm / (length + 1e-6f);
    norm[0] = length;
    // A NaN norm stays one.
    coefficient[0] = factor > 1.0f ? 1.0f : factor;
    finite[0] = isfinite(length) ? 1 : 0;
}

// 1 - beta^step in double: for beta near 1 a float would lose the digits that the first steps divide by.
__device__ __forceinline__ float correction(float beta, int step) { return (float)(1.0 - pow((double)beta, (double)step)); }

struct Constants {
    float beta1, beta2, eps, weight_decay;
};

template <typename T>
__device__ void step(const float* grad, float* master, float* exp_avg, float* exp_avg_sq, T* param, i64 elements,
                     const float* learning_rate, const int* step_number, const float* coefficient, const int* finite,
                     Constants c) {
    __shared__ float corrections[2];
    if (finite[0] == 0) return;
    if (threadIdx.x < 2) corrections[threadIdx.x] = correction(threadIdx.x == 0 ? c.beta1 : c.beta2, step_number[0]);
    __syncthreads();
    i64 at = 8 * ((i64)blockIdx.x * THREADS + threadIdx.x);
    if (at >= elements) return;
    int count = (int)min((i64)8, elements - at);
    bool vector = aligned16(grad) && aligned16(master) && aligned16(exp_avg) && aligned16(exp_avg_sq) && aligned16(param);
    float g[8], w[8], m[8], v[8];
    load8(grad + at, vector, count, g);
    load8(master + at, vector, count, w);
    load8(exp_avg + at, vector, count, m);
    load8(exp_avg_sq + at, vector, count, v);
    float rate = learning_rate[0], factor = coefficient[0];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float gradient = factor * g[i];
        m[i] = c.beta1 * m[i] + (1.0f - c.beta1) * gradient;
        v[i] = c.beta2 * v[i] + (1.0f - c.beta2) * gradient * gradient;
        float update = m[i] / corrections[0] / (sqrtf(v[i] / corrections[1]) + c.eps);
        w[i] -= rate * (c.weight_decay * w[i] + update);
    }
    store8(master + at, vector, count, w);
    store8(exp_avg + at, vector, count, m);
    store8(exp_avg_sq + at, vector, count, v);
    store8(param + at, vector, count, w);
}

#define STEP(SUFFIX, T)                                                                                                \
    extern "C" __global__ void adamw_##SUFFIX(const float* grad, float* master, float* exp_avg, float* exp_avg_sq,     \
                                              T* param, i64 elements, const float* learning_rate,                      \
                                              const int* step_number, const float* coefficient, const int* finite,     \
                                              Constants c) {                                                           \
        step(grad, master, exp_avg, exp_avg_sq, param, elements, learning_rate, step_number, coefficient, finite, c);  \
    }
STEP(f32, float)
STEP(bf16, bf16)
