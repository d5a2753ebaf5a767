// Matrix products of strided operands: one, one per expert, and the weight gradients of every expert.
//
// Two cores with one geometry each: bf16 operands go through mma.sync with fp32 accumulators, anything else through
// fp32 FMA. Every element is one sum over k in ascending order; the tile does not depend on the number of rows, so a
// row's bits depend on its own inputs alone.
#include "common.cuh"

// Element (i, j) at data + i·outer + j·inner.
struct Matrix {
    u64 data;
    i64 strides[2];
    i64 dtype;
};

enum { DENSE = 0, ROWS_OF_EXPERTS = 1, WEIGHTS_OF_EXPERTS = 2 };

// c[m, n] (+)= a[m, k] · b[k, n]. With experts, `offsets` cuts the rows of a and c, or k.
struct Product {
    Matrix a, b, c;
    i64 b_expert, c_expert; // distance of two experts' matrices, in elements
    const int* offsets;
    Fault* fault;
    int m, n, k;
    int experts;
    int mode;
    int accumulate;
    u32 site;
    u32 unused;
};

// Row tiles that share their columns' operand in the L2 cache: they run one after another.
#define GROUP 16

// What a block computes; `any` false: nothing. `zero`: the rows belong to no expert. It holds addresses alone, strides
// stay with the product: NVRTC 13.0 takes the address of the whole for that of a part that was moved.
struct Tile {
    u64 a, b, c;
    int m0, n0; // first row and column
    int m_end;  // end of the rows that exist
    int k;
    bool any, zero;
};

__device__ __forceinline__ u64 moved(const Matrix& matrix, i64 elements) {
    return matrix.data + elements * (matrix.dtype == 0 ? 4 : 2);
}

// First and end of a segment, or an empty one when the offsets are no offsets.
__device__ __forceinline__ bool segment(const Product& p, int expert, int limit, int& first, int& end) {
    first = p.offsets[expert];
    end = p.offsets[expert + 1];
    // The first expert's rows begin at 0.
    bool valid = in_range(p.fault, p.site, expert, first, 0, expert == 0 ? 1 : (i64)limit + 1);
    return valid && in_range(p.fault, p.site, expert + 1, end, first, (i64)limit + 1);
}

// Tile `local` of a stack of `row_tiles` × `column_tiles`.
__device__ __forceinline__ void place(Tile& tile, int local, int row_tiles, int column_tiles, int first, int side) {
    int group = local / (GROUP * column_tiles), in_group = local - group * GROUP * column_tiles;
    int size = min(GROUP, row_tiles - group * GROUP);
    tile.m0 = first + (group * GROUP + in_group % size) * side;
    tile.n0 = in_group / size * side;
}

// The rows of the experts one after another, each with tiles of its own, then the rows of none.
__device__ void find_rows(const Product& p, Tile& tile, int side, int column_tiles) {
    __shared__ int found[4]; // expert, tiles before it, first row, end
    int lane = threadIdx.x & 31, number = blockIdx.x;
    if (threadIdx.x == 0) found[0] = -1;
    __syncthreads();
    if (threadIdx.x < 32) {
        int before = 0;
        bool done = false;
        for (int base = 0; base <= p.experts && !done; base += 32) {
            int expert = base + lane, first = 0, end = 0;
            if (expert < p.experts && !segment(p, expert, p.m, first, end)) end = first;
            if (expert == p.experts) {
                first = p.offsets[p.experts], end = p.m;
                if (first < 0 || first > end) first = end;
            }
            int tiles = (end - first + side - 1) / side, sum = tiles;
#pragma unroll
            for (int step = 1; step < 32; step <<= 1) {
                int other = __shfl_up_sync(FULL_WARP, sum, step);
                if (lane >= step) sum += other;
            }
            u32 beyond = __ballot_sync(FULL_WARP, (i64)(before + sum) * column_tiles > number);
            if (beyond != 0) {
                done = true;
                if (lane == __ffs(beyond) - 1)
                    found[0] = expert, found[1] = before + sum - tiles, found[2] = first, found[3] = end;
            }
            before += __shfl_sync(FULL_WARP, sum, 31);
        }
    }
    __syncthreads();
    int expert = found[0];
    tile.any = expert >= 0;
    if (!tile.any) return;
    int first = found[2], end = found[3], row_tiles = (end - first + side - 1) / side;
    place(tile, number - found[1] * column_tiles, row_tiles, column_tiles, first, side);
    tile.m_end = end;
    tile.zero = expert == p.experts;
    if (!tile.zero) tile.b = moved(p.b, expert * p.b_expert);
}

__device__ void find_tile(const Product& p, Tile& tile, int side) {
    int row_tiles = (p.m + side - 1) / side, column_tiles = (p.n + side - 1) / side;
    tile.a = p.a.data, tile.b = p.b.data, tile.c = p.c.data;
    tile.m_end = p.m, tile.k = p.k;
    tile.any = true, tile.zero = false;
    if (p.mode == ROWS_OF_EXPERTS) {
        find_rows(p, tile, side, column_tiles);
        return;
    }
    place(tile, blockIdx.x, row_tiles, column_tiles, 0, side);
    if (p.mode == WEIGHTS_OF_EXPERTS) {
        int first, end;
        // An expert without rows leaves its gradient as it is.
        tile.any = segment(p, blockIdx.z, p.k, first, end) && first < end;
        if (!tile.any) return;
        tile.k = end - first;
        tile.a = moved(p.a, first * p.a.strides[1]);
        tile.b = moved(p.b, first * p.b.strides[0]);
        tile.c = moved(p.c, blockIdx.z * p.c_expert);
    }
}

// Two neighbouring columns of a row of the result.
__device__ __forceinline__ void store2(const Product& p, const Tile& tile, int row, int column, float x, float y) {
    if (row >= tile.m_end || column >= p.n) return;
    bool two = column + 1 < p.n;
    i64 at = row * p.c.strides[0] + column * p.c.strides[1], next = at + p.c.strides[1];
    if (p.c.dtype == 0) {
        float* c = (float*)tile.c;
        if (p.accumulate) {
            x += c[at];
            if (two) y += c[next];
        }
        if (two && p.c.strides[1] == 1 && ((u64)(c + at) & 7) == 0) {
            *(float2*)(c + at) = make_float2(x, y);
        } else {
            c[at] = x;
            if (two) c[next] = y;
        }
    } else {
        bf16* c = (bf16*)tile.c;
        bf16 a = narrow<bf16>(x), b = narrow<bf16>(y);
        if (two && p.c.strides[1] == 1 && ((u64)(c + at) & 3) == 0) {
            *(u32*)(c + at) = (u32)a.bits | (u32)b.bits << 16;
        } else {
            c[at] = a;
            if (two) c[next] = b;
        }
    }
}

// ---- fp32: 64 × 64 × 16, sixteen elements a thread, one FMA after another ----

#define SIDE_FMA 64
#define DEPTH_FMA 16

extern "C" __global__ void __launch_bounds__(256) gemm_fma(const Product p) {
    __shared__ float a_tile[DEPTH_FMA][SIDE_FMA + 4], b_tile[DEPTH_FMA][SIDE_FMA + 4];
    Tile tile;
    find_tile(p, tile, SIDE_FMA);
    if (!tile.any) return;
    int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float acc[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;
    int depth = tile.zero ? 0 : tile.k;
    // Neighbouring threads read along the axis that lies dense.
    bool a_along_k = p.a.strides[1] == 1, b_along_k = p.b.strides[0] == 1;
    for (int k0 = 0; k0 < depth; k0 += DEPTH_FMA) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < SIDE_FMA * DEPTH_FMA / 256; ++i) {
            int e = threadIdx.x + i * 256;
            int ak = a_along_k ? e % DEPTH_FMA : e / SIDE_FMA, am = a_along_k ? e / DEPTH_FMA : e % SIDE_FMA;
            int bk = b_along_k ? e % DEPTH_FMA : e / SIDE_FMA, bn = b_along_k ? e / DEPTH_FMA : e % SIDE_FMA;
            bool a_there = tile.m0 + am < tile.m_end && k0 + ak < depth;
            bool b_there = tile.n0 + bn < p.n && k0 + bk < depth;
            i64 a_at = (i64)(tile.m0 + am) * p.a.strides[0] + (i64)(k0 + ak) * p.a.strides[1];
            i64 b_at = (i64)(k0 + bk) * p.b.strides[0] + (i64)(tile.n0 + bn) * p.b.strides[1];
            a_tile[ak][am] = a_there ? load_as(tile.a, p.a.dtype, a_at) : 0.0f;
            b_tile[bk][bn] = b_there ? load_as(tile.b, p.b.dtype, b_at) : 0.0f;
        }
        __syncthreads();
        int steps = min(DEPTH_FMA, depth - k0);
        for (int k = 0; k < steps; ++k) {
            float4 a = *(const float4*)&a_tile[k][row], b = *(const float4*)&b_tile[k][column];
            float av[4] = {a.x, a.y, a.z, a.w}, bv[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(av[i], bv[j], acc[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; j += 2)
            store2(p, tile, tile.m0 + row + i, tile.n0 + column + j, acc[i][j], acc[i][j + 1]);
}

// ---- bf16: 128 × 128 × 64, eight warps of 64 × 32, three stages of asynchronous copies ----

#define SIDE 128
#define DEPTH 64
#define STAGES 3
#define OPERAND_BYTES (SIDE * DEPTH * 2)
#define THREADS 256

__device__ __forceinline__ void copy16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from));
}
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// An operand as the core reads it: `side` counts rows of a or columns of b.
struct Panel {
    const bf16* data;
    i64 side_stride, k_stride;
    int side_end, k_end;
    bool vector; // 16-byte copies along the dense axis
};

// Place of a run of eight elements in a stage, in bytes. Along k: 128 rows of 64; along the side: 64 rows of 128. The
// exclusive or keeps the eight rows that ldmatrix reads in different banks.
template <bool ALONG_K> __device__ __forceinline__ u32 slot(int line, int run) {
    return ALONG_K ? (line * 8 + (run ^ (line & 7))) * 16 : (line * 16 + (run ^ (line & 7))) * 16;
}

// Run number `e` of a stage: where it lies, where it goes, and how many of its elements exist.
template <bool ALONG_K> struct Run {
    const bf16* from;
    u32 to;
    int count;
    __device__ __forceinline__ Run(const Panel& panel, u32 stage, int side0, int k0, int e) {
        const int runs = ALONG_K ? DEPTH / 8 : SIDE / 8;
        int line = e / runs, run = e % runs;
        int side = side0 + (ALONG_K ? line : run * 8), k = k0 + (ALONG_K ? run * 8 : line);
        int left = ALONG_K ? panel.k_end - k : panel.side_end - side;
        bool there = ALONG_K ? side < panel.side_end : k < panel.k_end;
        count = there ? max(0, min(8, left)) : 0;
        from = panel.data + (count > 0 ? side * panel.side_stride + k * panel.k_stride : 0);
        to = stage + slot<ALONG_K>(line, run);
    }
};

template <bool ALONG_K> __device__ __forceinline__ void fetch(const Panel& panel, u32 stage, int side0, int k0) {
    const int rounds = SIDE * DEPTH / 8 / THREADS;
    if (panel.vector) {
#pragma unroll
        for (int i = 0; i < rounds; ++i) {
            Run<ALONG_K> run(panel, stage, side0, k0, threadIdx.x + i * THREADS);
            copy16(run.to, run.from, run.count * 2);
        }
        return;
    }
    i64 step = ALONG_K ? panel.k_stride : panel.side_stride;
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
        Run<ALONG_K> run(panel, stage, side0, k0, threadIdx.x + i * THREADS);
#pragma unroll 1
        for (int j = 0; j < 8; ++j) {
            u16 bits = j < run.count ? run.from[j * step].bits : 0;
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(run.to + 2 * j), "h"(bits));
        }
    }
}

// Rows m..m+15 and k..k+15 of a.
template <bool ALONG_K> __device__ __forceinline__ void a_fragment(u32 (&r)[4], u32 stage, int m, int k, int lane) {
    if (ALONG_K) {
        ldmatrix(r, stage + slot<true>(m + (lane & 15), k / 8 + (lane >> 4)));
    } else {
        int part = lane >> 3;
        ldmatrix_transposed(r, stage + slot<false>(k + (part >> 1) * 8 + (lane & 7), m / 8 + (part & 1)));
    }
}

// Columns n..n+15 and k..k+15 of b: r[0], r[1] for the first eight columns, r[2], r[3] for the others.
template <bool ALONG_K> __device__ __forceinline__ void b_fragment(u32 (&r)[4], u32 stage, int n, int k, int lane) {
    int part = lane >> 3;
    if (ALONG_K) ldmatrix(r, stage + slot<true>(n + (part >> 1) * 8 + (lane & 7), k / 8 + (part & 1)));
    else ldmatrix_transposed(r, stage + slot<false>(k + (part & 1) * 8 + (lane & 7), n / 8 + (part >> 1)));
}

template <bool A_ALONG_K, bool B_ALONG_K> __device__ __forceinline__ void gemm_mma(const Product& p) {
    extern __shared__ __align__(128) u8 stages[];
    Tile tile;
    find_tile(p, tile, SIDE);
    if (!tile.any) return;
    u32 base = (u32)__cvta_generic_to_shared(stages);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = (warp & 1) * 64, wn = (warp >> 1) * 32;
    int depth = tile.zero ? 0 : tile.k;
    Panel a = {(const bf16*)tile.a, p.a.strides[0], p.a.strides[1], tile.m_end, depth, false};
    Panel b = {(const bf16*)tile.b, p.b.strides[1], p.b.strides[0], p.n, depth, false};
    // A segment of rows may begin anywhere, so what is dense along the rows is checked here, not on the host.
    a.vector = A_ALONG_K ? a.k_stride == 1 && rows_aligned(a.data, a.side_stride)
                         : a.side_stride == 1 && rows_aligned(a.data, a.k_stride);
    b.vector = B_ALONG_K ? b.k_stride == 1 && rows_aligned(b.data, b.side_stride)
                         : b.side_stride == 1 && rows_aligned(b.data, b.k_stride);
    // A tile's first row along the side is a multiple of the tile, except inside a segment.
    if (!A_ALONG_K) a.vector = a.vector && tile.m0 % 8 == 0;
    float acc[4][4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.0f;
    int steps = (depth + DEPTH - 1) / DEPTH;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) {
            u32 stage = base + s * 2 * OPERAND_BYTES;
            fetch<A_ALONG_K>(a, stage, tile.m0, s * DEPTH);
            fetch<B_ALONG_K>(b, stage + OPERAND_BYTES, tile.n0, s * DEPTH);
        }
        commit();
    }
    for (int step = 0; step < steps; ++step) {
        wait<STAGES - 2>();
        __syncthreads();
        int ahead = step + STAGES - 1;
        if (ahead < steps) {
            u32 stage = base + ahead % STAGES * 2 * OPERAND_BYTES;
            fetch<A_ALONG_K>(a, stage, tile.m0, ahead * DEPTH);
            fetch<B_ALONG_K>(b, stage + OPERAND_BYTES, tile.n0, ahead * DEPTH);
        }
        commit();
        u32 stage = base + step % STAGES * 2 * OPERAND_BYTES;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            u32 af[4][4], bf[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) a_fragment<A_ALONG_K>(af[i], stage, wm + 16 * i, k, lane);
#pragma unroll
            for (int j = 0; j < 2; ++j) b_fragment<B_ALONG_K>(bf[j], stage + OPERAND_BYTES, wn + 16 * j, k, lane);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) mma(acc[i][j], af[i], bf[j / 2][j % 2 * 2], bf[j / 2][j % 2 * 2 + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int row = tile.m0 + wm + 16 * i + (lane >> 2), column = tile.n0 + wn + 8 * j + (lane & 3) * 2;
            store2(p, tile, row, column, acc[i][j][0], acc[i][j][1]);
            store2(p, tile, row + 8, column, acc[i][j][2], acc[i][j][3]);
        }
}

#define MMA(NAME, A_ALONG_K, B_ALONG_K)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME(const Product p) {                 \
        gemm_mma<A_ALONG_K, B_ALONG_K>(p);                                                                             \
    }
MMA(gemm_mma_kk, true, true)
MMA(gemm_mma_kn, true, false)
MMA(gemm_mma_mk, false, true)
MMA(gemm_mma_mn, false, false)
