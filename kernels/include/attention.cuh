// What the attention kernels share: the layout of a packed row, and the softmax's fixed reductions.
#pragma once
#include "include/types.cuh"

#if !defined(NUM_HEADS) || !defined(HEAD_DIM)
#error "NUM_HEADS, HEAD_DIM: set by gkd.ops.attention"
#endif

constexpr int HIDDEN_SIZE = NUM_HEADS * HEAD_DIM;
// From a token to the next; within a row all queries, all keys, all values.
constexpr int QKV_STRIDE = 3 * HIDDEN_SIZE;

#define NEGATIVE_INFINITY __int_as_float(0xff800000)
