// divergent: threads of one block, or lanes of one warp, that wait for each other at different places.
enum Case { BARRIER_AND_WARP, TWO_BARRIERS, TWO_COLLECTIVES, NOT_IN_MASK, EARLY_EXIT };

extern "C" __global__ void divergent(int* out, int test_case) {
    int i = threadIdx.x;
    if (test_case == BARRIER_AND_WARP) {
        if (i % 32 == 3) {
            __syncwarp();
        } else {
            __syncthreads();
        }
    } else if (test_case == TWO_BARRIERS) {
        if (i < 32) {
            __syncthreads();
        } else {
            __syncthreads();
        }
    } else if (test_case == TWO_COLLECTIVES) {
        if (i % 32 < 16) {
            i = __shfl_xor_sync(0xffffffffu, i, 1);
        } else {
            __syncwarp();
        }
    } else if (test_case == NOT_IN_MASK) {
        i = __shfl_xor_sync(0x0000ffffu, i, 1);
    } else if (test_case == EARLY_EXIT) {
        // Not an error: nobody waits for a thread that has returned.
        if (i % 32 >= 20 || i >= 64) return;
        __syncthreads();
        i = __popc(__ballot_sync(0xffffffffu, 1));
    }
    out[threadIdx.x] = i;
}
