// linear_few_split: out = activation(x @ weight^T + bias) for split operands and few rows, on the tensor cores of sm_90
// x (max_rows, IN_FEATURES), weight (OUT_FEATURES, IN_FEATURES) split (include/split.cuh) by their tensor maps, boxes of
// BLOCK_M and BLOCK_N rows by 128 bytes; out (max_rows, OUT_FEATURES) split by out_scale or, TO_SUM, f32; bias
// (OUT_FEATURES) f32; row_count (1) i32; inverse_scale = 1 / (the scale of x * that of the weights)
// launch  grid = ceil(max_rows / BLOCK_M) * ceil(OUT_FEATURES / BLOCK_N), block = NUM_THREADS: NUM_WARPS that multiply,
//         BLOCK_N / 8 that add, one that copies weights and one that copies x; smem = SMEM_BYTES, of which an SM has twice
//         as much, so that weights come while the kernel before still runs
// bound   the reading of the weights, which begins while the kernel before runs; then the way of x from the cache
// order   linear_wgmma_split's, and its bits: chunks of 64, each one chain of products, added in fp32, ascending
// source  see gkd/ops/linear.py
#include "include/gelu.cuh"
#include "include/mma.cuh"
#include "include/split.cuh"
#include "include/tma.cuh"

#if !defined(IN_FEATURES) || !defined(OUT_FEATURES) || !defined(GELU) || !defined(TO_SUM) || !defined(BLOCK_M) || \
    !defined(BLOCK_N) || !defined(NUM_WARPS) || !defined(NUM_ROUNDS) || !defined(NUM_THREADS) || !defined(SMEM_BYTES)
#error "IN_FEATURES, OUT_FEATURES, GELU, TO_SUM, BLOCK_M/N, NUM_WARPS, NUM_ROUNDS, NUM_THREADS, SMEM_BYTES: set by gkd.ops.linear"
#endif

constexpr int CHUNK_K = 64;  // and the elements of a row of 128 bytes, which is what the swizzle takes
constexpr int NUM_CHUNKS = IN_FEATURES / CHUNK_K;
constexpr int NUM_TILES_N = (OUT_FEATURES + BLOCK_N - 1) / BLOCK_N;
constexpr int NUM_ADDERS = BLOCK_N / 8;
// A warp multiplies every NUM_WARPS-th chunk. NOTE: an mbarrier can be waited for only in the phase that it is in or has just
// left. Each stage belongs to one warp, which knows that the chunk before has come because it has multiplied it.
constexpr int NUM_X_STAGES = NUM_WARPS, NUM_WEIGHT_STAGES = NUM_WARPS * NUM_ROUNDS;
static_assert(BLOCK_M == 16 && BLOCK_N % 8 == 0);
static_assert(NUM_THREADS == (NUM_WARPS + NUM_ADDERS + 2) * 32);
static_assert(IN_FEATURES % CHUNK_K == 0, "a box of high parts must not reach into the low ones");
static_assert(OUT_FEATURES % 8 == 0);

// A chunk of one operand, high and low parts.
template <int NUM_ROWS>
using Chunk = f16[2][NUM_ROWS * CHUNK_K];

struct SharedStorage {
    Chunk<BLOCK_N> weight[NUM_WEIGHT_STAGES];
    Chunk<BLOCK_M> x[NUM_X_STAGES];
    float sums[NUM_WARPS][BLOCK_M * BLOCK_N];  // of a warp's last chunk
    unsigned long long weight_full[NUM_WEIGHT_STAGES], weight_empty[NUM_WEIGHT_STAGES];
    unsigned long long x_full[NUM_X_STAGES], x_empty[NUM_X_STAGES];
    unsigned long long sums_full[NUM_WARPS], sums_empty[NUM_WARPS];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES);

// Copies an operand, chunk after chunk, as soon as a stage is free. The first round finds every stage free: the phase before
// the first counts as ended.
template <int NUM_ROWS, int NUM_STAGES>
__device__ __forceinline__ void produce(
    Chunk<NUM_ROWS> (&stages)[NUM_STAGES], unsigned long long* full, unsigned long long* empty, const TensorMap& map, int row) {
#pragma unroll 1
    for (int chunk = 0; chunk < NUM_CHUNKS; ++chunk) {
        int stage = chunk % NUM_STAGES;
        mbarrier_wait(&empty[stage], chunk / NUM_STAGES % 2 ^ 1);
        mbarrier_arrive_expect_tx(&full[stage], sizeof(stages[stage]));
        tma_load_3d(stages[stage], map, chunk * CHUNK_K, row, 0, &full[stage]);
    }
}

using Sums = float[BLOCK_N / 8][4];

// The sums of a chunk.
__device__ __forceinline__ void multiply(
    Sums& sums, const Chunk<BLOCK_M>& smem_x, const Chunk<BLOCK_N>& smem_weight) {
    int lane_idx = threadIdx.x % 32;
#pragma unroll
    for (int product = 0; product < 3; ++product) {
        // Two steps of 16 at a time, whose rows are 4 vectors of 8. NOTE: high parts are read twice: kept, they would take
        // the registers of the block that is to share the SM.
#pragma unroll
        for (int pair = 0; pair < CHUNK_K / 32; ++pair) {
            unsigned weight[BLOCK_N / 8][4];
#pragma unroll
            for (int n = 0; n < BLOCK_N / 8; ++n) {
                int offset = swizzle_128(n * 8 + lane_idx % 8, pair * 4 + lane_idx / 8);
                ldmatrix_x4(weight[n], smem_weight[product == 0] + offset);
            }
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                // Lanes 0-15 give 16 rows of x at the step's first 8 k, lanes 16-31 the same rows at the other 8.
                unsigned x[4];
                int offset = swizzle_128(lane_idx % 16, pair * 4 + step * 2 + lane_idx / 16);
                ldmatrix_x4(x, smem_x[product == 1] + offset);
#pragma unroll
                for (int n = 0; n < BLOCK_N / 8; ++n) {
                    mma(sums[n], x, weight[n][step * 2], weight[n][step * 2 + 1]);
                }
            }
        }
    }
}

// Every NUM_WARPS-th chunk.
__device__ __forceinline__ void multiply_chunks(SharedStorage& shared, int warp_idx) {
    int lane_idx = threadIdx.x % 32;
    for (int chunk = warp_idx; chunk < NUM_CHUNKS; chunk += NUM_WARPS) {
        int weight_stage = chunk % NUM_WEIGHT_STAGES, x_stage = chunk % NUM_X_STAGES;
        mbarrier_wait(&shared.weight_full[weight_stage], chunk / NUM_WEIGHT_STAGES % 2);
        mbarrier_wait(&shared.x_full[x_stage], chunk / NUM_X_STAGES % 2);
        Sums sums = {};
        multiply(sums, shared.x[x_stage], shared.weight[weight_stage]);
        mbarrier_wait(&shared.sums_empty[warp_idx], chunk / NUM_WARPS % 2 ^ 1);
#pragma unroll
        for (int n = 0; n < BLOCK_N / 8; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int element = (lane_idx / 4 + half * 8) * BLOCK_N + n * 8 + lane_idx % 4 * 2;
                store_vector(shared.sums[warp_idx] + element, Vector<float, 2>{{sums[n][half * 2], sums[n][half * 2 + 1]}});
            }
        }
        __syncwarp();  // the warp's 32 lanes: the sums are there
        mbarrier_arrive_warp(&shared.sums_full[warp_idx]);
        // NOTE: not before the sums are stored, see mbarrier_arrive_after.
        mbarrier_arrive_warp(&shared.weight_empty[weight_stage]);
        mbarrier_arrive_warp(&shared.x_empty[x_stage]);
    }
}

// Adds the chunks up, ascending. A thread has 4 neighbouring results of a row.
__device__ __forceinline__ void add_chunks(
    Out* out, SharedStorage& shared, const float* bias, int thread_idx, int first_row, int first_column, int num_rows,
    float inverse_scale, float out_scale) {
    constexpr int VECTOR = 4;
    int row = thread_idx * VECTOR / BLOCK_N, block_column = thread_idx * VECTOR % BLOCK_N;
    int column = first_column + block_column;
    bool exists = row < num_rows && column < OUT_FEATURES;
    Vector<float, VECTOR> column_bias{};
    if (exists) column_bias = load_vector<VECTOR>(bias + column);
    float values[VECTOR] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < NUM_CHUNKS; ++chunk) {
        int warp_idx = chunk % NUM_WARPS;
        mbarrier_wait(&shared.sums_full[warp_idx], chunk / NUM_WARPS % 2);
        Vector<float, VECTOR> sums = load_vector<VECTOR>(&shared.sums[warp_idx][row * BLOCK_N + block_column]);
        __syncwarp();  // the warp's 32 lanes: the sums have been read
        mbarrier_arrive_warp(&shared.sums_empty[warp_idx]);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) values[i] += sums.values[i];
    }
    if (!exists) return;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        values[i] = fmaf(values[i], inverse_scale, column_bias.values[i]);
        if constexpr (GELU) values[i] = gelu(values[i]);
    }
#if TO_SUM
    Vector<float, VECTOR> vector{{values[0], values[1], values[2], values[3]}};
    store_vector(out + static_cast<size_t>(first_row + row) * OUT_FEATURES + column, vector);
#else
    store_operand<OUT_FEATURES>(out, first_row + row, column, values, out_scale);
#endif
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 2) void linear_few_split(
    Out* out,
    const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap weight_map,
    const float* bias,
    const int* row_count,
    float inverse_scale,
    float out_scale) {
    extern __shared__ __align__(1024) unsigned char smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

    grid_launch_next();
    int first_row = blockIdx.x / NUM_TILES_N * BLOCK_M, first_column = blockIdx.x % NUM_TILES_N * BLOCK_N;
    int num_rows = *row_count - first_row;
    if (num_rows <= 0) return;  // the whole block
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < NUM_WEIGHT_STAGES; ++stage) {
            mbarrier_init(&shared.weight_full[stage], 1);
            mbarrier_init(&shared.weight_empty[stage], 1);
        }
        for (int warp = 0; warp < NUM_WARPS; ++warp) {
            mbarrier_init(&shared.x_full[warp], 1);
            mbarrier_init(&shared.x_empty[warp], 1);
            mbarrier_init(&shared.sums_full[warp], 1);
            mbarrier_init(&shared.sums_empty[warp], NUM_ADDERS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    constexpr int FIRST_ADDER = NUM_WARPS * 32, WEIGHT_THREAD = FIRST_ADDER + NUM_ADDERS * 32;
    if (threadIdx.x < FIRST_ADDER) {
        multiply_chunks(shared, threadIdx.x / 32);
    } else if (threadIdx.x < WEIGHT_THREAD) {
        int thread_idx = threadIdx.x - FIRST_ADDER;
        add_chunks(out, shared, bias, thread_idx, first_row, first_column, num_rows, inverse_scale, out_scale);
    } else if (threadIdx.x == WEIGHT_THREAD) {
        // The first weights are on their way before the kernel that computes x has ended.
        produce<BLOCK_N>(shared.weight, shared.weight_full, shared.weight_empty, weight_map, first_column);
    } else if (threadIdx.x == WEIGHT_THREAD + 32) {
        prefetch_tensor_map(x_map);
        grid_wait();
        produce<BLOCK_M>(shared.x, shared.x_full, shared.x_empty, x_map, first_row);
    }
}
