// Residual add and gemma norm of rows, and its gradient.
#include "common.cuh"

// A row stays in registers: every thread holds CHUNKS runs of eight elements, run c of thread t at 8·(t + c·threads).
// The number of threads and of chunks is a function of the width alone.

template <typename T, int CHUNKS>
__device__ void forward(const T* residual, i64 residual_row, const T* y, i64 y_row, u64 weight, i64 weight_dtype,
                        T* sum_out, i64 sum_row, T* out, i64 out_row, float* rstd_out, int hidden, float eps) {
    i64 t = blockIdx.x;
    bool vector = rows_aligned(residual, residual_row) && rows_aligned(out, out_row);
    if (y) vector = vector && rows_aligned(y, y_row) && rows_aligned(sum_out, sum_row);
    bool weight_vector = aligned16((const void*)weight);
    float r[CHUNKS][8], squares = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        int column = 8 * (threadIdx.x + c * blockDim.x), count = hidden - column;
        load8(residual + t * residual_row + column, vector, count, r[c]);
        if (y) {
            float v[8];
            load8(y + t * y_row + column, vector, count, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) r[c][i] = stored<T>(r[c][i] + v[i]);
            store8(sum_out + t * sum_row + column, vector, count, r[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += r[c][i] * r[c][i];
    float rstd = 1.0f / sqrtf(block_sum(squares) / (float)hidden + eps);
    if (threadIdx.x == 0) rstd_out[t] = rstd;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        int column = 8 * (threadIdx.x + c * blockDim.x), count = hidden - column;
        float w[8];
        load8_as(weight, weight_dtype, column, weight_vector, count, w);
#pragma unroll
        for (int i = 0; i < 8; ++i) r[c][i] = r[c][i] * rstd * (1.0f + w[i]);
        store8(out + t * out_row + column, vector, count, r[c]);
    }
}

// A block walks its slice of rows in order and keeps the slice's part of d_weight in registers.
template <typename T, typename D, int CHUNKS>
__device__ void backward(const T* residual, i64 residual_row, u64 weight, i64 weight_dtype, const float* rstd_in,
                         const D* d_out, i64 d_out_row, const void* passed, i64 passed_row, i64 passed_dtype, T* dx,
                         i64 dx_row, float* partial, int tokens, int hidden, int rows_per_slice) {
    bool vector = rows_aligned(residual, residual_row) && rows_aligned(dx, dx_row);
    bool d_vector = rows_aligned(d_out, d_out_row), weight_vector = aligned16((const void*)weight);
    bool passed_vector = passed && aligned16(passed) && passed_row * (passed_dtype == 0 ? 4 : 2) % 16 == 0;
    float sum[CHUNKS][8];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[c][i] = 0.0f;
    int first = blockIdx.x * rows_per_slice, last = min(first + rows_per_slice, tokens);
    for (i64 t = first; t < last; ++t) {
        float x[CHUNKS][8], g[CHUNKS][8], product = 0.0f, rstd = rstd_in[t];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            int column = 8 * (threadIdx.x + c * blockDim.x), count = hidden - column;
            load8(residual + t * residual_row + column, vector, count, x[c]);
            load8(d_out + t * d_out_row + column, d_vector, count, g[c]);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            int column = 8 * (threadIdx.x + c * blockDim.x), count = hidden - column;
            float w[8];
            load8_as(weight, weight_dtype, column, weight_vector, count, w);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x[c][i] *= rstd;
                sum[c][i] += g[c][i] * x[c][i];
                g[c][i] *= 1.0f + w[i];
                product += g[c][i] * x[c][i];
            }
        }
        float mean = block_sum(product) / (float)hidden;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            int column = 8 * (threadIdx.x + c * blockDim.x), count = hidden - column;
            float v[8];
            if (passed) load8_as((u64)passed, passed_dtype, t * passed_row + column, passed_vector, count, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float d = rstd * (g[c][i] - x[c][i] * mean);
                v[i] = passed ? v[i] + d : d;
            }
            store8(dx + t * dx_row + column, vector, count, v);
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        int column = 8 * (threadIdx.x + c * blockDim.x);
        bool whole = hidden % 4 == 0;
        store8(partial + (i64)blockIdx.x * hidden + column, whole, hidden - column, sum[c]);
    }
}

#define FORWARD(SUFFIX, T, CHUNKS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256) rms_norm_##CHUNKS##_##SUFFIX(                                    \
        const T* residual, i64 residual_row, const T* y, i64 y_row, u64 weight, i64 weight_dtype, T* sum_out,          \
        i64 sum_row, T* out, i64 out_row, float* rstd, int hidden, float eps) {                                        \
        forward<T, CHUNKS>(residual, residual_row, y, y_row, weight, weight_dtype, sum_out, sum_row, out, out_row,     \
                           rstd, hidden, eps);                                                                         \
    }

#define BACKWARD(SUFFIX, T, D, CHUNKS)                                                                                 \
    extern "C" __global__ void __launch_bounds__(256) rms_norm_backward_##CHUNKS##_##SUFFIX(                           \
        const T* residual, i64 residual_row, u64 weight, i64 weight_dtype, const float* rstd, const D* d_out,          \
        i64 d_out_row, const void* passed, i64 passed_row, i64 passed_dtype, T* dx, i64 dx_row, float* partial,        \
        int tokens, int hidden, int rows_per_slice) {                                                                  \
        backward<T, D, CHUNKS>(residual, residual_row, weight, weight_dtype, rstd, d_out, d_out_row, passed,           \
                               passed_row, passed_dtype, dx, dx_row, partial, tokens, hidden, rows_per_slice);         \
    }

#define WIDTHS(CHUNKS)                                                                                                 \
    FORWARD(f32, float, CHUNKS)                                                                                        \
    FORWARD(bf16, bf16, CHUNKS)                                                                                        \
    BACKWARD(f32_f32, float, float, CHUNKS)                                                                            \
    BACKWARD(f32_bf16, float, bf16, CHUNKS)                                                                            \
    BACKWARD(bf16_f32, bf16, float, CHUNKS)                                                                            \
    BACKWARD(bf16_bf16, bf16, bf16, CHUNKS)

WIDTHS(1)
WIDTHS(3)
WIDTHS(6)
