// Weighted sum of the experts' rows of a token and the shared expert, and its gradient.
#include "common.cuh"

template <typename T>
__device__ void forward(const T* down, i64 down_row, const int* row_of_slot, const float* weights, u64 shared,
                        i64 shared_row, i64 shared_dtype, T* out, i64 out_row, int rows, int topk, int hidden,
                        float scaling, Fault* fault, u32 site) {
    i64 t = blockIdx.x;
    int column = 8 * (blockIdx.y * blockDim.x + threadIdx.x), count = hidden - column;
    if (count <= 0) return;
    bool vector = rows_aligned(down, down_row) && rows_aligned(out, out_row);
    bool shared_vector = shared % 16 == 0 && shared_row * (shared_dtype == 0 ? 4 : 2) % 16 == 0;
    float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}, v[8];
    for (int j = 0; j < topk; ++j) {
        i64 row = row_of_slot[t * topk + j];
        if (!in_range(fault, site, t * topk + j, row, 0, rows)) return;
        float weight = scaling * weights[t * topk + j];
        load8(down + row * down_row + column, vector, count, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += weight * v[i];
    }
    if (shared) {
        load8_as(shared, shared_dtype, t * shared_row + column, shared_vector, count, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += v[i];
    }
    store8(out + t * out_row + column, vector, count, sum);
}

// One block per token. `named[row]` is set for the rows of slots; the rest are written as zeros afterwards.
template <typename T>
__device__ void backward(u64 d_out, i64 d_out_row, i64 d_out_dtype, const T* down, i64 down_row,
                         const int* row_of_slot, const float* weights, T* d_down, i64 d_down_row, float* d_weights,
                         u32* named, int rows, int topk, int hidden, float scaling, Fault* fault, u32 site) {
    i64 t = blockIdx.x;
    bool vector = rows_aligned(down, down_row) && rows_aligned(d_down, d_down_row);
    bool d_vector = d_out % 16 == 0 && d_out_row * (d_out_dtype == 0 ? 4 : 2) % 16 == 0;
    for (int j = 0; j < topk; ++j) {
        i64 slot = t * topk + j, row = row_of_slot[slot];
        if (!in_range(fault, site, slot, row, 0, rows)) return;
        float weight = scaling * weights[slot], product = 0.0f;
        for (int column = 8 * threadIdx.x; column < hidden; column += 8 * blockDim.x) {
            int count = hidden - column;
            float d[8], v[8];
            load8_as(d_out, d_out_dtype, t * d_out_row + column, d_vector, count, d);
            load8(down + row * down_row + column, vector, count, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                product += d[i] * v[i];
                d[i] *= weight;
            }
            store8(d_down + row * d_down_row + column, vector, count, d);
        }
        product = block_sum(product);
        if (threadIdx.x == 0) {
            d_weights[slot] = scaling * product;
            // A row that two slots name would be written twice.
            if (atomicExch(&named[row], 1u) != 0) in_range(fault, site, slot, row, 0, 0);
        }
    }
}

template <typename T>
__device__ void zero_unnamed(const u32* named, T* d_down, i64 d_down_row, int hidden) {
    i64 row = blockIdx.x;
    if (named[row]) return;
    for (int column = threadIdx.x; column < hidden; column += blockDim.x)
        d_down[row * d_down_row + column] = narrow<T>(0.0f);
}

#define KERNELS(SUFFIX, T)                                                                                             \
    extern "C" __global__ void moe_combine_##SUFFIX(const T* down, i64 down_row, const int* row_of_slot,               \
                                                    const float* weights, u64 shared, i64 shared_row,                  \
                                                    i64 shared_dtype, T* out, i64 out_row, int rows, int topk,         \
                                                    int hidden, float scaling, Fault* fault, u32 site) {               \
        forward(down, down_row, row_of_slot, weights, shared, shared_row, shared_dtype, out, out_row, rows, topk,      \
                hidden, scaling, fault, site);                                                                         \
    }                                                                                                                  \
    extern "C" __global__ void moe_combine_backward_##SUFFIX(                                                          \
        u64 d_out, i64 d_out_row, i64 d_out_dtype, const T* down, i64 down_row, const int* row_of_slot,                \
        const float* weights, T* d_down, i64 d_down_row, float* d_weights, u32* named, int rows, int topk,             \
        int hidden, float scaling, Fault* fault, u32 site) {                                                           \
        backward(d_out, d_out_row, d_out_dtype, down, down_row, row_of_slot, weights, d_down, d_down_row, d_weights,   \
                 named, rows, topk, hidden, scaling, fault, site);                                                     \
    }                                                                                                                  \
    extern "C" __global__ void zero_unnamed_##SUFFIX(const u32* named, T* d_down, i64 d_down_row, int hidden) {        \
        zero_unnamed(named, d_down, d_down_row, hidden);                                                               \
    }

KERNELS(f32, float)
KERNELS(bf16, bf16)
