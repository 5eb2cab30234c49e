// named_barriers: out = the indices of the threads, reversed within each 64 of 128, by a barrier for each 64; and what
// must not be done.
#include "include/ptx.cuh"

enum Case { RIGHT, SYNCTHREADS, TOO_MANY, PART_OF_WARP, TWO_NUMBERS, MISSING_WARP, HALVES_OF_WARPS };

extern "C" __global__ __launch_bounds__(128) void named_barriers(int* out, int test_case) {
    __shared__ int smem[128];
    int i = threadIdx.x, half = i / 64, num_threads = 64;
    if (test_case == TOO_MANY) num_threads = 160;
    if (test_case == PART_OF_WARP) num_threads = 48;
    if (test_case == TWO_NUMBERS && i >= 32) num_threads = 128;
    if (test_case == MISSING_WARP && i / 32 == 3) return;
    if (test_case == HALVES_OF_WARPS) {
        if (i % 32 >= 16) return;
        num_threads = 32;
    }
    smem[i] = i;
    barrier_sync(test_case == SYNCTHREADS ? 0 : 1 + half, num_threads);
    out[i] = smem[i ^ 63];
}
