// embed_layer_norm: residual = LayerNorm(word[input_ids] + token_type[token_type_ids] + position[position_ids]) * gamma + beta,
// and out the same as an operand
// out (max_rows, HIDDEN_SIZE) Operand, split by out_scale; residual (max_rows, HIDDEN_SIZE) f32; input_ids, position_ids,
// token_type_ids (max_rows) i32 in range; word, position, token_type (any, HIDDEN_SIZE) T; gamma, beta (HIDDEN_SIZE) f32;
// row_count (1) i32; fp32 statistics in two passes; where operands are float, out is residual
// launch  grid = ceil(max_rows / (NUM_THREADS / 32)), block = NUM_THREADS, smem = 0; one warp a row
// bound   memory: reads three rows, writes two
// source  see gkd/ops/embed_layer_norm.py
#include "include/layer_norm.cuh"
#include "include/types.cuh"

#if !defined(HIDDEN_SIZE) || !defined(NUM_THREADS)
#error "HIDDEN_SIZE, NUM_THREADS: set by gkd.ops.embed_layer_norm"
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void embed_layer_norm(
    Operand* out,
    float* residual,
    const int* input_ids,
    const int* position_ids,
    const int* token_type_ids,
    const T* word,
    const T* position,
    const T* token_type,
    const float* gamma,
    const float* beta,
    const int* row_count,
    float eps,
    float out_scale) {
    grid_launch_next();
    grid_wait();
    int row = blockIdx.x * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (row >= *row_count) return;  // a whole warp, so that no lane misses a shuffle
    LaneRow<HIDDEN_SIZE> sum, factor, shift;
    sum.load(word + static_cast<size_t>(input_ids[row]) * HIDDEN_SIZE);
    sum.add(token_type + static_cast<size_t>(token_type_ids[row]) * HIDDEN_SIZE);
    sum.add(position + static_cast<size_t>(position_ids[row]) * HIDDEN_SIZE);
    factor.load(gamma);
    shift.load(beta);
    sum.normalize(factor, shift, eps);
    size_t offset = static_cast<size_t>(row) * HIDDEN_SIZE;
    sum.store(residual + offset);
#if !defined(DTYPE_F32)
    sum.store_operand_row(out, row, out_scale);
#endif
}
