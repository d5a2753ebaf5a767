// Norm of each head's channels and rotation of the first of them, and the gradient. One warp per head.
#include "common.cuh"

// Lane l holds the runs of four channels at 4·(l + 32·c): one run reaches 128 channels, two 256.
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

// Channels that a lane holds and what it needs of the token they belong to. Channel i of the first half of the rotated
// ones pairs with i + half.
template <int RUNS> struct Lane {
    float weight[RUNS][4];
    float2 turn[RUNS][4]; // cos, and sin with the sign of the channel's half; (1, 0) beyond the rotated channels
    int channel, head_dim, half;
    bool runs_pair; // runs of four pair with runs of four

    __device__ __forceinline__ Lane(u64 weights, i64 dtype, int lane, int head_dim, int half)
        : channel(4 * lane), head_dim(head_dim), half(half), runs_pair(half % 4 == 0) {
#pragma unroll
        for (int c = 0; c < RUNS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int at = channel + 128 * c + i;
                weight[c][i] = at < head_dim ? 1.0f + load_as(weights, dtype, at) : 0.0f;
            }
    }

    __device__ __forceinline__ int partner(int at) const { return at < half ? at + half : at < 2 * half ? at - half : at; }

    // `sign` -1 turns back.
    __device__ __forceinline__ void at_position(const float2* cos_sin, i64 position, float sign) {
        const float2* row = cos_sin + position * half;
#pragma unroll
        for (int c = 0; c < RUNS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int at = channel + 128 * c + i;
                turn[c][i] = make_float2(1.0f, 0.0f);
                if (at < 2 * half) {
                    bool first = at < half;
                    turn[c][i] = row[first ? at : at - half];
                    turn[c][i].y *= first ? -sign : sign;
                }
            }
    }

    // Turns the warp's row; every channel meets its partner in shared memory.
    __device__ __forceinline__ void rotate(float (&v)[RUNS][4], float* row) const {
        __syncwarp();
#pragma unroll
        for (int c = 0; c < RUNS; ++c)
            if (channel + 128 * c < head_dim) *(float4*)(row + channel + 128 * c) = make_float4(v[c][0], v[c][1], v[c][2], v[c][3]);
        __syncwarp();
#pragma unroll
        for (int c = 0; c < RUNS; ++c) {
            float other[4];
            if (channel + 128 * c >= head_dim) continue;
            if (runs_pair) {
                float4 run = *(const float4*)(row + partner(channel + 128 * c));
                other[0] = run.x, other[1] = run.y, other[2] = run.z, other[3] = run.w;
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) other[i] = row[partner(channel + 128 * c + i)];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (channel + 128 * c + i < 2 * half) v[c][i] = v[c][i] * turn[c][i].x + other[i] * turn[c][i].y;
        }
    }
};

struct Extents {
    int tokens, heads, head_dim, half, positions;
    int unused;
};

// Heads that a warp handles one after another, the next one under way. Weights and turns are loaded once a token.
#define HEADS_PER_WARP 8

template <typename T, int RUNS>
__device__ void forward(Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions,
                        Heads<T> out, float* rstd_out, Extents n, float eps, Fault* fault, u32 site) {
    __shared__ __align__(16) float rows[WARPS][128 * RUNS];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 total = (i64)n.tokens * n.heads, first = ((i64)blockIdx.x * WARPS + warp) * HEADS_PER_WARP;
    i64 last = min(first + HEADS_PER_WARP, total), token = first / n.heads, head = first - token * n.heads;
    if (first >= total) return;
    bool vector = x.vector() && out.vector(), valid = false;
    Lane<RUNS> of(weight, weight_dtype, lane, n.head_dim, n.half);
    float next[RUNS][4];
    i64 held = -1;
#pragma unroll
    for (int c = 0; c < RUNS; ++c) load4<T>(x.at(token, head) + of.channel + 128 * c, vector, n.head_dim - of.channel - 128 * c, next[c]);
    for (i64 row = first; row < last; ++row) {
        float v[RUNS][4], squares = 0.0f;
        T* to = out.at(token, head);
        if (token != held) {
            int position = positions[token];
            valid = in_range(fault, site, token, position, 0, n.positions);
            if (valid) of.at_position(cos_sin, position, 1.0f);
            held = token;
        }
        if (++head == n.heads) head = 0, ++token;
#pragma unroll
        for (int c = 0; c < RUNS; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[c][i] = next[c][i];
                squares += v[c][i] * v[c][i];
            }
            int count = row + 1 < last ? n.head_dim - of.channel - 128 * c : 0;
            load4<T>(x.at(token, head) + of.channel + 128 * c, vector, count, next[c]);
        }
        float rstd = 1.0f / sqrtf(warp_sum(squares) / (float)n.head_dim + eps);
        if (!valid) continue;
        if (lane == 0) rstd_out[row] = rstd;
#pragma unroll
        for (int c = 0; c < RUNS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[c][i] = v[c][i] * rstd * of.weight[c][i];
        of.rotate(v, rows[warp]);
#pragma unroll
        for (int c = 0; c < RUNS; ++c) store4(to + of.channel + 128 * c, vector, n.head_dim - of.channel - 128 * c, v[c]);
    }
}

// A warp walks its slice of heads in order and keeps the slice's part of d_weight in registers.
template <typename T, typename D, int RUNS>
__device__ void backward(Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions,
                         const float* rstd_in, Heads<const D> d_out, Heads<T> dx, float* partial, Extents n,
                         i64 rows_per_slice, i64 slices, Fault* fault, u32 site) {
    __shared__ __align__(16) float rows[WARPS][128 * RUNS];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 slice = (i64)blockIdx.x * WARPS + warp;
    if (slice >= slices) return;
    bool vector = x.vector() && dx.vector(), d_vector = d_out.vector(), valid = false;
    Lane<RUNS> of(weight, weight_dtype, lane, n.head_dim, n.half);
    float sum[RUNS][4], next_v[RUNS][4], next_g[RUNS][4];
#pragma unroll
    for (int c = 0; c < RUNS; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[c][i] = 0.0f;
    i64 first = slice * rows_per_slice, last = min(first + rows_per_slice, (i64)n.tokens * n.heads);
    i64 token = first / n.heads, head = first - token * n.heads, held = -1;
    auto fetch = [&](bool there) {
#pragma unroll
        for (int c = 0; c < RUNS; ++c) {
            int count = there ? n.head_dim - of.channel - 128 * c : 0;
            load4<T>(x.at(token, head) + of.channel + 128 * c, vector, count, next_v[c]);
            load4<D>(d_out.at(token, head) + of.channel + 128 * c, d_vector, count, next_g[c]);
        }
    };
    fetch(first < last);
    for (i64 row = first; row < last; ++row) {
        float v[RUNS][4], g[RUNS][4], rstd = rstd_in[row], product = 0.0f;
        T* to = dx.at(token, head);
        if (token != held) {
            int position = positions[token];
            valid = in_range(fault, site, token, position, 0, n.positions);
            if (valid) of.at_position(cos_sin, position, -1.0f);
            held = token;
        }
        if (++head == n.heads) head = 0, ++token;
#pragma unroll
        for (int c = 0; c < RUNS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[c][i] = next_v[c][i], g[c][i] = next_g[c][i];
        fetch(row + 1 < last);
        if (!valid) continue;
        of.rotate(g, rows[warp]);
#pragma unroll
        for (int c = 0; c < RUNS; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[c][i] *= rstd;
                sum[c][i] += g[c][i] * v[c][i];
                g[c][i] *= of.weight[c][i];
                product += g[c][i] * v[c][i];
            }
        float mean = warp_sum(product) / (float)n.head_dim;
#pragma unroll
        for (int c = 0; c < RUNS; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) g[c][i] = rstd * (g[c][i] - v[c][i] * mean);
            store4(to + of.channel + 128 * c, vector, n.head_dim - of.channel - 128 * c, g[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < RUNS; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int channel = of.channel + 128 * c + i;
            if (channel < n.head_dim) partial[slice * n.head_dim + channel] = sum[c][i];
        }
}

#define FORWARD(SUFFIX, T, RUNS)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_##RUNS##_##SUFFIX(                                  \
        Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions, Heads<T> out,     \
        float* rstd, Extents n, float eps, Fault* fault, u32 site) {                                                   \
        forward<T, RUNS>(x, weight, weight_dtype, cos_sin, positions, out, rstd, n, eps, fault, site);                 \
    }
#define BACKWARD(SUFFIX, T, D, RUNS)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) qk_norm_rope_backward_##RUNS##_##SUFFIX(                         \
        Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions,                   \
        const float* rstd, Heads<const D> d_out, Heads<T> dx, float* partial, Extents n, i64 rows_per_slice,           \
        i64 slices, Fault* fault, u32 site) {                                                                          \
        backward<T, D, RUNS>(x, weight, weight_dtype, cos_sin, positions, rstd, d_out, dx, partial, n,                 \
                             rows_per_slice, slices, fault, site);                                                     \
    }
#define WIDTHS(RUNS)                                                                                                   \
    FORWARD(f32, float, RUNS)                                                                                          \
    FORWARD(bf16, bf16, RUNS)                                                                                          \
    BACKWARD(f32_f32, float, float, RUNS)                                                                              \
    BACKWARD(f32_bf16, float, bf16, RUNS)                                                                              \
    BACKWARD(bf16_f32, bf16, float, RUNS)                                                                              \
    BACKWARD(bf16_bf16, bf16, bf16, RUNS)

WIDTHS(1)
WIDTHS(2)
