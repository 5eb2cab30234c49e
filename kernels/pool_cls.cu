// pool_cls: out[text] = hidden[cu_seqlens[text]], the first token of each text
// out (num_texts, HIDDEN_SIZE) f32; hidden (num_tokens, HIDDEN_SIZE) T; cu_seqlens (num_texts + 1) i32
// launch  grid = (ceil(HIDDEN_SIZE / NUM_THREADS), num_texts), block = NUM_THREADS, smem = 0; one thread a column
// bound   memory: one row a text
// source  see gkd/ops/pool.py
#include "include/types.cuh"

#if !defined(HIDDEN_SIZE) || !defined(NUM_THREADS)
#error "HIDDEN_SIZE, NUM_THREADS: set by gkd.ops.pool"
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void pool_cls(float* out, const T* hidden, const int* cu_seqlens) {
    int column = blockIdx.x * NUM_THREADS + threadIdx.x;
    if (column >= HIDDEN_SIZE) return;
    int text = blockIdx.y;
    size_t token = static_cast<size_t>(cu_seqlens[text]);
    out[static_cast<size_t>(text) * HIDDEN_SIZE + column] = to_float(hidden[token * HIDDEN_SIZE + column]);
}
