// What the attention kernels share: the layout of a packed row, and the softmax's fixed reductions.
#pragma once
#include "include/split.cuh"
#include "include/types.cuh"

#if !defined(NUM_HEADS) || !defined(HEAD_DIM)
#error "NUM_HEADS, HEAD_DIM: set by gkd.ops.attention"
#endif

constexpr int HIDDEN_SIZE = NUM_HEADS * HEAD_DIM;
// Within a row all queries, all keys, all values; where they are split, first all high parts of them.
constexpr int QKV_COLUMNS = 3 * HIDDEN_SIZE;
// From a token to the next.
constexpr int QKV_STRIDE = QKV_COLUMNS * OPERAND_PARTS;

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// What a block has to do, see attention_work in gkd/ops/attention.py: queries from first_query on of a text. An item of length
// 0 fills up a list.
struct Item {
    int start, length, first_query;

    __device__ __forceinline__ Item(const int* work)
        : start(work[blockIdx.x * 3]), length(work[blockIdx.x * 3 + 1]), first_query(work[blockIdx.x * 3 + 2]) {}
};

#if defined(MAX_DISTANCE)
// What is added to a true score of this head by the distance from its query to its key: of bias (NUM_HEADS, 2 * MAX_DISTANCE + 1)
// f32, whose ends are for all that is further away. A head's row is small enough to stay in the first-level cache.
__device__ __forceinline__ float load_bias(const float* bias, int distance) {
    int column = min(max(distance, -MAX_DISTANCE), MAX_DISTANCE) + MAX_DISTANCE;
    return __ldg(bias + blockIdx.y * (2 * MAX_DISTANCE + 1) + column);
}
#endif
