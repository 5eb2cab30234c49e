// reverse: out[i] = x[n - 1 - i] within each block, through shared memory; and the ways to get it wrong.
// STATIC or dynamic shared memory. Without a barrier a thread reads what another has not written yet; a shift moves a
// write past the end of shared memory, or of out.
extern "C" __global__ void reverse(float* out, const float* x, int has_barrier, int shared_shift, int global_shift) {
#if STATIC
    __shared__ float smem_x[NUM_THREADS];
#else
    extern __shared__ float smem_x[];
#endif
    float* smem = smem_x;  // a plain pointer: the array's bound is not in its type
    int i = threadIdx.x, first = blockIdx.x * NUM_THREADS;
    smem[i + shared_shift] = x[first + i];
    if (has_barrier) __syncthreads();
    out[first + i + global_shift] = smem[NUM_THREADS - 1 - i];
}
