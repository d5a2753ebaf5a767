// Clamped SwiGLU with the +1 offset, and its gradient.
#include "common.cuh"

// Rows that a thread has under way together: the loads of all of them are issued before the first is used.
#define ROWS 2

template <typename T>
__device__ void forward(const T* gate, i64 gate_row, const T* up, i64 up_row, T* out, i64 out_row, int rows, int width,
                        float alpha, float limit) {
    i64 first = (i64)blockIdx.x * ROWS;
    int column = 8 * (blockIdx.y * blockDim.x + threadIdx.x), count = width - column;
    if (count <= 0) return;
    bool vector = rows_aligned(gate, gate_row) && rows_aligned(up, up_row) && rows_aligned(out, out_row);
    Run8<T> gates[ROWS], ups[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        int there = first + r < rows ? count : 0;
        gates[r].load(gate + (first + r) * gate_row + column, vector, there);
        ups[r].load(up + (first + r) * up_row + column, vector, there);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float g[8], u[8];
        gates[r].widen_to(g);
        ups[r].widen_to(u);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            // Comparisons instead of fminf: a NaN stays.
            float a = g[i] > limit ? limit : g[i];
            float b = u[i] > limit ? limit : u[i] < -limit ? -limit : u[i];
            g[i] = (b + 1.0f) * (a * sigmoid(alpha * a));
        }
        if (first + r < rows) store8(out + (first + r) * out_row + column, vector, count, g);
    }
}

template <typename T>
__device__ void backward(const T* gate, i64 gate_row, const T* up, i64 up_row, const T* d_out, i64 d_out_row, T* d_gate,
                         i64 d_gate_row, T* d_up, i64 d_up_row, int rows, int width, float alpha, float limit) {
    i64 first = (i64)blockIdx.x * ROWS;
    int column = 8 * (blockIdx.y * blockDim.x + threadIdx.x), count = width - column;
    if (count <= 0) return;
    bool vector = rows_aligned(gate, gate_row) && rows_aligned(up, up_row) && rows_aligned(d_out, d_out_row) &&
                  rows_aligned(d_gate, d_gate_row) && rows_aligned(d_up, d_up_row);
    Run8<T> gates[ROWS], ups[ROWS], ds[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        int there = first + r < rows ? count : 0;
        gates[r].load(gate + (first + r) * gate_row + column, vector, there);
        ups[r].load(up + (first + r) * up_row + column, vector, there);
        ds[r].load(d_out + (first + r) * d_out_row + column, vector, there);
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        float g[8], u[8], d[8];
        gates[r].widen_to(g);
        ups[r].widen_to(u);
        ds[r].widen_to(d);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float a = g[i] > limit ? limit : g[i];
            float b = u[i] > limit ? limit : u[i] < -limit ? -limit : u[i];
            float s = sigmoid(alpha * a), swish = a * s;
            float slope = s + alpha * swish * (1.0f - s);
            // A clamp passes its gradient at equality, and a NaN is not clamped.
            float d_gate_i = d[i] * (b + 1.0f) * slope, d_up_i = d[i] * swish;
            g[i] = g[i] > limit ? 0.0f : d_gate_i;
            u[i] = u[i] > limit || u[i] < -limit ? 0.0f : d_up_i;
        }
        if (first + r < rows) {
            store8(d_gate + (first + r) * d_gate_row + column, vector, count, g);
            store8(d_up + (first + r) * d_up_row + column, vector, count, u);
        }
    }
}

#define KERNELS(SUFFIX, T)                                                                                             \
    extern "C" __global__ void swigluoai_##SUFFIX(const T* gate, i64 gate_row, const T* up, i64 up_row, T* out,        \
                                                  i64 out_row, int rows, int width, float alpha, float limit) {                  \
        forward(gate, gate_row, up, up_row, out, out_row, rows, width, alpha, limit);                                        \
    }                                                                                                                  \
    extern "C" __global__ void swigluoai_backward_##SUFFIX(                                                            \
        const T* gate, i64 gate_row, const T* up, i64 up_row, const T* d_out, i64 d_out_row, T* d_gate,                \
        i64 d_gate_row, T* d_up, i64 d_up_row, int rows, int width, float alpha, float limit) {                                  \
        backward(gate, gate_row, up, up_row, d_out, d_out_row, d_gate, d_gate_row, d_up, d_up_row, rows, width, alpha,       \
                 limit);                                                                                               \
    }

KERNELS(f32, float)
KERNELS(bf16, bf16)
