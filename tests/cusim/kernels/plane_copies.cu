// plane_copies: the copy engine brings a box of BOX_PLANES planes of x to shared memory; `seen` gets what lies there.
#include "include/tma.cuh"

enum Case { RIGHT, IN_TWO_DIMENSIONS };

extern "C" __global__ void plane_copies(
    const __grid_constant__ TensorMap x_map, unsigned* seen, int column, int row, int plane, int test_case) {
    __shared__ __align__(1024) unsigned smem[BOX_PLANES * BOX_ROWS][32];
    __shared__ unsigned long long full;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(&full, sizeof smem);
        if (test_case == IN_TWO_DIMENSIONS) {
            tma_load_2d(smem, x_map, column, row, &full);
        } else {
            tma_load_3d(smem, x_map, column, row, plane, &full);
        }
    }
    __syncthreads();
    mbarrier_wait(&full, 0);
    for (int i = threadIdx.x; i < BOX_PLANES * BOX_ROWS * 32; i += 32) seen[i] = smem[i / 32][i % 32];
}
