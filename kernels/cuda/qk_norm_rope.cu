// Norm of each head's channels and rotation of the first of them, and the gradient. One warp per head.
#include "common.cuh"

// Lane l holds the runs of four channels at 4·(l + 32·c); two runs reach 256 channels.
#define RUNS 2
#define WIDEST 256
#define WARPS 8

template <typename T> __device__ __forceinline__ void load4(const T* p, bool vector, int count, float (&v)[4]);
template <> __device__ __forceinline__ void load4<float>(const float* p, bool vector, int count, float (&v)[4]) {
    if (vector && count >= 4) {
        float4 a = *(const float4*)p;
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = i < count ? p[i] : 0.0f;
    }
}
template <> __device__ __forceinline__ void load4<bf16>(const bf16* p, bool vector, int count, float (&v)[4]) {
    if (vector && count >= 4) {
        uint2 a = *(const uint2*)p;
        v[0] = __uint_as_float(a.x << 16), v[1] = __uint_as_float(a.x & 0xffff0000u);
        v[2] = __uint_as_float(a.y << 16), v[3] = __uint_as_float(a.y & 0xffff0000u);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = i < count ? widen(p[i]) : 0.0f;
    }
}

__device__ __forceinline__ void store4(float* p, bool vector, int count, const float (&v)[4]) {
    if (vector && count >= 4) {
        *(float4*)p = make_float4(v[0], v[1], v[2], v[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < count) p[i] = v[i];
    }
}
__device__ __forceinline__ void store4(bf16* p, bool vector, int count, const float (&v)[4]) {
    if (vector && count >= 4) {
        uint2 a;
        a.x = (u32)narrow<bf16>(v[0]).bits | (u32)narrow<bf16>(v[1]).bits << 16;
        a.y = (u32)narrow<bf16>(v[2]).bits | (u32)narrow<bf16>(v[3]).bits << 16;
        *(uint2*)p = a;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (i < count) p[i] = narrow<bf16>(v[i]);
    }
}

// Heads [T, heads, D] with dense channels.
template <typename T> struct Heads {
    T* data;
    i64 token_stride, head_stride;
    __device__ __forceinline__ T* at(i64 token, i64 head) const {
        return data + token * token_stride + head * head_stride;
    }
    __device__ __forceinline__ bool vector() const {
        const i64 bytes = 4 * sizeof(T);
        return (i64)data % bytes == 0 && token_stride % 4 == 0 && head_stride % 4 == 0;
    }
};

// Channel i of the first half of the rotated ones pairs with i + half. `sign` -1 rotates back.
__device__ __forceinline__ float rotated(const float* row, int channel, int half, const float2* cos_sin, float sign) {
    float x = row[channel];
    if (channel >= 2 * half) return x;
    bool first = channel < half;
    float2 turn = cos_sin[first ? channel : channel - half];
    float other = row[first ? channel + half : channel - half];
    return first ? x * turn.x - other * (sign * turn.y) : x * turn.x + other * (sign * turn.y);
}

struct Extents {
    int tokens, heads, head_dim, half, positions;
    int unused;
};

template <typename T>
__device__ void forward(Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions,
                        Heads<T> out, float* rstd_out, Extents n, float eps, Fault* fault, u32 site) {
    __shared__ float rows[WARPS][WIDEST];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 row = (i64)blockIdx.x * WARPS + warp;
    if (row >= (i64)n.tokens * n.heads) return;
    i64 token = row / n.heads, head = row - token * n.heads;
    int position = positions[token];
    if (!in_range(fault, site, token, position, 0, n.positions)) return;
    bool vector = x.vector() && out.vector();
    float v[RUNS][4], squares = 0.0f;
#pragma unroll
    for (int c = 0; c < RUNS; ++c) {
        int channel = 4 * (lane + 32 * c);
        load4<T>(x.at(token, head) + channel, vector, n.head_dim - channel, v[c]);
#pragma unroll
        for (int i = 0; i < 4; ++i) squares += v[c][i] * v[c][i];
    }
    float rstd = 1.0f / sqrtf(warp_sum(squares) / (float)n.head_dim + eps);
    if (lane == 0) rstd_out[row] = rstd;
#pragma unroll
    for (int c = 0; c < RUNS; ++c) {
        int channel = 4 * (lane + 32 * c);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (channel + i < n.head_dim)
                rows[warp][channel + i] = v[c][i] * rstd * (1.0f + load_as(weight, weight_dtype, channel + i));
    }
    __syncwarp();
    const float2* turns = cos_sin + (i64)position * n.half;
#pragma unroll
    for (int c = 0; c < RUNS; ++c) {
        int channel = 4 * (lane + 32 * c);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (channel + i < n.head_dim) v[c][i] = rotated(rows[warp], channel + i, n.half, turns, 1.0f);
        store4(out.at(token, head) + channel, vector, n.head_dim - channel, v[c]);
    }
}

// A warp walks its slice of heads in order and keeps the slice's part of d_weight in registers.
template <typename T, typename D>
__device__ void backward(Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions,
                         const float* rstd_in, Heads<const D> d_out, Heads<T> dx, float* partial, Extents n,
                         i64 rows_per_slice, i64 slices, Fault* fault, u32 site) {
    __shared__ float rows[WARPS][WIDEST];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 slice = (i64)blockIdx.x * WARPS + warp;
    if (slice >= slices) return;
    bool vector = x.vector() && dx.vector(), d_vector = d_out.vector();
    float w[RUNS][4], sum[RUNS][4];
#pragma unroll
    for (int c = 0; c < RUNS; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int channel = 4 * (lane + 32 * c) + i;
            w[c][i] = channel < n.head_dim ? 1.0f + load_as(weight, weight_dtype, channel) : 0.0f;
            sum[c][i] = 0.0f;
        }
    i64 first = slice * rows_per_slice, last = min(first + rows_per_slice, (i64)n.tokens * n.heads);
    for (i64 row = first; row < last; ++row) {
        i64 token = row / n.heads, head = row - token * n.heads;
        int position = positions[token];
        if (!in_range(fault, site, token, position, 0, n.positions)) continue;
        float v[RUNS][4], g[RUNS][4], rstd = rstd_in[row], product = 0.0f;
        __syncwarp();
#pragma unroll
        for (int c = 0; c < RUNS; ++c) {
            int channel = 4 * (lane + 32 * c), count = n.head_dim - channel;
            load4<T>(x.at(token, head) + channel, vector, count, v[c]);
            load4<D>(d_out.at(token, head) + channel, d_vector, count, g[c]);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < count) rows[warp][channel + i] = g[c][i];
        }
        __syncwarp();
        const float2* turns = cos_sin + (i64)position * n.half;
#pragma unroll
        for (int c = 0; c < RUNS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int channel = 4 * (lane + 32 * c) + i;
                float d = channel < n.head_dim ? rotated(rows[warp], channel, n.half, turns, -1.0f) : 0.0f;
                v[c][i] *= rstd;
                sum[c][i] += d * v[c][i];
                g[c][i] = d * w[c][i];
                product += g[c][i] * v[c][i];
            }
        float mean = warp_sum(product) / (float)n.head_dim;
#pragma unroll
        for (int c = 0; c < RUNS; ++c) {
            int channel = 4 * (lane + 32 * c);
#pragma unroll
            for (int i = 0; i < 4; ++i) g[c][i] = rstd * (g[c][i] - v[c][i] * mean);
            store4(dx.at(token, head) + channel, vector, n.head_dim - channel, g[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < RUNS; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int channel = 4 * (lane + 32 * c) + i;
            if (channel < n.head_dim) partial[slice * n.head_dim + channel] = sum[c][i];
        }
}

#define FORWARD(SUFFIX, T)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_##SUFFIX(                                           \
        Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions, Heads<T> out,     \
        float* rstd, Extents n, float eps, Fault* fault, u32 site) {                                                   \
        forward<T>(x, weight, weight_dtype, cos_sin, positions, out, rstd, n, eps, fault, site);                       \
    }
#define BACKWARD(SUFFIX, T, D)                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_backward_##SUFFIX(                                  \
        Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions,                   \
        const float* rstd, Heads<const D> d_out, Heads<T> dx, float* partial, Extents n, i64 rows_per_slice,           \
        i64 slices, Fault* fault, u32 site) {                                                                          \
        backward<T, D>(x, weight, weight_dtype, cos_sin, positions, rstd, d_out, dx, partial, n, rows_per_slice,       \
                       slices, fault, site);                                                                           \
    }

FORWARD(f32, float)
FORWARD(bf16, bf16)
BACKWARD(f32_f32, float, float)
BACKWARD(f32_bf16, float, bf16)
BACKWARD(bf16_f32, bf16, float)
BACKWARD(bf16_bf16, bf16, bf16)
