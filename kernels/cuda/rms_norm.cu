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

// A row of the three operands that a gradient reads, as it lies in memory: it stays so until it is used again behind
// the sum, which takes half the registers of its values.
template <typename T, typename D, int CHUNKS> struct Row {
    Run8<T> x[CHUNKS];
    Run8<D> d[CHUNKS];
    Run8<D> passed[CHUNKS];
};

// A block walks its slice of rows in order and keeps the slice's part of d_weight in shared memory, every thread its own
// columns. Where the registers hold two rows, the next one is under way.
template <typename T, typename D, int CHUNKS>
__device__ void backward(const T* residual, i64 residual_row, u64 weight, i64 weight_dtype, const float* rstd_in,
                         const D* d_out, i64 d_out_row, const D* passed, i64 passed_row, T* dx, i64 dx_row,
                         float* partial, int tokens, int hidden, int rows_per_slice) {
    extern __shared__ __align__(16) float sums[];
    const bool ahead = CHUNKS * sizeof(D) <= 6;
    bool vector = rows_aligned(residual, residual_row) && rows_aligned(dx, dx_row);
    bool d_vector = rows_aligned(d_out, d_out_row), weight_vector = aligned16((const void*)weight);
    bool passed_vector = rows_aligned(passed, passed_row);
    float zeros[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) store8(sums + 8 * (threadIdx.x + c * blockDim.x), true, 8, zeros);
    int first = blockIdx.x * rows_per_slice, last = min(first + rows_per_slice, tokens);
    Row<T, D, CHUNKS> row, next;
    auto fetch = [&](i64 t, Row<T, D, CHUNKS>& to) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            int column = 8 * (threadIdx.x + c * blockDim.x), count = t < last ? hidden - column : 0;
            to.x[c].load(residual + t * residual_row + column, vector, count);
            to.d[c].load(d_out + t * d_out_row + column, d_vector, count);
            to.passed[c].load(passed + t * passed_row + column, passed_vector, passed ? count : 0);
        }
    };
    // x̂ and the gradient of the row before the weight.
    auto unpack = [&](int c, float rstd, float (&x)[8], float (&d)[8], float (&w)[8]) {
        int column = 8 * (threadIdx.x + c * blockDim.x);
        load8_as(weight, weight_dtype, column, weight_vector, hidden - column, w);
        row.x[c].widen_to(x);
        row.d[c].widen_to(d);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= rstd;
    };
    if (ahead) fetch(first, next);
    for (i64 t = first; t < last; ++t) {
        float product = 0.0f, rstd = rstd_in[t], x[8], d[8], w[8];
        if (ahead) {
            row = next;
            fetch(t + 1, next);
        } else {
            fetch(t, row);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float* of_columns = sums + 8 * (threadIdx.x + c * blockDim.x);
            float sum[8];
            unpack(c, rstd, x, d, w);
            load8(of_columns, true, 8, sum);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum[i] += d[i] * x[i];
                product += d[i] * (1.0f + w[i]) * x[i];
            }
            store8(of_columns, true, 8, sum);
        }
        float mean = block_sum(product) / (float)hidden;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            int column = 8 * (threadIdx.x + c * blockDim.x);
            float v[8];
            unpack(c, rstd, x, d, w);
            row.passed[c].widen_to(v);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += rstd * (d[i] * (1.0f + w[i]) - x[i] * mean);
            store8(dx + t * dx_row + column, vector, hidden - column, v);
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        int column = 8 * (threadIdx.x + c * blockDim.x);
        float sum[8];
        load8(sums + column, true, 8, sum);
        store8(partial + (i64)blockIdx.x * hidden + column, hidden % 4 == 0, hidden - column, sum);
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
    extern "C" __global__ void __launch_bounds__(256, CHUNKS < 6 ? 2 : 1) rms_norm_backward_##CHUNKS##_##SUFFIX(                           \
        const T* residual, i64 residual_row, u64 weight, i64 weight_dtype, const float* rstd, const D* d_out,          \
        i64 d_out_row, const D* passed, i64 passed_row, T* dx, i64 dx_row, float* partial, int tokens, int hidden,     \
        int rows_per_slice) {                                                                                          \
        backward<T, D, CHUNKS>(residual, residual_row, weight, weight_dtype, rstd, d_out, d_out_row, passed,           \
                               passed_row, dx, dx_row, partial, tokens, hidden, rows_per_slice);                       \
    }

#define WIDTHS(CHUNKS)                                                                                                 \
    FORWARD(f32, float, CHUNKS)                                                                                        \
    FORWARD(bf16, bf16, CHUNKS)                                                                                        \
    BACKWARD(f32, float, float, CHUNKS)                                                                                \
    BACKWARD(bf16, bf16, bf16, CHUNKS)                                                                                 \
    BACKWARD(mixed, bf16, float, CHUNKS)

WIDTHS(1)
WIDTHS(3)
WIDTHS(6)
