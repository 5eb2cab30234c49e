// add_layer_norm: residual = LayerNorm(x + residual) * gamma + beta, and out the same as an operand
// out (max_rows, HIDDEN_SIZE) Operand, split by out_scale; x (max_rows, HIDDEN_SIZE) T; residual (max_rows, HIDDEN_SIZE), gamma, beta (HIDDEN_SIZE) f32; row_count (1) i32; fp32
// statistics in two passes; where operands are float, out is residual
// launch  grid = ceil(max_rows / (block / 32)), block = at most NUM_THREADS, smem = 0; one warp a row
// bound   memory: reads x and residual once, writes residual and out once
// source  see gkd/ops/add_layer_norm.py
#include "include/layer_norm.cuh"
#include "include/types.cuh"

#if !defined(HIDDEN_SIZE) || !defined(NUM_THREADS)
#error "HIDDEN_SIZE, NUM_THREADS: set by gkd.ops.add_layer_norm"
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void add_layer_norm(
    Operand* out, float* residual, const T* x, const float* gamma, const float* beta, const int* row_count, float eps,
    float out_scale) {
    grid_launch_next();
    int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= *row_count) return;  // a whole warp, so that no lane misses a shuffle
    LaneRow<HIDDEN_SIZE> sum, factor, shift;
    // Weights come from memory, x and residual from the cache, where the kernel before has just left them.
    factor.load(gamma);
    shift.load(beta);
    grid_wait();
    size_t offset = static_cast<size_t>(row) * HIDDEN_SIZE;
    sum.load(x + offset);
    sum.add(residual + offset);
    sum.normalize(factor, shift, eps);
    sum.store(residual + offset);
#if !defined(DTYPE_F32)
    sum.store_operand_row(out, row, out_scale);
#endif
}
