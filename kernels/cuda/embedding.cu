// Rows of the embedding table, and its gradient with the tokens in order.
#include "common.cuh"

// One block per (token, 2048 columns).
template <typename T>
__device__ void gather(const int* ids, const T* table, i64 table_row, T* out, i64 out_row, int vocab, int hidden,
                       Fault* fault, u32 site) {
    i64 t = blockIdx.x;
    int id = ids[t];
    int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (!in_range(fault, site, t, id, 0, vocab) || column >= hidden) return;
    int count = hidden - column;
    bool vector = rows_aligned(table, table_row) && rows_aligned(out, out_row);
    float v[8];
    load8(table + id * table_row + column, vector, count, v);
    store8(out + t * out_row + column, vector, count, v);
}

extern "C" __global__ void embedding_f32(const int* ids, const float* table, i64 table_row, float* out, i64 out_row,
                                         int vocab, int hidden, Fault* fault, u32 site) {
    gather(ids, table, table_row, out, out_row, vocab, hidden, fault, site);
}
extern "C" __global__ void embedding_bf16(const int* ids, const bf16* table, i64 table_row, bf16* out, i64 out_row,
                                          int vocab, int hidden, Fault* fault, u32 site) {
    gather(ids, table, table_row, out, out_row, vocab, hidden, fault, site);
}

// The block of an id's first token adds all of its tokens, in order; the blocks of the later ones return.
template <typename T>
__device__ void scatter(const int* ids, int tokens, const T* d_out, i64 d_out_row, float* d_table, i64 d_table_row,
                        int vocab, int hidden, Fault* fault, u32 site) {
    __shared__ u32 found[32];
    int t = blockIdx.x, id = ids[t];
    if (!in_range(fault, site, t, id, 0, vocab)) return;
    for (int base = 0; base < t; base += blockDim.x) {
        int other = base + threadIdx.x;
        if (__syncthreads_or(other < t && ids[other] == id)) return;
    }
    int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8, count = hidden - column;
    bool vector = rows_aligned(d_out, d_out_row), table_vector = rows_aligned(d_table, d_table_row);
    float* target = d_table + id * d_table_row + column;
    float sum[8], v[8];
    load8(target, table_vector, count, sum);
    for (int base = t; base < tokens; base += blockDim.x) {
        int other = base + threadIdx.x;
        u32 hits = __ballot_sync(FULL_WARP, other < tokens && ids[other] == id);
        __syncthreads();
        if ((threadIdx.x & 31) == 0) found[threadIdx.x >> 5] = hits;
        __syncthreads();
        for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) {
            for (u32 left = found[warp]; left != 0; left &= left - 1) {
                i64 token = base + 32 * warp + __ffs(left) - 1;
                load8(d_out + token * d_out_row + column, vector, count, v);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i] += v[i];
            }
        }
    }
    store8(target, table_vector, count, sum);
}

extern "C" __global__ void embedding_backward_f32(const int* ids, int tokens, const float* d_out, i64 d_out_row,
                                                  float* d_table, i64 d_table_row, int vocab, int hidden,
                                                  Fault* fault, u32 site) {
    scatter(ids, tokens, d_out, d_out_row, d_table, d_table_row, vocab, hidden, fault, site);
}
extern "C" __global__ void embedding_backward_bf16(const int* ids, int tokens, const bf16* d_out, i64 d_out_row,
                                                   float* d_table, i64 d_table_row, int vocab, int hidden,
                                                   Fault* fault, u32 site) {
    scatter(ids, tokens, d_out, d_out_row, d_table, d_table_row, vocab, hidden, fault, site);
}
