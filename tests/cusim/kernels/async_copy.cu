// async_copy: out = x, 4 elements a thread, by cp.async in two groups through shared memory; each thread gives out what
// its neighbour copied. With a group or two still pending, or without a barrier, out is wrong.
#include "include/ptx.cuh"

extern "C" __global__ void async_copy(float* out, const float* x, int num_valid, int num_pending, int has_barrier) {
    __shared__ __align__(16) float smem[2][NUM_THREADS][4];
    for (int group = 0; group < 2; ++group) {
        int source = (group * NUM_THREADS + threadIdx.x) * 4;
        cp_async_16(smem[group][threadIdx.x], x + source, source < num_valid ? 16 : 0);
        cp_async_commit();
    }
    if (num_pending == 0) cp_async_wait<0>();
    if (num_pending == 1) cp_async_wait<1>();
    if (has_barrier) __syncthreads();
    int neighbour = (threadIdx.x + 1) % NUM_THREADS;
    for (int group = 0; group < 2; ++group) {
        for (int i = 0; i < 4; ++i) out[(group * NUM_THREADS + neighbour) * 4 + i] = smem[group][neighbour][i];
    }
}
