// pool: out[text] = one vector of the text's rows of hidden from the first pooled token on, special tokens included
// out (num_texts, OUT_WIDTH), columns [FIRST_COLUMN, FIRST_COLUMN + HIDDEN_SIZE); hidden (num_tokens, HIDDEN_SIZE) f32;
// cu_seqlens (num_texts + 1), first_pooled (num_texts) i32; fp32 sums, of TOKEN_BLOCK tokens each from the first pooled
// token on, which are then added in order
// launch  grid = (ceil(HIDDEN_SIZE / NUM_THREADS), num_texts), block = NUM_THREADS, smem = 0; one thread a column
// bound   memory: reads hidden once
// source  see gkd/ops/pool.py, which has the definitions of sentence-transformers
#include "include/ptx.cuh"

#if !defined(HIDDEN_SIZE) || !defined(OUT_WIDTH) || !defined(FIRST_COLUMN) || !defined(TOKEN_BLOCK) || !defined(NUM_THREADS)
#error "HIDDEN_SIZE, OUT_WIDTH, FIRST_COLUMN, TOKEN_BLOCK, NUM_THREADS and one of the modes: set by gkd.ops.pool"
#endif
#if !defined(MODE_CLS) && !defined(MODE_MAX) && !defined(MODE_MEAN) && !defined(MODE_MEAN_SQRT_LEN_TOKENS) && \
    !defined(MODE_WEIGHTEDMEAN) && !defined(MODE_LASTTOKEN)
#error "one of the modes: set by gkd.ops.pool"
#endif

// Of a token by its place in the text.
__device__ __forceinline__ float weight_of(int place) {
#if defined(MODE_WEIGHTEDMEAN)
    return static_cast<float>(place + 1);
#else
    return 1.0f;
#endif
}

// Of a column's values in the text, `column[place * HIDDEN_SIZE]`, those from `first` on.
__device__ __forceinline__ float pool_column(const float* column, int first, int length) {
#if defined(MODE_CLS)
    return column[static_cast<size_t>(first) * HIDDEN_SIZE];
#elif defined(MODE_LASTTOKEN)
    return column[static_cast<size_t>(length - 1) * HIDDEN_SIZE];
#elif defined(MODE_MAX)
    float largest = column[static_cast<size_t>(first) * HIDDEN_SIZE];
    for (int place = first + 1; place < length; ++place) {
        float value = column[static_cast<size_t>(place) * HIDDEN_SIZE];
        // A NaN stays: fmaxf would lose it.
        if (value > largest || value != value) largest = value;
    }
    return largest;
#else
    float sum = 0.0f;
    for (int block = first; block < length; block += TOKEN_BLOCK) {
        float block_sum = 0.0f;
        for (int place = block; place < min(block + TOKEN_BLOCK, length); ++place) {
            block_sum = fmaf(weight_of(place), column[static_cast<size_t>(place) * HIDDEN_SIZE], block_sum);
        }
        sum += block_sum;
    }
#if defined(MODE_WEIGHTEDMEAN)
    return sum / static_cast<float>((length * (length + 1) - first * (first + 1)) / 2);
#elif defined(MODE_MEAN_SQRT_LEN_TOKENS)
    return sum / sqrtf(static_cast<float>(length - first));
#else
    return sum / static_cast<float>(length - first);
#endif
#endif
}

extern "C" __global__ __launch_bounds__(NUM_THREADS) void pool(
    float* out, const float* hidden, const int* cu_seqlens, const int* first_pooled) {
    grid_launch_next();
    grid_wait();
    int column = blockIdx.x * NUM_THREADS + threadIdx.x;
    if (column >= HIDDEN_SIZE) return;
    int text = blockIdx.y;
    int start = cu_seqlens[text], length = cu_seqlens[text + 1] - start;
    if (length == 0) return;  // of an offset that fills up the list
    const float* rows = hidden + static_cast<size_t>(start) * HIDDEN_SIZE + column;
    out[static_cast<size_t>(text) * OUT_WIDTH + FIRST_COLUMN + column] = pool_column(rows, first_pooled[text], length);
}
