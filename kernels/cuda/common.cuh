// What every kernel shares: storage types, vector loads, reductions in a fixed order, faults.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static const u32 FULL_WARP = 0xffffffffu;

// The largest finite float is not enough where a NaN must lose: -inf starts a running maximum.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// bf16 as storage alone; arithmetic is fp32.
struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
// One rounding to nearest even; a NaN stays one.
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// The value that storage keeps.
template <typename T> __device__ __forceinline__ float stored(float x) { return widen(narrow<T>(x)); }

// A strided view; axes are padded in front. `struct View` of launch.rs.
struct View {
    u64 data;
    i64 extents[4];
    i64 strides[4];
    i64 dtype; // 0 F32, 1 BF16
};

// Element of a row-major position, in elements from the first.
__device__ __forceinline__ i64 element_of(const View& view, i64 position) {
    i64 at = 0;
#pragma unroll
    for (int axis = 3; axis > 0; --axis) {
        i64 extent = view.extents[axis];
        if (extent != 1) {
            i64 rest = position / extent;
            at += (position - rest * extent) * view.strides[axis];
            position = rest;
        }
    }
    return at + position * view.strides[0];
}

// A value of runtime dtype, for operands that are not on the hot path.
__device__ __forceinline__ float load_as(u64 data, i64 dtype, i64 at) {
    return dtype == 0 ? ((const float*)data)[at] : widen(((const bf16*)data)[at]);
}

// Eight consecutive elements, the first `count` of them valid, the others 0. `vector`: the address is 16-byte aligned.
// The mapping from threads to elements does not depend on the alignment, so neither do the bits of a sum.
__device__ __forceinline__ void load8(const float* p, bool vector, int count, float (&v)[8]) {
    if (vector && count >= 8) {
        float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = i < count ? p[i] : 0.0f;
    }
}

__device__ __forceinline__ void load8(const bf16* p, bool vector, int count, float (&v)[8]) {
    if (vector && count >= 8) {
        uint4 a = *(const uint4*)p;
        u32 words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[2 * i] = __uint_as_float(words[i] << 16);
            v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = i < count ? widen(p[i]) : 0.0f;
    }
}

// Eight elements as they lie in memory, so that a load can be under way while nothing waits for its values.
template <typename T> struct Run8;
template <> struct Run8<float> {
    float4 low, high;
    __device__ __forceinline__ void load(const float* p, bool vector, int count) {
        if (vector && count >= 8) {
            low = *(const float4*)p, high = *(const float4*)(p + 4);
            return;
        }
        float v[8];
        load8(p, false, count, v);
        low = make_float4(v[0], v[1], v[2], v[3]), high = make_float4(v[4], v[5], v[6], v[7]);
    }
    __device__ __forceinline__ void widen_to(float (&v)[8]) const {
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    }
};
template <> struct Run8<bf16> {
    uint4 words;
    __device__ __forceinline__ void load(const bf16* p, bool vector, int count) {
        if (vector && count >= 8) {
            words = *(const uint4*)p;
            return;
        }
        u32 w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 a = 2 * i < count ? p[2 * i].bits : 0, b = 2 * i + 1 < count ? p[2 * i + 1].bits : 0;
            w[i] = a | b << 16;
        }
        words = make_uint4(w[0], w[1], w[2], w[3]);
    }
    __device__ __forceinline__ void widen_to(float (&v)[8]) const {
        u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) v[2 * i] = __uint_as_float(w[i] << 16), v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
};

__device__ __forceinline__ void store8(float* p, bool vector, int count, const float (&v)[8]) {
    if (vector && count >= 8) {
        *(float4*)p = make_float4(v[0], v[1], v[2], v[3]);
        *(float4*)(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < count) p[i] = v[i];
    }
}

__device__ __forceinline__ void store8(bf16* p, bool vector, int count, const float (&v)[8]) {
    if (vector && count >= 8) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = (u32)narrow<bf16>(v[2 * i]).bits | (u32)narrow<bf16>(v[2 * i + 1]).bits << 16;
        *(uint4*)p = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < count) p[i] = narrow<bf16>(v[i]);
    }
}

// Eight values of runtime dtype.
__device__ __forceinline__ void load8_as(u64 data, i64 dtype, i64 at, bool vector, int count, float (&v)[8]) {
    if (dtype == 0) load8((const float*)data + at, vector, count, v);
    else load8((const bf16*)data + at, vector, count, v);
}

__device__ __forceinline__ bool aligned16(const void* p) { return ((u64)p & 15) == 0; }

// Rows of this stride all start at a 16-byte boundary when the first one does.
template <typename T> __device__ __forceinline__ bool rows_aligned(const T* p, i64 stride) {
    return aligned16(p) && (stride * (i64)sizeof(T)) % 16 == 0;
}

// Sums in a fixed order: butterfly within a warp, then the warps one after another. Every thread gets the sum.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL_WARP, x, step);
    return x;
}

__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[32];
    int warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    x = warp_sum(x);
    if (warps == 1) return x;
    __syncthreads();
    if ((threadIdx.x & 31) == 0) of_warp[warp] = x;
    __syncthreads();
    float sum = of_warp[0];
    for (int w = 1; w < warps; ++w) sum += of_warp[w];
    return sum;
}

// An index that points nowhere. The first one found is kept.
struct Fault {
    u64 site;
    i64 index, value, lower, upper;
};

__device__ __forceinline__ bool in_range(Fault* fault, u32 site, i64 index, i64 value, i64 lower, i64 upper) {
    if (value >= lower && value < upper) return true;
    if (atomicCAS(&fault->site, 0ull, (u64)site + 1) == 0) {
        fault->index = index;
        fault->value = value;
        fault->lower = lower;
        fault->upper = upper;
    }
    return false;
}

// As on the CPU: the side nearer zero is computed and the other is its complement, so that distinct logits keep
// distinct scores where 1 / (1 + exp(-x)) rounds them together and makes a tie of the router's choice.
__device__ __forceinline__ float sigmoid(float x) {
    float e = expf(-fabsf(x));
    float small = e / (1.0f + e);
    return x < 0.0f ? small : 1.0f - small;
}
