// Norm of each head's channels and rotation of the first of them, and the gradient.
#include "common.cuh"

// A head belongs to LANES lanes of a warp, each with one run of eight channels: 16 lanes reach 128 channels, 32 reach
// 256. The heads of a warp's share go around its groups of lanes in order.
#define WARPS 8

// Heads [T, heads, D] with dense channels.
template <typename T> struct Heads {
    T* data;
    i64 token_stride, head_stride;
    __device__ __forceinline__ T* at(i64 token, i64 head) const {
        return data + token * token_stride + head * head_stride;
    }
    __device__ __forceinline__ bool vector() const {
        return aligned16(data) && (token_stride * sizeof(T)) % 16 == 0 && (head_stride * sizeof(T)) % 16 == 0;
    }
};

struct Extents {
    int tokens, heads, head_dim, half, positions;
    int unused;
};

// Row `row` of the warp's heads, counted over tokens and heads.
struct Place {
    int token, head;
    bool there;
    __device__ __forceinline__ Place(i64 row, i64 last, int heads) {
        there = row < last;
        token = (int)(row / heads);
        head = (int)(row - (i64)token * heads);
    }
    // The next head of the same group of lanes.
    __device__ __forceinline__ void advance(int step, bool is_there, int heads) {
        there = is_there;
        head += step;
        while (head >= heads) head -= heads, ++token;
    }
};

// Butterfly within the lanes of a head.
template <int LANES> __device__ __forceinline__ float head_sum(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

// What the lanes of a head share: the row that is turned, the turns of its token (cos, and sin with the sign of the
// channel's half; (1, 0) beyond the rotated channels), the weights.
//
// The first and the second four channels of the lanes lie apart, so that neighbouring lanes meet different banks.
template <int LANES> __device__ __forceinline__ int slot(int channel) {
    return (channel & 4) * LANES + channel / 8 * 4 + (channel & 3);
}
template <int LANES> __device__ __forceinline__ void put8(float* row, int channel, const float (&v)[8]) {
    *(float4*)(row + slot<LANES>(channel)) = make_float4(v[0], v[1], v[2], v[3]);
    *(float4*)(row + slot<LANES>(channel + 4)) = make_float4(v[4], v[5], v[6], v[7]);
}
template <int LANES> __device__ __forceinline__ void get8(const float* row, int channel, float (&v)[8]) {
    float4 a = *(const float4*)(row + slot<LANES>(channel)), b = *(const float4*)(row + slot<LANES>(channel + 4));
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

template <int LANES> struct Shared {
    float row[8 * LANES];
    float cos[8 * LANES], sin[8 * LANES];
};

// A lane's channels. Channel i of the first half of the rotated ones pairs with i + half.
template <int LANES> struct Lane {
    Shared<LANES>& shared;
    const float* weights; // 1 + w, of the block
    int channel, head_dim, half;
    float per_channel;

    __device__ __forceinline__ Lane(Shared<LANES>& shared, const float* weights, int lane, int head_dim, int half)
        : shared(shared), weights(weights), channel(8 * lane), head_dim(head_dim), half(half),
          per_channel(1.0f / (float)head_dim) {}

    __device__ __forceinline__ int count(bool there) const { return there ? head_dim - channel : 0; }

    __device__ __forceinline__ int partner(int at) const {
        return at < half ? at + half : at < 2 * half ? at - half : at;
    }

    // `sign` -1 turns back. A lane writes what it reads alone.
    __device__ void at_position(const float2* cos_sin, i64 position, float sign) {
        const float2* row = cos_sin + position * half;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int at = channel + i;
            bool first = at < half;
            float2 turn = make_float2(1.0f, 0.0f);
            if (at < 2 * half) turn = row[first ? at : at - half];
            shared.cos[slot<LANES>(at)] = turn.x;
            shared.sin[slot<LANES>(at)] = first ? -sign * turn.y : sign * turn.y;
        }
    }

    // Every channel meets its partner in shared memory. All lanes of the warp take part.
    __device__ __forceinline__ void rotate(float (&v)[8]) const {
        __syncwarp();
        if (channel < 2 * half) put8<LANES>(shared.row, channel, v);
        __syncwarp();
        if (channel >= 2 * half) return;
        float other[8], turn[8];
        if (half % 8 == 0) {
            get8<LANES>(shared.row, partner(channel), other);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) other[i] = shared.row[slot<LANES>(partner(channel + i))];
        }
        get8<LANES>(shared.sin, channel, turn);
#pragma unroll
        for (int i = 0; i < 8; ++i) other[i] *= turn[i];
        get8<LANES>(shared.cos, channel, turn);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = v[i] * turn[i] + other[i];
    }

    __device__ __forceinline__ void weigh(float (&v)[8]) const {
        float w[8];
        get8<LANES>(weights, channel, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] *= w[i];
    }
};

// 1 + w of the block's heads; 0 beyond them.
template <int LANES>
__device__ __forceinline__ void load_weights(float* to, u64 weight, i64 dtype, int head_dim) {
    for (int channel = threadIdx.x; channel < 8 * LANES; channel += blockDim.x)
        to[slot<LANES>(channel)] = channel < head_dim ? 1.0f + load_as(weight, dtype, channel) : 0.0f;
    __syncthreads();
}

// Heads of a warp's share. Weights and turns are loaded once a token.
#define SHARE 32
// Heads that a group of lanes has under way together: the loads of all of them are issued before the first is used.
template <typename T> constexpr int BATCH = sizeof(T) == 2 ? 4 : 2;
#define BATCH_BACKWARD 2

template <typename T, int LANES>
__device__ void forward(Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions,
                        Heads<T> out, float* rstd_out, Extents n, float eps, Fault* fault, u32 site) {
    const int groups = 32 / LANES, batch_size = BATCH<T>;
    __shared__ __align__(16) Shared<LANES> shared[WARPS * groups];
    __shared__ __align__(16) float weights[8 * LANES];
    load_weights<LANES>(weights, weight, weight_dtype, n.head_dim);
    int warp = threadIdx.x >> 5, group = (threadIdx.x & 31) / LANES, lane = threadIdx.x % LANES;
    i64 first = ((i64)blockIdx.x * WARPS + warp) * SHARE, last = min(first + SHARE, (i64)n.tokens * n.heads);
    bool vector = x.vector() && out.vector(), valid = false;
    Lane<LANES> of(shared[warp * groups + group], weights, lane, n.head_dim, n.half);
    int held = -1;
    for (i64 base = first; base < last; base += groups * batch_size) {
        Place load(base + group, last, n.heads), now = load;
        Run8<T> batch[batch_size];
#pragma unroll
        for (int b = 0; b < batch_size; ++b) {
            batch[b].load(x.at(load.token, load.head) + of.channel, vector, of.count(load.there));
            load.advance(groups, base + group + (b + 1) * groups < last, n.heads);
        }
#pragma unroll
        for (int b = 0; b < batch_size; ++b) {
            i64 row = base + group + b * groups;
            float v[8], squares = 0.0f;
            batch[b].widen_to(v);
            if (now.there && now.token != held) {
                int position = positions[now.token];
                valid = in_range(fault, site, now.token, position, 0, n.positions);
                if (valid) of.at_position(cos_sin, position, 1.0f);
                held = now.token;
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) squares += v[i] * v[i];
            float rstd = __frsqrt_rn(head_sum<LANES>(squares) * of.per_channel + eps);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] *= rstd;
            of.weigh(v);
            of.rotate(v);
            if (now.there && valid) {
                if (lane == 0) rstd_out[row] = rstd;
                store8(out.at(now.token, now.head) + of.channel, vector, of.count(true), v);
            }
            now.advance(groups, row + groups < last, n.heads);
        }
    }
}

// A warp walks its slice of heads in order; each of its groups keeps a part of d_weight in registers.
template <typename T, typename D, int LANES>
__device__ void backward(Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions,
                         const float* rstd_in, Heads<const D> d_out, Heads<T> dx, float* partial, Extents n,
                         i64 rows_per_slice, i64 slices, Fault* fault, u32 site) {
    const int groups = 32 / LANES;
    __shared__ __align__(16) Shared<LANES> shared[WARPS * groups];
    __shared__ __align__(16) float weights[8 * LANES];
    load_weights<LANES>(weights, weight, weight_dtype, n.head_dim);
    int warp = threadIdx.x >> 5, group = (threadIdx.x & 31) / LANES, lane = threadIdx.x % LANES;
    i64 slice = (i64)blockIdx.x * WARPS + warp;
    if (slice >= slices) return;
    i64 first = slice * rows_per_slice, last = min(first + rows_per_slice, (i64)n.tokens * n.heads);
    bool vector = x.vector() && dx.vector(), d_vector = d_out.vector(), valid = false;
    Lane<LANES> of(shared[warp * groups + group], weights, lane, n.head_dim, n.half);
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    int held = -1;
    for (i64 base = first; base < last; base += groups * BATCH_BACKWARD) {
        Place load(base + group, last, n.heads), now = load;
        Run8<T> batch_x[BATCH_BACKWARD];
        Run8<D> batch_d[BATCH_BACKWARD];
        float rstds[BATCH_BACKWARD];
#pragma unroll
        for (int b = 0; b < BATCH_BACKWARD; ++b) {
            int count = of.count(load.there);
            batch_x[b].load(x.at(load.token, load.head) + of.channel, vector, count);
            batch_d[b].load(d_out.at(load.token, load.head) + of.channel, d_vector, count);
            rstds[b] = load.there ? rstd_in[base + group + b * groups] : 0.0f;
            load.advance(groups, base + group + (b + 1) * groups < last, n.heads);
        }
#pragma unroll
        for (int b = 0; b < BATCH_BACKWARD; ++b) {
            float v[8], g[8], product = 0.0f;
            batch_x[b].widen_to(v);
            batch_d[b].widen_to(g);
            if (now.there && now.token != held) {
                int position = positions[now.token];
                valid = in_range(fault, site, now.token, position, 0, n.positions);
                if (valid) of.at_position(cos_sin, position, -1.0f);
                held = now.token;
            }
            of.rotate(g);
            bool counts = now.there && valid;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[i] *= rstds[b];
                if (counts) sum[i] += g[i] * v[i];
            }
            of.weigh(g);
#pragma unroll
            for (int i = 0; i < 8; ++i) product += g[i] * v[i];
            float mean = head_sum<LANES>(product) * of.per_channel;
            if (counts) {
#pragma unroll
                for (int i = 0; i < 8; ++i) g[i] = rstds[b] * (g[i] - v[i] * mean);
                store8(dx.at(now.token, now.head) + of.channel, vector, of.count(true), g);
            }
            now.advance(groups, base + group + (b + 1) * groups < last, n.heads);
        }
    }
    float* part = partial + (slice * groups + group) * n.head_dim + of.channel;
    store8(part, false, of.count(true), sum);
}

#define FORWARD(SUFFIX, T, LANES)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256, 3) qk_norm_rope_##LANES##_##SUFFIX(                                 \
        Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions, Heads<T> out,     \
        float* rstd, Extents n, float eps, Fault* fault, u32 site) {                                                   \
        forward<T, LANES>(x, weight, weight_dtype, cos_sin, positions, out, rstd, n, eps, fault, site);                \
    }
#define BACKWARD(SUFFIX, T, D, LANES)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2) qk_norm_rope_backward_##LANES##_##SUFFIX(                        \
        Heads<const T> x, u64 weight, i64 weight_dtype, const float2* cos_sin, const int* positions,                   \
        const float* rstd, Heads<const D> d_out, Heads<T> dx, float* partial, Extents n, i64 rows_per_slice,           \
        i64 slices, Fault* fault, u32 site) {                                                                          \
        backward<T, D, LANES>(x, weight, weight_dtype, cos_sin, positions, rstd, d_out, dx, partial, n,                \
                              rows_per_slice, slices, fault, site);                                                    \
    }
#define WIDTHS(LANES)                                                                                                  \
    FORWARD(f32, float, LANES)                                                                                         \
    FORWARD(bf16, bf16, LANES)                                                                                         \
    BACKWARD(f32_f32, float, float, LANES)                                                                             \
    BACKWARD(f32_bf16, float, bf16, LANES)                                                                             \
    BACKWARD(bf16_f32, bf16, float, LANES)                                                                             \
    BACKWARD(bf16_bf16, bf16, bf16, LANES)

WIDTHS(16)
WIDTHS(32)
