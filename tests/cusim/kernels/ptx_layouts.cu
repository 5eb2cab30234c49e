// ptx_layouts: one warp multiplies a (16, 16) by b (16, 8), both row-major and 16 bits, or (16, 8) by (8, 8) of tf32, into
// d (16, 8) f32, and stores what ldmatrix gave each lane of a, plain and transposed (32, 4), by the wrappers of
// kernels/include/ptx.cuh.
#include "include/ptx.cuh"

extern "C" __global__ __launch_bounds__(32) void ptx_layouts(
    float* d, unsigned* plain, unsigned* transposed, const unsigned short* a, const unsigned short* b) {
    __shared__ __align__(16) unsigned short smem_a[16][16];
    __shared__ __align__(16) unsigned short smem_b[16][8];
    int lane_idx = threadIdx.x;
    cp_async_16(&smem_a[lane_idx / 2][lane_idx % 2 * 8], a + lane_idx * 8, 16);
    if (lane_idx < 16) cp_async_16(&smem_b[lane_idx][0], b + lane_idx * 8, 16);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();

    unsigned a_fragment[4], b_fragment[4];
    // Rows 0-7 then 8-15 of the left half, then of the right half: the order of a's registers.
    ldmatrix_x4(a_fragment, &smem_a[lane_idx % 16][lane_idx / 16 * 8]);
    float accumulator[4] = {1.0f, 2.0f, 3.0f, 4.0f};
#ifdef TF32
    // ldmatrix transposes 16 bits only.
    const unsigned* words = reinterpret_cast<const unsigned*>(smem_b);
    for (int i = 0; i < 2; ++i) b_fragment[i] = words[(lane_idx % 4 + i * 4) * 8 + lane_idx / 4];
    mma_m16n8k8_tf32(accumulator, a_fragment, b_fragment[0], b_fragment[1]);
#else
    // b's registers hold pairs along k, which are neighbours in the transpose of its rows; lanes 16-31 repeat.
    ldmatrix_x4_trans(b_fragment, &smem_b[lane_idx % 16][0]);
#ifdef BF16
    mma_m16n8k16_bf16(accumulator, a_fragment, b_fragment[0], b_fragment[1]);
#else
    mma_m16n8k16_f16(accumulator, a_fragment, b_fragment[0], b_fragment[1]);
#endif
#endif
    for (int i = 0; i < 4; ++i) {
        d[(lane_idx / 4 + i / 2 * 8) * 8 + lane_idx % 4 * 2 + i % 2] = accumulator[i];
        plain[lane_idx * 4 + i] = a_fragment[i];
    }
    ldmatrix_x4_trans(a_fragment, &smem_a[lane_idx % 16][lane_idx / 16 * 8]);
    for (int i = 0; i < 4; ++i) transposed[lane_idx * 4 + i] = a_fragment[i];
}
