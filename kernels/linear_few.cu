// linear_few: out = activation(x @ weight^T + bias) for few rows, on the tensor cores of sm_90, for 16 bits and tf32
// out (max_rows, OUT_FEATURES) Out; x (max_rows, IN_FEATURES), weight (OUT_FEATURES, IN_FEATURES) Operand by their tensor
// maps, boxes of NUM_SLICES slices of BLOCK_M and BLOCK_N rows; bias (OUT_FEATURES) f32; row_count (1) i32; fp32
// accumulators, rounded once
// launch  grid = ceil(max_rows / BLOCK_M) * ceil(OUT_FEATURES / BLOCK_N), block = NUM_THREADS: after the warps that
//         compute one that copies weights and one that copies x; smem = SMEM_BYTES, of which an SM has twice as much, so
//         that weights come while the kernel before still runs
// bound   the reading of the weights, which begins while the kernel before runs; then the way of x from the cache, and
//         the latency of a chain of products: 25 cycles a step of mma, 31 of wgmma
// order   a result is one ascending chain of products over K from 0, the same bits as linear_mma's
// source  see gkd/ops/linear.py
#include "include/gelu.cuh"
#include "include/mma.cuh"
#include "include/tma.cuh"
#include "include/types.cuh"
#include "include/vector.cuh"
#include "include/wgmma.cuh"

#if !defined(IN_FEATURES) || !defined(OUT_FEATURES) || !defined(GELU) || !defined(BLOCK_M) || !defined(BLOCK_N) || \
    !defined(NUM_SLICES) || !defined(NUM_STAGES) || !defined(NUM_THREADS) || !defined(SMEM_BYTES)
#error "IN_FEATURES, OUT_FEATURES, GELU, BLOCK_M/N, NUM_SLICES, NUM_STAGES, NUM_THREADS, SMEM_BYTES: set by gkd.ops.linear"
#endif
#if !defined(DTYPE_F16) && !defined(DTYPE_BF16) && !defined(DTYPE_TF32)
#error "DTYPE_F16, DTYPE_BF16 or DTYPE_TF32"
#endif

constexpr int SLICE_K = 128 / sizeof(Operand);  // elements of a row of 128 bytes, which is what the swizzle takes
constexpr int NUM_STEPS = IN_FEATURES / (SLICE_K * NUM_SLICES);
constexpr int NUM_TILES_N = (OUT_FEATURES + BLOCK_N - 1) / BLOCK_N;
// NOTE: a warpgroup's product has 64 rows, and its chain is the slower one: it pays where all of them are there.
constexpr bool BY_WARPGROUP = BLOCK_M == 64;
constexpr int NUM_WARPS = BY_WARPGROUP ? 4 : BLOCK_N / 8;  // that compute
static_assert(BLOCK_M == 16 || BLOCK_M == 32 || BLOCK_M == 64);
static_assert(NUM_THREADS == (NUM_WARPS + 2) * 32);
static_assert(IN_FEATURES % (SLICE_K * NUM_SLICES) == 0, "whole stages");
static_assert(NUM_STAGES > 1 || NUM_STEPS == 1, "a stage is given back once the next one has come");
static_assert(OUT_FEATURES % 8 == 0, "rows start at 16 bytes");

struct Stage {
    Operand x[NUM_SLICES][BLOCK_M * SLICE_K];
    Operand weight[NUM_SLICES][BLOCK_N * SLICE_K];
};
struct SharedStorage {
    Stage stages[NUM_STAGES];
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES);

// Copies one operand of every stage, as soon as it is free. The first round finds every stage free: the phase before the
// first counts as ended.
template <int SIZE>
__device__ __forceinline__ void produce(
    SharedStorage& shared, Operand (Stage::*operand)[NUM_SLICES][SIZE], const TensorMap& map, int row) {
#pragma unroll 1
    for (int step = 0; step < NUM_STEPS; ++step) {
        int stage = step % NUM_STAGES;
        mbarrier_wait(&shared.empty[stage], step / NUM_STAGES % 2 ^ 1);
        mbarrier_arrive_expect_tx(&shared.full[stage], NUM_SLICES * SIZE * sizeof(Operand));
        tma_load_3d(shared.stages[stage].*operand, map, 0, row, step * NUM_SLICES, &shared.full[stage]);
    }
}

// Two neighbouring results of a row.
__device__ __forceinline__ void store_results(
    Out* out, int row, int column, float low, float high, const float (&bias)[2], int num_rows) {
    low += bias[0];
    high += bias[1];
    if constexpr (GELU) {
        low = gelu(low);
        high = gelu(high);
    }
    if (row < num_rows && column < OUT_FEATURES) {
        store_pair(out + static_cast<size_t>(row) * OUT_FEATURES + column, low, high);
    }
}

__device__ __forceinline__ void load_bias(float (&pair)[2], const float* bias, int column) {
    bool exists = OUT_FEATURES % BLOCK_N == 0 || column < OUT_FEATURES;
    pair[0] = exists ? bias[column] : 0.0f;
    pair[1] = exists ? bias[column + 1] : 0.0f;
}

// A warp's operands of two products' K, in the registers' order of mma.
struct Fragments {
    static constexpr int TILES_M = BLOCK_M / 16, K = SLICE_K / 2;

    unsigned x[2][TILES_M][4];
    unsigned weight[4];

    __device__ __forceinline__ void load(const Stage& stage, int part, int warp_idx) {
        constexpr int SLICE_PARTS = SLICE_K / K;
        const Operand *smem_x = stage.x[part / SLICE_PARTS], *smem_weight = stage.weight[part / SLICE_PARTS];
        int lane_idx = threadIdx.x % 32, chunk = part % SLICE_PARTS * 4;
        // 8 rows of the weights at each of the part's 4 chunks of 16 bytes; of x lanes 0-15 give 16 rows at a step's first chunk,
        // lanes 16-31 the same rows at its second.
        ldmatrix_x4(weight, smem_weight + swizzle_128<sizeof(Operand)>(warp_idx * 8 + lane_idx % 8, chunk + lane_idx / 8));
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
                int offset = swizzle_128<sizeof(Operand)>(m * 16 + lane_idx % 16, chunk + step * 2 + lane_idx / 16);
                ldmatrix_x4(x[step][m], smem_x + offset);
            }
        }
    }

    __device__ __forceinline__ void multiply(float (&sums)[TILES_M][4]) const {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int m = 0; m < TILES_M; ++m) {
                mma(sums[m], x[step][m], weight[step * 2], weight[step * 2 + 1]);
            }
        }
    }
};

// A warp computes 8 columns of all rows.
__device__ __forceinline__ void compute_by_warp(
    Out* out, SharedStorage& shared, const float* bias, int row, int column, int num_rows) {
    constexpr int NUM_PARTS = NUM_SLICES * SLICE_K / Fragments::K;
    static_assert(NUM_PARTS % 2 == 0, "a part's fragments are in the same registers in each stage");
    int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    column += warp_idx * 8 + lane_idx % 4 * 2;
    float pair[2];
    load_bias(pair, bias, column);

    // Two sets of operands: a part's are read from shared memory while the products of the part before are under way.
    Fragments fragments[2];
    float sums[Fragments::TILES_M][4] = {};
    mbarrier_wait(&shared.full[0], 0);
    fragments[0].load(shared.stages[0], 0, warp_idx);
    for (int step = 0; step < NUM_STEPS; ++step) {
        int stage = step % NUM_STAGES, next = (step + 1) % NUM_STAGES, parity = (step + 1) / NUM_STAGES % 2;
        bool has_come = false;
#pragma unroll
        for (int part = 0; part < NUM_PARTS; ++part) {
            if (part + 1 < NUM_PARTS) {
                fragments[(part + 1) % 2].load(shared.stages[stage], part + 1, warp_idx);
            } else if (step + 1 < NUM_STEPS) {
                if (!has_come) mbarrier_wait(&shared.full[next], parity);
                fragments[0].load(shared.stages[next], 0, warp_idx);
            }
            fragments[part % 2].multiply(sums);
            // Asked here, so that the answer is there when it is needed: the products leave no time to wait for it.
            if (part + 2 == NUM_PARTS && step + 1 < NUM_STEPS) has_come = mbarrier_try_wait(&shared.full[next], parity);
        }
        mbarrier_arrive_after(&shared.empty[stage], sums[Fragments::TILES_M - 1][0]);
    }
#pragma unroll
    for (int m = 0; m < Fragments::TILES_M; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int out_row = row + m * 16 + half * 8 + lane_idx / 4;
            store_results(out, out_row, column, sums[m][half * 2], sums[m][half * 2 + 1], pair, num_rows);
        }
    }
}

// The warpgroup computes all columns, each warp of 16 rows.
__device__ __forceinline__ void compute_by_warpgroup(
    Out* out, SharedStorage& shared, const float* bias, int row, int column, int num_rows) {
    int lane_idx = threadIdx.x % 32;
    column += lane_idx % 4 * 2;
    float pairs[BLOCK_N / 8][2];
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) load_bias(pairs[n], bias, column + n * 8);

    float sums[BLOCK_N / 2];
    for (int step = 0; step < NUM_STEPS; ++step) {
        int stage = step % NUM_STAGES;
        mbarrier_wait(&shared.full[stage], step / NUM_STAGES % 2);
        wgmma_fence();
#pragma unroll
        for (int slice = 0; slice < NUM_SLICES; ++slice) {
#pragma unroll
            for (int k = 0; k < SLICE_K; k += SLICE_K / 4) {
                unsigned long long x = wgmma_descriptor(shared.stages[stage].x[slice] + k);
                unsigned long long weight = wgmma_descriptor(shared.stages[stage].weight[slice] + k);
                wgmma(sums, x, weight, step > 0 || slice > 0 || k > 0);
            }
        }
        wgmma_commit();
        // All but the newest products are done, and with them the stage before.
        wgmma_wait<1>();
        if (step > 0) mbarrier_arrive_warp(&shared.empty[(step - 1) % NUM_STAGES]);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int out_row = row + threadIdx.x / 32 * 16 + half * 8 + lane_idx / 4;
            const float* values = &sums[n * 4 + half * 2];
            store_results(out, out_row, column + n * 8, values[0], values[1], pairs[n], num_rows);
        }
    }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS) void linear_few(
    Out* out,
    const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap weight_map,
    const float* bias,
    const int* row_count) {
    extern __shared__ __align__(1024) unsigned char smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

    grid_launch_next();
    int row = blockIdx.x / NUM_TILES_N * BLOCK_M, column = blockIdx.x % NUM_TILES_N * BLOCK_N;
    int num_rows = *row_count;
    if (row >= num_rows) return;  // the whole block
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(&shared.full[stage], 2);
            mbarrier_init(&shared.empty[stage], NUM_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x >= NUM_WARPS * 32) {
        if (threadIdx.x == NUM_WARPS * 32) produce(shared, &Stage::weight, weight_map, column);
        if (threadIdx.x == NUM_WARPS * 32 + 32) {
            prefetch_tensor_map(x_map);
            grid_wait();
            produce(shared, &Stage::x, x_map, row);
        }
    } else if constexpr (BY_WARPGROUP) {
        compute_by_warpgroup(out, shared, bias, row, column, num_rows);
    } else {
        compute_by_warp(out, shared, bias, row, column, num_rows);
    }
}
