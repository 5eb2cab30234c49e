// unwritten: the first block writes shared memory, the second reads it without having written it.
extern "C" __global__ void unwritten(float* out) {
    __shared__ float smem_static[32];
    extern __shared__ __align__(16) float smem_dynamic[];
    int i = threadIdx.x;
    if (blockIdx.x == 0) smem_static[i] = smem_dynamic[i] = 1.0f;
    __syncthreads();
    out[blockIdx.x * 64 + i] = smem_static[i];
    out[blockIdx.x * 64 + 32 + i] = smem_dynamic[i];
}
