// attention_plain: out = softmax(q @ k.T / sqrt(HEAD_DIM)) @ v within each text and head, for any HEAD_DIM up to 256
// out (num_tokens, NUM_HEADS * HEAD_DIM), qkv (num_tokens, 3 * NUM_HEADS * HEAD_DIM) Operand, a row of qkv being all queries,
// all keys, all values; work (num_items, 3) i32; scale = 1 / sqrt(HEAD_DIM), and where operands are split / scale of qkv^2;
// out_scale = scale of out / scale of qkv; fp32 throughout, rounded once; with MAX_DISTANCE defined, bias (include/attention.cuh)
// is added to the scores, a load for each
// launch  grid = (num_items, NUM_HEADS), block = NUM_THREADS, smem = 0; one warp a query,
//         which walks the text's keys in blocks of BLOCK_K
// bound   reads of the first-level cache and shuffles: for head widths that no model we know has, right rather than fast
// source  see gkd/ops/attention.py
#include "include/attention.cuh"
#include "include/reduce.cuh"
#include "include/split.cuh"

#if !defined(BLOCK_Q) || !defined(BLOCK_K) || !defined(NUM_THREADS)
#error "BLOCK_Q, BLOCK_K, NUM_THREADS: set by gkd.ops.attention"
#endif
static_assert(HEAD_DIM <= 256);
static_assert(BLOCK_Q == NUM_THREADS / 32, "a warp a query");
static_assert(BLOCK_K == 32, "a lane a key");

// Dimension i * 32 + lane_idx is element i of the lane.
constexpr int LANE_DIMS = (HEAD_DIM + 31) / 32;

__device__ __forceinline__ void load_row(float (&values)[LANE_DIMS], const Operand* row, int lane_idx) {
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) {
        int dim = i * 32 + lane_idx;
        values[i] = dim < HEAD_DIM ? load_operand<QKV_COLUMNS>(row, dim) : 0.0f;
    }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS) void attention_plain(
    Operand* out, const Operand* qkv, const int* work, float scale, float out_scale
#if defined(MAX_DISTANCE)
    , const float* bias
#endif
) {
    grid_launch_next();
    grid_wait();
    Item item(work);
    int start = item.start, length = item.length;
    int query_idx = item.first_query + threadIdx.x / 32;
    if (query_idx >= length) return;  // a whole warp, so that no lane misses a shuffle
    int lane_idx = threadIdx.x % 32;
    const Operand* text_rows = qkv + static_cast<size_t>(start) * QKV_STRIDE + blockIdx.y * HEAD_DIM;

    float query[LANE_DIMS], context[LANE_DIMS] = {};
    load_row(query, text_rows + static_cast<size_t>(query_idx) * QKV_STRIDE, lane_idx);
    // running_sum is the lane's own part, completed once at the end.
    float running_max = NEGATIVE_INFINITY, running_sum = 0.0f;
    for (int first_key = 0; first_key < length; first_key += BLOCK_K) {
        const Operand* key_rows = text_rows + static_cast<size_t>(first_key) * QKV_STRIDE + HIDDEN_SIZE;
        const Operand* value_rows = key_rows + HIDDEN_SIZE;
        int num_keys = min(BLOCK_K, length - first_key);
        float score = NEGATIVE_INFINITY;  // of key lane_idx
        for (int key_idx = 0; key_idx < num_keys; ++key_idx) {
            float key[LANE_DIMS], product = 0.0f;
            load_row(key, key_rows + static_cast<size_t>(key_idx) * QKV_STRIDE, lane_idx);
#pragma unroll
            for (int i = 0; i < LANE_DIMS; ++i) product = fmaf(query[i], key[i], product);
            product = warp_sum(product);
            if (lane_idx == key_idx) score = product * scale;
        }
#if defined(MAX_DISTANCE)
        score += load_bias(bias, first_key + lane_idx - query_idx);  // infinity stays where there is no key
#endif
        float new_max = fmaxf(running_max, warp_max(score));
        float correction = expf(running_max - new_max), weight = expf(score - new_max);
        running_max = new_max;
        running_sum = fmaf(running_sum, correction, weight);
#pragma unroll
        for (int i = 0; i < LANE_DIMS; ++i) context[i] *= correction;
        for (int key_idx = 0; key_idx < num_keys; ++key_idx) {
            float value[LANE_DIMS], key_weight = __shfl_sync(0xffffffffu, weight, key_idx);
            load_row(value, value_rows + static_cast<size_t>(key_idx) * QKV_STRIDE, lane_idx);
#pragma unroll
            for (int i = 0; i < LANE_DIMS; ++i) context[i] = fmaf(key_weight, value[i], context[i]);
        }
    }

    float sum = warp_sum(running_sum);
#pragma unroll
    for (int i = 0; i < LANE_DIMS; ++i) {
        int dim = i * 32 + lane_idx;
        float value[1] = {context[i] / sum};
        size_t row = static_cast<size_t>(start + query_idx);
        if (dim < HEAD_DIM) store_operand<HIDDEN_SIZE>(out, row, blockIdx.y * HEAD_DIM + dim, value, out_scale);
    }
}
