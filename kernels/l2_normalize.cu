// l2_normalize: out = x / max(||x||, eps), row by row
// out, x (num_rows, HIDDEN_SIZE) f32; out may be x
// launch  grid = ceil(num_rows / (NUM_THREADS / 32)), block = NUM_THREADS, smem = 0; one warp a row
// bound   memory: reads x twice, the second time from the cache
// source  see gkd/ops/l2_normalize.py
#include "include/ptx.cuh"
#include "include/reduce.cuh"

#if !defined(HIDDEN_SIZE) || !defined(NUM_THREADS)
#error "HIDDEN_SIZE, NUM_THREADS: set by gkd.ops.l2_normalize"
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void l2_normalize(
    float* out, const float* x, int num_rows, float eps) {
    grid_launch_next();
    grid_wait();
    int row = blockIdx.x * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (row >= num_rows) return;  // a whole warp, so that no lane misses a shuffle
    int lane_idx = threadIdx.x % 32;
    size_t offset = static_cast<size_t>(row) * HIDDEN_SIZE;
    float squares = 0.0f;
    for (int column = lane_idx; column < HIDDEN_SIZE; column += 32) squares += x[offset + column] * x[offset + column];
    float norm = fmaxf(sqrtf(warp_sum(squares)), eps);
    for (int column = lane_idx; column < HIDDEN_SIZE; column += 32) out[offset + column] = x[offset + column] / norm;
}
