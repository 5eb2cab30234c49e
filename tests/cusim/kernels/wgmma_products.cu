// wgmma_products: one warpgroup multiplies a (64, ROW) by b (128, ROW), transposed, and by c (64, 128), into f32: by_rows
// (64, 128) = 1 + a @ b.T, both operands from shared memory; and of 16 bits by_columns (64, 128) = a @ c and narrow (64, 64) =
// a @ c[:, :64], a from registers; and what must not be done.
#include "include/tma.cuh"
#include "include/wgmma.cuh"

enum Case {
    RIGHT,
    NO_FENCE,
    NO_COMMIT,
    NO_WAIT,
    ONE_PENDING,
    OPERAND_CHANGED,
    ACCUMULATOR_CHANGED,
    OTHER_OPERAND,
    OTHER_ACCUMULATOR,
    MISSING_THREAD,
    OTHER_WAIT,
    ABSENT_FROM_WAIT,
    NO_SWIZZLE,
    BITS_LEFT,
    PAST_ROW,
    SECOND_ROW,
    MISALIGNED,
    NOT_SHARED,
    PAST_SHARED
};

constexpr int ROW = 128 / sizeof(Operand);

struct Operands {
    Operand a[64 * ROW], b[128 * ROW], c[2][64 * ROW];
};

template <int NUM_COLUMNS>
__device__ void store(float* out, const float (&d)[NUM_COLUMNS / 2]) {
    for (int i = 0; i < NUM_COLUMNS / 2; ++i) {
        int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        out[row * NUM_COLUMNS + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = d[i];
    }
}

#if !defined(DTYPE_TF32)
template <int NUM_COLUMNS>
__device__ void multiply_columns(float* out, Operands& smem) {
    float d[NUM_COLUMNS / 2];
    wgmma_fence();
    for (int step = 0; step < 4; ++step) {
        unsigned a[4];
        for (int i = 0; i < 4; ++i) {
            int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
            const Operand* chunk = smem.a + swizzle_128(row, step * 2 + i / 2);
            a[i] = *reinterpret_cast<const unsigned*>(chunk + threadIdx.x % 4 * 2);
        }
        wgmma(d, a, wgmma_descriptor(smem.c[0] + step * 16 * 64, sizeof smem.c[0]), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    store<NUM_COLUMNS>(out, d);
}
#endif

extern "C" __global__ __launch_bounds__(128) void wgmma_products(
    float* by_rows,
    float* by_columns,
    float* narrow,
    const __grid_constant__ TensorMap a_map,
    const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map,
    int test_case) {
    extern __shared__ __align__(1024) unsigned char smem_bytes[];
    Operands& smem = *reinterpret_cast<Operands*>(smem_bytes);
    __shared__ unsigned long long full;
    if (threadIdx.x == 0) {
        mbarrier_init(&full, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(&full, sizeof smem);
        tma_load_2d(smem.a, a_map, 0, 0, &full);
        tma_load_2d(smem.b, b_map, 0, 0, &full);
        for (int i = 0; i < 2; ++i) tma_load_2d(smem.c[i], c_map, i * ROW, 0, &full);
    }
    __syncthreads();
    mbarrier_wait(&full, 0);

    bool is_one = threadIdx.x == 77;
    float d[64], other[64];
    for (float& value : d) value = 1.0f;
    if (test_case != NO_FENCE) wgmma_fence();
    for (int step = 0; step < 4; ++step) {
        if (test_case == MISSING_THREAD && is_one && step == 3) break;
        const Operand* first = smem.a + step * (ROW / 4);
        if (test_case == OTHER_OPERAND && is_one) first = smem.a;
        if (test_case == PAST_ROW) first += 8;
        if (test_case == SECOND_ROW) first += ROW;
        if (test_case == MISALIGNED) first += 1;
        if (test_case == NOT_SHARED) first = reinterpret_cast<const Operand*>(by_rows);
        if (test_case == PAST_SHARED) first = smem.c[1] + 8 * ROW;
        unsigned long long a = wgmma_descriptor(first), b = wgmma_descriptor(smem.b + step * (ROW / 4));
        if (test_case == NO_SWIZZLE) a &= ~(3ull << 62);
        if (test_case == BITS_LEFT) a |= 1ull << 14;
        wgmma(test_case == OTHER_ACCUMULATOR && is_one && step == 3 ? other : d, a, b, true);
        if (test_case == ONE_PENDING && step == 2) wgmma_commit();
    }
    if (test_case != NO_COMMIT) wgmma_commit();
    if (test_case == OPERAND_CHANGED && is_one) smem.b[0].bits ^= 1;
    if (test_case == ACCUMULATOR_CHANGED && is_one) d[5] = 0.0f;
    if (test_case == ABSENT_FROM_WAIT && is_one) return;
    if (test_case == ONE_PENDING || (test_case == OTHER_WAIT && is_one)) {
        wgmma_wait<1>();
    } else if (test_case != NO_WAIT) {
        wgmma_wait<0>();
    }
    store<128>(by_rows, d);

#if !defined(DTYPE_TF32)
    multiply_columns<128>(by_columns, smem);
    multiply_columns<64>(narrow, smem);
#endif
}
