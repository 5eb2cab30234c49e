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

// The element at which a chunk of 16 bytes begins, in a box of rows of 128 bytes with the swizzle of 128 bytes: of 16-bit
// elements. The box lies at 1024 bytes.
__device__ __forceinline__ int swizzle_128(int row, int chunk) { return row * 64 + (chunk ^ row % 8) * 8; }
