// row_bounds: bound = the largest norm of a row of x; infinity where x is not finite
// x (num_rows, WIDTH) split by a scale (include/split.cuh); bound (1) f32, zero before
// launch  grid = ceil(num_rows / (NUM_THREADS / 32)), block = NUM_THREADS, smem = 0; one warp a row
// bound   memory: reads x once
// source  see gkd/ops/row_bounds.py
#include "include/reduce.cuh"
#include "include/split.cuh"

#if !defined(WIDTH) || !defined(NUM_THREADS)
#error "WIDTH, NUM_THREADS: set by gkd.ops.row_bounds"
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void row_bounds(
    float* bound, const f16* x, int num_rows, float inverse_scale) {
    grid_launch_next();
    grid_wait();
    int row = blockIdx.x * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (row >= num_rows) return;
    const f16* values = x + static_cast<size_t>(row) * (2 * WIDTH);
    float squares = 0.0f;
    for (int column = threadIdx.x % 32; column < WIDTH; column += 32) {
        float value = (to_float(values[column]) + to_float(values[column + WIDTH])) * inverse_scale;
        squares = fmaf(value, value, squares);
    }
    float norm = sqrtf(warp_sum(squares));
    // Of numbers that are not negative the bits are in the same order, and no order of the rows changes a maximum.
    int bits = __float_as_int(isfinite(norm) ? norm : __int_as_float(0x7f800000));
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(bound), bits);
}
