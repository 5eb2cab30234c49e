// misaligned: a vector load of 16 bytes from an address that is a multiple of 4.
extern "C" __global__ void misaligned(float* out, const float* x) {
    float4 values = *reinterpret_cast<const float4*>(x + 1 + threadIdx.x);
    out[threadIdx.x] = values.x + values.w;
}
