// linear_wgmma_split: out = activation(x @ weight^T + bias) on the tensor cores of sm_90, for split operands
// x (max_rows, IN_FEATURES), weight (OUT_FEATURES, IN_FEATURES) split (include/split.cuh), by tensor maps of boxes of BLOCK_M and
// BLOCK_N rows by 128 bytes; out (max_rows, OUT_FEATURES) split by out_scale or, TO_SUM, f32; bias (OUT_FEATURES) f32;
// row_count (1) i32; inverse_scale = 1 / (the scale of x * that of the weights)
// launch  grid = at most one block for each tile of BLOCK_M x BLOCK_N results, tiles of a row first; block = NUM_THREADS,
//         smem = SMEM_BYTES
// bound   arithmetic: three products of f16 for one of fp32
// order   K is cut into chunks of 64. A chunk is one chain of products, high * low, low * high and high * high, each ascending
//         over K; chunks are added in fp32, ascending: the tensor cores cut their running sums off, and over all of K that
//         would cost 4 bits.
// source  see gkd/ops/linear.py; Ootomo & Yokota 2022 for the split and the sums outside the tensor cores
#include "include/gelu.cuh"
#include "include/mma.cuh"
#include "include/split.cuh"
#include "include/tma.cuh"
#include "include/wgmma.cuh"

#if !defined(IN_FEATURES) || !defined(OUT_FEATURES) || !defined(GELU) || !defined(TO_SUM) || !defined(BLOCK_M) || \
    !defined(BLOCK_N) || !defined(NUM_STAGES) || !defined(NUM_THREADS) || !defined(MIN_BLOCKS) || !defined(SMEM_BYTES)
#error "IN_FEATURES, OUT_FEATURES, GELU, TO_SUM, BLOCK_M/N, NUM_STAGES, NUM_THREADS, SMEM_BYTES: set by gkd.ops.linear"
#endif

constexpr int CHUNK_K = 64;  // and the elements of a row of 128 bytes, which is what the swizzle takes
constexpr int NUM_CHUNKS = IN_FEATURES / CHUNK_K;
constexpr int NUM_TILES_N = (OUT_FEATURES + BLOCK_N - 1) / BLOCK_N;
constexpr int WGMMA_M = 64, WGMMA_K = 16;
constexpr int NUM_CONSUMERS = BLOCK_M / WGMMA_M;
static_assert(BLOCK_M % WGMMA_M == 0);
static_assert(NUM_THREADS == (NUM_CONSUMERS + 1) * 128, "warpgroups that compute and one that copies");
static_assert(IN_FEATURES % CHUNK_K == 0, "a box of high parts must not reach into the low ones");
static_assert(OUT_FEATURES % 8 == 0);

struct Stage {
    f16 x[2][BLOCK_M * CHUNK_K];  // high and low parts
    f16 weight[2][BLOCK_N * CHUNK_K];
};
struct SharedStorage {
    Stage stages[NUM_STAGES];
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES);

// Copies one operand of all tiles of this block, one chunk after another, as soon as its stage is free. The first round
// finds every stage free: the phase before the first counts as ended.
template <int SIZE, class FirstRow>
__device__ __forceinline__ void produce(
    SharedStorage& shared, f16 (Stage::*operand)[2][SIZE], const TensorMap& map, int num_tiles, FirstRow first_row) {
    int step = 0;
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        for (int chunk = 0; chunk < NUM_CHUNKS; ++chunk, ++step) {
            int stage = step % NUM_STAGES;
            mbarrier_wait(&shared.empty[stage], step / NUM_STAGES % 2 ^ 1);
            mbarrier_arrive_expect_tx(&shared.full[stage], 2 * SIZE * sizeof(f16));
            tma_load_3d(shared.stages[stage].*operand, map, chunk * CHUNK_K, first_row(tile), 0, &shared.full[stage]);
        }
    }
}

// Starts the products of the chunk at the ring's step, 64 rows by BLOCK_N.
__device__ __forceinline__ void multiply(float (&sums)[BLOCK_N / 2], SharedStorage& shared, int step, int consumer_idx) {
    const Stage& stage = shared.stages[step % NUM_STAGES];
    mbarrier_wait(&shared.full[step % NUM_STAGES], step / NUM_STAGES % 2);
    wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; ++product) {
        const f16* x = stage.x[product == 1] + consumer_idx * WGMMA_M * CHUNK_K;
        const f16* weight = stage.weight[product == 0];
#pragma unroll
        for (int k = 0; k < CHUNK_K; k += WGMMA_K) {
            wgmma(sums, wgmma_descriptor(x + k), wgmma_descriptor(weight + k), product > 0 || k > 0);
        }
    }
    wgmma_commit();
}

// Adds a finished chunk, and gives its stage back.
__device__ __forceinline__ void add(float (&totals)[BLOCK_N / 2], const float (&sums)[BLOCK_N / 2], SharedStorage& shared, int step) {
    mbarrier_arrive_warp(&shared.empty[step % NUM_STAGES]);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) totals[i] += sums[i];
}

__device__ __forceinline__ void store(
    Out* out, const float (&totals)[BLOCK_N / 2], const float* bias, float inverse_scale, float out_scale, int num_rows,
    int first_row, int first_column) {
    int lane_idx = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < BLOCK_N / 8; ++tile) {
        int column = first_column + tile * 8 + lane_idx % 4 * 2;
        if (OUT_FEATURES % BLOCK_N != 0 && column >= OUT_FEATURES) break;
        Vector<float, 2> column_bias = load_vector<2>(bias + column);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = first_row + threadIdx.x % 128 / 32 * 16 + lane_idx / 4 + half * 8;
            float values[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                values[i] = fmaf(totals[tile * 4 + half * 2 + i], inverse_scale, column_bias.values[i]);
                if constexpr (GELU) values[i] = gelu(values[i]);
            }
            if (row >= num_rows) continue;
#if TO_SUM
            store_vector(out + static_cast<size_t>(row) * OUT_FEATURES + column, Vector<float, 2>{{values[0], values[1]}});
#else
            store_operand<OUT_FEATURES>(out, row, column, values, out_scale);
#endif
        }
    }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, MIN_BLOCKS) void linear_wgmma_split(
    Out* out,
    const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap weight_map,
    const float* bias,
    const int* row_count,
    float inverse_scale,
    float out_scale) {
    extern __shared__ __align__(1024) unsigned char smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(&shared.full[stage], 2);
            mbarrier_init(&shared.empty[stage], NUM_CONSUMERS * 4);  // a lane of each warp
        }
        fence_mbarrier_init();
    }
    grid_launch_next();
    __syncthreads();

    int num_rows = *row_count;
    int num_tiles = (num_rows + BLOCK_M - 1) / BLOCK_M * NUM_TILES_N;
    int warpgroup_idx = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup_idx == NUM_CONSUMERS) {
        if constexpr (MIN_BLOCKS == 1) setmaxnreg_dec<40>();
        // The first weights are on their way before the kernel that computes x has ended.
        if (threadIdx.x == NUM_CONSUMERS * 128) {
            produce(shared, &Stage::weight, weight_map, num_tiles, [](int tile) { return tile % NUM_TILES_N * BLOCK_N; });
        }
        if (threadIdx.x == NUM_CONSUMERS * 128 + 32) {
            prefetch_tensor_map(x_map);
            grid_wait();
            produce(shared, &Stage::x, x_map, num_tiles, [](int tile) { return tile / NUM_TILES_N * BLOCK_M; });
        }
    } else {
        if constexpr (MIN_BLOCKS == 1) setmaxnreg_inc<232>();
        int step = 0;
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            float totals[BLOCK_N / 2] = {};
            // Two sets of sums: a chunk is added while the next one's products are under way.
            float even[BLOCK_N / 2], odd[BLOCK_N / 2];
            multiply(even, shared, step, warpgroup_idx);
#pragma unroll 1
            for (int chunk = 1; chunk < NUM_CHUNKS; chunk += 2) {
                multiply(odd, shared, ++step, warpgroup_idx);
                wgmma_wait<1>();
                add(totals, even, shared, step - 1);
                if (chunk + 1 == NUM_CHUNKS) break;
                multiply(even, shared, ++step, warpgroup_idx);
                wgmma_wait<1>();
                add(totals, odd, shared, step - 1);
            }
            wgmma_wait<0>();
            if constexpr (NUM_CHUNKS % 2 == 0) {
                add(totals, odd, shared, step++);
            } else {
                add(totals, even, shared, step++);
            }
            int row = tile / NUM_TILES_N * BLOCK_M + warpgroup_idx * WGMMA_M;
            store(out, totals, bias, inverse_scale, out_scale, num_rows, row, tile % NUM_TILES_N * BLOCK_N);
        }
    }
}
