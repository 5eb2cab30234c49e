// Reductions over a warp, or over groups of LANES adjacent lanes of it, in a fixed tree: every lane gets the same bits.
#pragma once

template <int LANES = 32>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

template <int LANES = 32>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}
