// Sums over the slices of a reduction that another kernel left, in order.
#include "common.cuh"

// target[column] += Σ over slices, strip by strip: 32 columns and 8 strips of consecutive slices in a block.
extern "C" __global__ void __launch_bounds__(256) add_slices(const float* partial, int slices, int width, float* target) {
    __shared__ float of_strip[8][32];
    int lane = threadIdx.x & 31, strip = threadIdx.x >> 5, column = blockIdx.x * 32 + lane;
    int per_strip = (slices + 7) / 8, first = strip * per_strip, last = min(first + per_strip, slices);
    float sum = 0.0f;
    if (column < width)
#pragma unroll 8
        for (int slice = first; slice < last; ++slice) sum += partial[(i64)slice * width + column];
    of_strip[strip][lane] = sum;
    __syncthreads();
    if (strip != 0 || column >= width) return;
    for (int s = 1; s < 8; ++s) sum += of_strip[s][lane];
    target[column] += sum;
}
