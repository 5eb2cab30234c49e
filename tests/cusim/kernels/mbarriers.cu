// mbarriers: two warps hand a number to each other, phase after phase; and what must not be done.
#include "include/tma.cuh"

enum Case {
    RIGHT,
    ASKED_ONCE,
    MISSING_ARRIVAL,
    TOO_MANY_ARRIVALS,
    NO_ARRIVALS,
    NOT_SHARED,
    MISALIGNED,
    NOT_INITIALISED,
    INITIALISED_TWICE,
    OVERWRITTEN,
    NO_PARITY
};

extern "C" __global__ __launch_bounds__(64) void mbarriers(int* out, unsigned long long* gmem, int test_case) {
    __shared__ int smem[32];
    __shared__ unsigned long long full, empty, spare[2];
    int lane_idx = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 32);
        mbarrier_init(&empty, test_case == NO_ARRIVALS ? 0 : 32);
        if (test_case == INITIALISED_TWICE) mbarrier_init(&full, 32);
        if (test_case == NOT_SHARED) mbarrier_init(gmem, 1);
        if (test_case == MISALIGNED) {
            mbarrier_init(reinterpret_cast<unsigned long long*>(reinterpret_cast<char*>(spare) + 4), 1);
        }
        if (test_case == NOT_INITIALISED) mbarrier_arrive(spare);
        if (test_case == OVERWRITTEN) ++full;
        if (test_case == NO_PARITY) mbarrier_try_wait(&full, 2);
        if (test_case == TOO_MANY_ARRIVALS) {
            mbarrier_init(spare, 1);
            mbarrier_arrive_expect_tx(spare, 16);
            mbarrier_arrive(spare);
        }
    }
    __syncthreads();
    if (test_case == ASKED_ONCE) {
        out[NUM_PHASES * 32 + threadIdx.x] = mbarrier_try_wait(&full, 0);
        __syncthreads();
    }

    for (int i = 0; i < NUM_PHASES; ++i) {
        if (threadIdx.x < 32) {
            mbarrier_wait(&empty, i % 2 ^ 1);
            smem[lane_idx] = i * 32 + lane_idx;
            if (test_case != MISSING_ARRIVAL || lane_idx > 0) mbarrier_arrive(&full);
        } else {
            mbarrier_wait(&full, i % 2);
            out[i * 32 + lane_idx] = smem[lane_idx ^ 31];
            mbarrier_arrive(&empty);
        }
    }
}
