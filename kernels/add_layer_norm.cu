// add_layer_norm: out = LayerNorm(x + residual) * gamma + beta
// out, x, residual (num_rows, HIDDEN_SIZE) T; gamma, beta (HIDDEN_SIZE) f32; fp32 statistics in two passes
// launch  grid = ceil(num_rows / (NUM_THREADS / 32)), block = NUM_THREADS, smem = 0; one warp a row
// bound   memory: reads x and residual once, writes out once
// source  see gkd/ops/add_layer_norm.py
#include "include/layer_norm.cuh"
#include "include/types.cuh"

#if !defined(HIDDEN_SIZE) || !defined(NUM_THREADS)
#error "HIDDEN_SIZE, NUM_THREADS: set by gkd.ops.add_layer_norm"
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void add_layer_norm(
    T* out, const T* x, const T* residual, const float* gamma, const float* beta, int num_rows, float eps) {
    int row = blockIdx.x * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (row >= num_rows) return;  // a whole warp, so that no lane misses a shuffle
    size_t offset = static_cast<size_t>(row) * HIDDEN_SIZE;
    LaneRow<HIDDEN_SIZE> sum;
    sum.load(x + offset);
    sum.add(residual + offset);
    sum.normalize(gamma, beta, eps);
    sum.store(out + offset);
}
