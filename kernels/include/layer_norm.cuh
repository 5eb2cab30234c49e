// LayerNorm of a row that a warp holds in registers: element i * 32 + lane_idx in values[i] of each lane.
#pragma once
#include "include/reduce.cuh"
#include "include/types.cuh"

#define LANE_ELEMENTS(SIZE) (((SIZE) + 31) / 32)

// Biased variance in two passes, eps inside the root. Elements past SIZE are not read.
template <class Element, int SIZE>
__device__ __forceinline__ void layer_norm(
    Element* out, float (&values)[LANE_ELEMENTS(SIZE)], const float* gamma, const float* beta, int lane_idx, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS(SIZE); ++i) {
        if (i * 32 + lane_idx < SIZE) sum += values[i];
    }
    float mean = warp_sum(sum) / SIZE;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS(SIZE); ++i) {
        values[i] -= mean;
        if (i * 32 + lane_idx < SIZE) squares += values[i] * values[i];
    }
    float scale = 1.0f / sqrtf(warp_sum(squares) / SIZE + eps);
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS(SIZE); ++i) {
        int column = i * 32 + lane_idx;
        if (column < SIZE) out[column] = from_float<Element>(values[i] * scale * gamma[column] + beta[column]);
    }
}
