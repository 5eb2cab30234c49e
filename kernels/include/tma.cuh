// What goes with the copy engine: waiting for its barriers, and where it puts an element.
#pragma once
#include "include/ptx.cuh"

__device__ __forceinline__ void mbarrier_wait(unsigned long long* barrier, unsigned parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// By one lane of each warp that calls it.
__device__ __forceinline__ void mbarrier_arrive_warp(unsigned long long* barrier) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// The same, once `value` has been computed. NOTE: an arrival does not wait for what ldmatrix has begun to read. Where stages were
// given back behind the products of a chunk, the compiler put the arrival before the last of them, and in one launch of two
// the copy engine overwrote rows that were still to be read. What depends on the products can't come before them:
// threadIdx.y is 0, which the compiler does not know.
__device__ __forceinline__ void mbarrier_arrive_after(unsigned long long* barrier, float value) {
    mbarrier_arrive_warp(barrier + (__float_as_int(value) & threadIdx.y));
}

// The element at which a chunk of 16 bytes begins, in a box of rows of 128 bytes with the swizzle of 128 bytes. The box lies at
// 1024 bytes.
template <int ELEMENT_BYTES = 2>
__device__ __forceinline__ int swizzle_128(int row, int chunk) {
    return row * (128 / ELEMENT_BYTES) + (chunk ^ row % 8) * (16 / ELEMENT_BYTES);
}
