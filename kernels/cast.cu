// cast: out = x in another floating type, rounded to nearest; of two as near to the even one, or, in tf32, away from zero
// out (num_elements) TARGET; x (num_elements) SOURCE
// launch  grid = ceil(num_elements / (NUM_THREADS * ELEMENTS_PER_THREAD)), block = NUM_THREADS, smem = 0
// bound   memory: reads x once, writes out once
// source  see gkd/ops/cast.py
#include "include/types.cuh"

#if defined(TARGET_F32)
using Target = float;
#elif defined(TARGET_F16)
using Target = f16;
#elif defined(TARGET_BF16)
using Target = bf16;
#elif defined(TARGET_TF32)
using Target = tf32;
#endif

extern "C" __global__ __launch_bounds__(NUM_THREADS) void cast(Target* out, const Source* x, int num_elements) {
    grid_launch_next();
    grid_wait();
    int first = blockIdx.x * (NUM_THREADS * ELEMENTS_PER_THREAD) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < ELEMENTS_PER_THREAD; ++i) {
        int element = first + i * NUM_THREADS;
        if (element < num_elements) out[element] = from_float<Target>(to_float(x[element]));
    }
}
