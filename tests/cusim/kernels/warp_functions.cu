// warp_functions: out (10, 32), a row for each function of the lane's number times 10.
extern "C" __global__ void warp_functions(int* out) {
    int lane_idx = threadIdx.x, value = lane_idx * 10;
    int results[] = {
        __shfl_sync(0xffffffffu, value, 5),
        __shfl_sync(0xffffffffu, value, lane_idx + 1, 8),
        __shfl_xor_sync(0xffffffffu, value, 3),
        __shfl_xor_sync(0xffffffffu, value, 16, 16),
        __shfl_up_sync(0xffffffffu, value, 2),
        __shfl_up_sync(0xffffffffu, value, 2, 8),
        __shfl_down_sync(0xffffffffu, value, 2),
        __shfl_down_sync(0xffffffffu, value, 2, 8),
        static_cast<int>(__ballot_sync(0xffffffffu, lane_idx % 3 == 0)),
        // Each half of the warp by itself.
        __shfl_xor_sync(lane_idx < 16 ? 0x0000ffffu : 0xffff0000u, value, 1),
    };
    for (int i = 0; i < 10; ++i) out[i * 32 + lane_idx] = results[i];
}
