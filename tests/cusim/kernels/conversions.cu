// conversions: x as f16, as bf16 and as tf32, the f16 as f32 again, and 2^x.
#include "include/types.cuh"

extern "C" __global__ void conversions(
    unsigned short* f16_out,
    unsigned short* bf16_out,
    tf32* tf32_out,
    float* widened,
    float* powers,
    const float* x,
    int num_elements) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= num_elements) return;
    f16_out[i] = from_float<f16>(x[i]).bits;
    bf16_out[i] = from_float<bf16>(x[i]).bits;
    tf32_out[i] = from_float<tf32>(x[i]);
    widened[i] = to_float(from_float<f16>(x[i]));
    powers[i] = ex2_approx(x[i]);
}
