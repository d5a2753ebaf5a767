// Copies, fills, sums and the digest, over strided views.
#include "common.cuh"

// One thread per run of eight elements of the innermost axis: the host has merged the axes that lie without gaps.
struct Run {
    i64 from, to; // elements from the views' first
    int count;
};

__device__ __forceinline__ Run run_of(const View& from, const View& to, i64 number, i64 chunks) {
    i64 row = number / chunks, column = (number - row * chunks) * 8;
    Run run = {column * from.strides[3], column * to.strides[3], 0};
    i64 left = from.extents[3] - column;
    run.count = left < 8 ? (int)left : 8;
#pragma unroll
    for (int axis = 2; axis > 0; --axis) {
        i64 extent = from.extents[axis];
        if (extent == 1) continue;
        i64 rest = row / extent, at = row - rest * extent;
        run.from += at * from.strides[axis];
        run.to += at * to.strides[axis];
        row = rest;
    }
    run.from += row * from.strides[0];
    run.to += row * to.strides[0];
    return run;
}

__device__ __forceinline__ i64 thread_number() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

template <typename T>
__device__ __forceinline__ void read_run(const View& view, i64 at, int count, bool dense, float (&v)[8]) {
    const T* p = (const T*)view.data + at;
    if (dense) {
        load8(p, aligned16(p), count, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = i < count ? widen(p[i * view.strides[3]]) : 0.0f;
    }
}

template <typename T>
__device__ __forceinline__ void write_run(const View& view, i64 at, int count, bool dense, const float (&v)[8]) {
    T* p = (T*)view.data + at;
    if (dense) {
        store8(p, aligned16(p), count, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < count) p[i * view.strides[3]] = narrow<T>(v[i]);
    }
}

template <typename S, typename D> __device__ void convert(View source, View target, i64 chunks, i64 runs) {
    i64 number = thread_number();
    if (number >= runs) return;
    Run run = run_of(source, target, number, chunks);
    float v[8];
    read_run<S>(source, run.from, run.count, source.strides[3] == 1, v);
    write_run<D>(target, run.to, run.count, target.strides[3] == 1, v);
}

extern "C" __global__ void convert_f32_bf16(View source, View target, i64 chunks, i64 runs) {
    convert<float, bf16>(source, target, chunks, runs);
}
extern "C" __global__ void convert_bf16_f32(View source, View target, i64 chunks, i64 runs) {
    convert<bf16, float>(source, target, chunks, runs);
}

// Bits as they are, NaNs and integers included.
template <typename T> __device__ void move_bits(View source, View target, i64 chunks, i64 runs) {
    i64 number = thread_number();
    if (number >= runs) return;
    Run run = run_of(source, target, number, chunks);
    const T* from = (const T*)source.data + run.from;
    T* to = (T*)target.data + run.to;
    bool dense = source.strides[3] == 1 && target.strides[3] == 1 && run.count == 8;
    if (dense && sizeof(T) >= 2 && aligned16(from) && aligned16(to)) {
#pragma unroll
        for (int i = 0; i < (int)(sizeof(T) / 2); ++i) ((uint4*)to)[i] = ((const uint4*)from)[i];
        return;
    }
    T v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < run.count) v[i] = from[i * source.strides[3]];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < run.count) to[i * target.strides[3]] = v[i];
}

extern "C" __global__ void move_1(View source, View target, i64 chunks, i64 runs) {
    move_bits<u8>(source, target, chunks, runs);
}
extern "C" __global__ void move_2(View source, View target, i64 chunks, i64 runs) {
    move_bits<u16>(source, target, chunks, runs);
}
extern "C" __global__ void move_4(View source, View target, i64 chunks, i64 runs) {
    move_bits<u32>(source, target, chunks, runs);
}
extern "C" __global__ void move_8(View source, View target, i64 chunks, i64 runs) {
    move_bits<u64>(source, target, chunks, runs);
}

template <typename T> __device__ void fill(View target, i64 chunks, i64 runs, float value) {
    i64 number = thread_number();
    if (number >= runs) return;
    Run run = run_of(target, target, number, chunks);
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = value;
    write_run<T>(target, run.to, run.count, target.strides[3] == 1, v);
}

extern "C" __global__ void fill_f32(View target, i64 chunks, i64 runs, float value) {
    fill<float>(target, chunks, runs, value);
}
extern "C" __global__ void fill_bf16(View target, i64 chunks, i64 runs, float value) {
    fill<bf16>(target, chunks, runs, value);
}

template <typename S> __device__ void accumulate(View source, View target, i64 chunks, i64 runs) {
    i64 number = thread_number();
    if (number >= runs) return;
    Run run = run_of(source, target, number, chunks);
    float v[8], sum[8];
    read_run<S>(source, run.from, run.count, source.strides[3] == 1, v);
    read_run<float>(target, run.to, run.count, target.strides[3] == 1, sum);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += v[i];
    write_run<float>(target, run.to, run.count, target.strides[3] == 1, sum);
}

extern "C" __global__ void accumulate_f32(View source, View target, i64 chunks, i64 runs) {
    accumulate<float>(source, target, chunks, runs);
}
extern "C" __global__ void accumulate_bf16(View source, View target, i64 chunks, i64 runs) {
    accumulate<bf16>(source, target, chunks, runs);
}

// splitmix64 of a seed and a counter, as in m3_spec::philox.
__device__ __forceinline__ u64 splitmix64(u64 seed, u64 counter) {
    u64 z = seed + (counter + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// Integer sums are exact in any order, so atomics keep the bits.
template <typename T> __device__ void digest(View source, i64 elements, u64 start, u64* sums) {
    const u64 seeds[2] = {0x243f6a8885a308d3ull, 0xb7e151628aed2a6aull};
    u64 sum[2] = {0, 0};
    bool dense = source.extents[0] * source.extents[1] * source.extents[2] == 1 && source.strides[3] == 1;
    for (i64 i = thread_number(); i < elements; i += (i64)gridDim.x * blockDim.x) {
        u64 bits = ((const T*)source.data)[dense ? i : element_of(source, i)];
        u64 index = start + (u64)i;
        u64 key = (index << 32 | index >> 32) ^ bits;
        sum[0] += splitmix64(seeds[0], key);
        sum[1] += splitmix64(seeds[1], key);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) sum[k] += __shfl_xor_sync(FULL_WARP, sum[k], step);
        if ((threadIdx.x & 31) == 0 && sum[k] != 0) atomicAdd(&sums[k], sum[k]);
    }
}

extern "C" __global__ void digest_2(View source, i64 elements, u64 start, u64* sums) {
    digest<u16>(source, elements, start, sums);
}
extern "C" __global__ void digest_4(View source, i64 elements, u64 start, u64* sums) {
    digest<u32>(source, elements, start, sums);
}
