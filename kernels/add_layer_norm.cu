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
    int lane_idx = threadIdx.x % 32;
    size_t offset = static_cast<size_t>(row) * HIDDEN_SIZE;
    float values[LANE_ELEMENTS(HIDDEN_SIZE)];
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS(HIDDEN_SIZE); ++i) {
        int column = i * 32 + lane_idx;
        values[i] = column < HIDDEN_SIZE ? to_float(x[offset + column]) + to_float(residual[offset + column]) : 0.0f;
    }
    layer_norm<T, HIDDEN_SIZE>(out + offset, values, gamma, beta, lane_idx, eps);
}
