// embed_layer_norm: out = LayerNorm(word[input_ids] + token_type[0] + position[position_ids]) * gamma + beta
// out (num_rows, HIDDEN_SIZE) T; input_ids, position_ids (num_rows) i32 in range; word, position, token_type
// (any, HIDDEN_SIZE) T; gamma, beta (HIDDEN_SIZE) f32; fp32 statistics in two passes
// launch  grid = ceil(num_rows / (NUM_THREADS / 32)), block = NUM_THREADS, smem = 0; one warp a row
// bound   memory: reads three rows, writes one
// source  see gkd/ops/embed_layer_norm.py
#include "include/layer_norm.cuh"
#include "include/types.cuh"

#if !defined(HIDDEN_SIZE) || !defined(NUM_THREADS)
#error "HIDDEN_SIZE, NUM_THREADS: set by gkd.ops.embed_layer_norm"
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void embed_layer_norm(
    T* out,
    const int* input_ids,
    const int* position_ids,
    const T* word,
    const T* position,
    const T* token_type,
    const float* gamma,
    const float* beta,
    int num_rows,
    float eps) {
    int row = blockIdx.x * (NUM_THREADS / 32) + threadIdx.x / 32;
    if (row >= num_rows) return;  // a whole warp, so that no lane misses a shuffle
    LaneRow<HIDDEN_SIZE> sum;
    sum.load(word + static_cast<size_t>(input_ids[row]) * HIDDEN_SIZE);
    sum.add(token_type);
    sum.add(position + static_cast<size_t>(position_ids[row]) * HIDDEN_SIZE);
    sum.normalize(gamma, beta, eps);
    sum.store(out + static_cast<size_t>(row) * HIDDEN_SIZE);
}
