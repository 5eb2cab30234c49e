// box_copies: the copy engine brings a box of x to shared memory, and from there to the same place of out; `seen` gets
// what lay in shared memory in between.
#include "include/tma.cuh"

enum Case {
    RIGHT,
    READ_EARLY,
    PHASE_AHEAD,
    TOO_MANY_BYTES,
    TOO_FEW_BYTES,
    NOBODY_WAITS,
    TWICE,
    MISALIGNED,
    NOT_SHARED,
    NO_BARRIER,
    OVERWRITTEN,
    NO_COMMIT,
    NO_WAIT
};

extern "C" __global__ void box_copies(
    const __grid_constant__ TensorMap out_map,
    const __grid_constant__ TensorMap x_map,
    unsigned* seen,
    int column,
    int row,
    int test_case) {
    __shared__ __align__(1024) unsigned smem[BOX_ROWS + 8][32];
    __shared__ unsigned long long full, not_a_barrier;
    unsigned* box = test_case == MISALIGNED ? smem[4] : test_case == NOT_SHARED ? seen : smem[0];
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int num_bytes = BOX_ROWS * 128 + (test_case == TOO_MANY_BYTES ? 16 : test_case == TOO_FEW_BYTES ? -16 : 0);
        mbarrier_arrive_expect_tx(&full, num_bytes);
        tma_load_2d(box, x_map, column, row, test_case == NO_BARRIER ? &not_a_barrier : &full);
        if (test_case == TWICE) tma_load_2d(box, x_map, column, row, &full);
    }
    if (test_case == NOBODY_WAITS) return;
    if (test_case != READ_EARLY) mbarrier_wait(&full, test_case == PHASE_AHEAD);
    for (int i = threadIdx.x; i < BOX_ROWS * 32; i += 32) seen[i] = box[i];
    mbarrier_wait(&full, 0);

    if (threadIdx.x == 0) {
        tma_store_2d(out_map, column, row, box);
        if (test_case != NO_COMMIT) bulk_commit();
        if (test_case == OVERWRITTEN) box[0] = 0;
        if (test_case != NO_WAIT) bulk_wait_read();
    }
}
