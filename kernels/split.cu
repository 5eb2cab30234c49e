// split: out = x as an operand of a product of split numbers
// out (num_rows, width) split by scale (include/split.cuh); x (num_rows, width) SOURCE
// launch  grid = ceil(num_rows * width / (NUM_THREADS * ELEMENTS_PER_THREAD)), block = NUM_THREADS, smem = 0
// bound   memory: reads x once, writes out once
// source  see gkd/ops/split.py
#include "include/split.cuh"

extern "C" __global__ __launch_bounds__(NUM_THREADS) void split(
    f16* out, const Source* x, int num_rows, int width, float scale) {
    grid_launch_next();
    grid_wait();
    int first = blockIdx.x * (NUM_THREADS * ELEMENTS_PER_THREAD) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < ELEMENTS_PER_THREAD; ++i) {
        int element = first + i * NUM_THREADS;
        if (element >= num_rows * width) break;
        f16 high, low;
        to_halves(high, low, to_float(x[element]) * scale);
        f16* row = out + static_cast<size_t>(element / width) * (2 * width) + element % width;
        row[0] = high;
        row[width] = low;
    }
}
