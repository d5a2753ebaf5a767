// Rows of every expert by a counting sort that keeps the order of the tokens, the gather, and its gradient.
#include "common.cuh"

// Slots of a tile; one block counts and places them.
#define TILE 256

__device__ __forceinline__ bool valid(const int* ids, i64 slot, int topk, int experts, Fault* fault, u32 site) {
    int lower = slot % topk == 0 ? 0 : ids[slot - 1] + 1;
    // An earlier id of the token that is itself out of range is found at its own slot.
    if (lower < 0 || lower > experts) lower = 0;
    return in_range(fault, site, slot, ids[slot], lower, experts);
}

// counts[tile][expert]. Integer sums are exact in any order.
extern "C" __global__ void moe_count(const int* ids, i64 slots, int topk, int experts, int* counts, Fault* fault,
                                     u32 site) {
    extern __shared__ int of_expert[];
    for (int e = threadIdx.x; e < experts; e += TILE) of_expert[e] = 0;
    __syncthreads();
    i64 slot = (i64)blockIdx.x * TILE + threadIdx.x;
    if (slot < slots && valid(ids, slot, topk, experts, fault, site)) atomicAdd(&of_expert[ids[slot]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += TILE) counts[(i64)blockIdx.x * experts + e] = of_expert[e];
}

// Turns counts into the first row of every (tile, expert), and writes the experts' offsets. One block.
extern "C" __global__ void moe_scan(int* counts, int tiles, int experts, int* expert_offsets) {
    __shared__ int of_warp[32];
    __shared__ int carry;
    if (threadIdx.x == 0) carry = 0;
    __syncthreads();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int base = 0; base < experts; base += blockDim.x) {
        int e = base + threadIdx.x, total = 0;
        if (e < experts)
            for (int tile = 0; tile < tiles; ++tile) total += counts[(i64)tile * experts + e];
        int sum = total;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            int other = __shfl_up_sync(FULL_WARP, sum, step);
            if (lane >= step) sum += other;
        }
        if (lane == 31) of_warp[warp] = sum;
        __syncthreads();
        int before = carry;
        for (int w = 0; w < warp; ++w) before += of_warp[w];
        int first = before + sum - total;
        if (e < experts) {
            expert_offsets[e] = first;
            int row = first;
            for (int tile = 0; tile < tiles; ++tile) {
                int count = counts[(i64)tile * experts + e];
                counts[(i64)tile * experts + e] = row;
                row += count;
            }
        }
        __syncthreads();
        if (threadIdx.x == blockDim.x - 1) carry = before + sum;
        __syncthreads();
    }
    if (threadIdx.x == 0) expert_offsets[experts] = carry;
}

extern "C" __global__ void moe_place(const int* ids, i64 slots, int topk, int experts, const int* first_rows,
                                     int* row_of_slot, int* token_of_row) {
    __shared__ int of_tile[TILE];
    i64 slot = (i64)blockIdx.x * TILE + threadIdx.x;
    int id = slot < slots ? ids[slot] : -1;
    of_tile[threadIdx.x] = id;
    __syncthreads();
    if (id < 0 || id >= experts) return;
    int rank = 0;
    for (int other = 0; other < (int)threadIdx.x; ++other) rank += of_tile[other] == id;
    int row = first_rows[(i64)blockIdx.x * experts + id] + rank;
    // Ids that were refused are not counted; a row then stays within the capacity all the same.
    if (row >= slots) return;
    row_of_slot[slot] = row;
    token_of_row[row] = (int)(slot / topk);
}

template <typename T>
__device__ void gather(const T* x, i64 x_row, const int* token_of_row, T* out, i64 out_row, int tokens, int hidden,
                       Fault* fault, u32 site) {
    i64 row = blockIdx.x, token = token_of_row[row];
    int column = 8 * (blockIdx.y * blockDim.x + threadIdx.x), count = hidden - column;
    if (!in_range(fault, site, row, token, 0, tokens) || count <= 0) return;
    bool vector = rows_aligned(x, x_row) && rows_aligned(out, out_row);
    float v[8];
    load8(x + token * x_row + column, vector, count, v);
    store8(out + row * out_row + column, vector, count, v);
}

// The rows of a token are added in ascending order of their experts, then to dx.
template <typename T>
__device__ void scatter(const T* d_rows, i64 d_rows_row, const int* row_of_slot, float* dx, i64 dx_row, int rows,
                        int topk, int hidden, Fault* fault, u32 site) {
    i64 t = blockIdx.x;
    int column = 8 * (blockIdx.y * blockDim.x + threadIdx.x), count = hidden - column;
    if (count <= 0) return;
    bool vector = rows_aligned(d_rows, d_rows_row), dx_vector = rows_aligned(dx, dx_row);
    float sum[8], v[8];
    load8(dx + t * dx_row + column, dx_vector, count, sum);
    for (int j = 0; j < topk; ++j) {
        i64 row = row_of_slot[t * topk + j];
        if (!in_range(fault, site, t * topk + j, row, 0, rows)) return;
        load8(d_rows + row * d_rows_row + column, vector, count, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += v[i];
    }
    store8(dx + t * dx_row + column, dx_vector, count, sum);
}

#define KERNELS(SUFFIX, T)                                                                                             \
    extern "C" __global__ void moe_permute_##SUFFIX(const T* x, i64 x_row, const int* token_of_row, T* out,            \
                                                    i64 out_row, int tokens, int hidden, Fault* fault, u32 site) {     \
        gather(x, x_row, token_of_row, out, out_row, tokens, hidden, fault, site);                                     \
    }                                                                                                                  \
    extern "C" __global__ void moe_permute_backward_##SUFFIX(const T* d_rows, i64 d_rows_row, const int* row_of_slot,  \
                                                             float* dx, i64 dx_row, int rows, int topk, int hidden,    \
                                                             Fault* fault, u32 site) {                                 \
        scatter(d_rows, d_rows_row, row_of_slot, dx, dx_row, rows, topk, hidden, fault, site);                         \
    }

KERNELS(f32, float)
KERNELS(bf16, bf16)
