// mean_pool: out[text] = the mean of the text's rows of hidden, special tokens included
// out (num_texts, HIDDEN_SIZE), hidden (num_tokens, HIDDEN_SIZE) f32; cu_seqlens (num_texts + 1) i32; fp32 sums, of
// TOKEN_BLOCK tokens each from position 0 of the text, which are then added in order
// launch  grid = (ceil(HIDDEN_SIZE / NUM_THREADS), num_texts), block = NUM_THREADS, smem = 0; one thread a column
// bound   memory: reads hidden once
// source  see gkd/ops/mean_pool.py
#include "include/ptx.cuh"

#if !defined(HIDDEN_SIZE) || !defined(TOKEN_BLOCK) || !defined(NUM_THREADS)
#error "HIDDEN_SIZE, TOKEN_BLOCK, NUM_THREADS: set by gkd.ops.mean_pool"
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void mean_pool(float* out, const float* hidden, const int* cu_seqlens) {
    grid_launch_next();
    grid_wait();
    int column = blockIdx.x * NUM_THREADS + threadIdx.x;
    if (column >= HIDDEN_SIZE) return;
    int text = blockIdx.y;
    int start = cu_seqlens[text], end = cu_seqlens[text + 1];
    if (start == end) return;  // of an offset that fills up the list
    float sum = 0.0f;
    for (int first = start; first < end; first += TOKEN_BLOCK) {
        float block_sum = 0.0f;
        for (int token = first; token < min(first + TOKEN_BLOCK, end); ++token) {
            block_sum += hidden[static_cast<size_t>(token) * HIDDEN_SIZE + column];
        }
        sum += block_sum;
    }
    out[static_cast<size_t>(text) * HIDDEN_SIZE + column] = sum / static_cast<float>(end - start);
}
