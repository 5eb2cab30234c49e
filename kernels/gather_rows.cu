// gather_rows: out[i] = x[rows[i]]
// out (max_rows, WIDTH), x (any, WIDTH) T; rows (max_rows), num_rows (1) i32
// launch  grid = ceil(max_rows / (NUM_THREADS / 32)), block = NUM_THREADS, smem = 0; one warp a row
// bound   memory: reads and writes the rows once
// source  see gkd/ops/gather_rows.py
#include "include/layer_norm.cuh"
#include "include/types.cuh"

#if !defined(WIDTH) || !defined(NUM_THREADS)
#error "WIDTH, NUM_THREADS: set by gkd.ops.gather_rows"
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void gather_rows(
    T* out, const T* x, const int* rows, const int* num_rows) {
    grid_launch_next();
    grid_wait();
    int row = blockIdx.x * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (row >= *num_rows) return;
    LaneRow<WIDTH> values;
    values.load(x + static_cast<size_t>(rows[row]) * WIDTH);
    values.store(out + static_cast<size_t>(row) * WIDTH);
}
