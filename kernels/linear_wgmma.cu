// linear_wgmma: out = activation(x @ weight^T + bias) on the tensor cores of sm_90, for 16 bits and tf32
// out (max_rows, OUT_FEATURES) Out, of 16 bits by its tensor map; x (max_rows, IN_FEATURES), weight (OUT_FEATURES, IN_FEATURES)
// Operand by theirs; boxes of BLOCK_M, BLOCK_M and BLOCK_N rows by 128 bytes; bias (OUT_FEATURES) f32; row_count (1) i32; fp32
// accumulators, rounded once; of out by a tensor map, whole tiles of rows are written
// launch  grid = at most one block for each tile of BLOCK_M x BLOCK_N results, tiles of a row first; block = NUM_THREADS,
//         smem = SMEM_BYTES
// bound   arithmetic
// order   a result is one ascending chain of products over K from 0, the same bits as linear_mma's
// source  see gkd/ops/linear.py; warp roles as in CUTLASS's "ping-pong" kernel
#include "include/gelu.cuh"
#include "include/mma.cuh"
#include "include/tma.cuh"
#include "include/types.cuh"
#include "include/wgmma.cuh"

#if !defined(IN_FEATURES) || !defined(OUT_FEATURES) || !defined(GELU) || !defined(BLOCK_M) || !defined(BLOCK_N) || \
    !defined(NUM_STAGES) || !defined(NUM_THREADS) || !defined(SMEM_BYTES)
#error "IN_FEATURES, OUT_FEATURES, GELU, BLOCK_M, BLOCK_N, NUM_STAGES, NUM_THREADS, SMEM_BYTES: set by gkd.ops.linear"
#endif
#if !defined(DTYPE_F16) && !defined(DTYPE_BF16) && !defined(DTYPE_TF32)
#error "DTYPE_F16, DTYPE_BF16 or DTYPE_TF32"
#endif

constexpr int BLOCK_K = 128 / sizeof(Operand);  // elements of a row of 128 bytes, which is what the swizzle takes
constexpr int NUM_TILES_K = (IN_FEATURES + BLOCK_K - 1) / BLOCK_K;
constexpr int NUM_TILES_N = (OUT_FEATURES + BLOCK_N - 1) / BLOCK_N;
constexpr int NUM_CONSUMERS = 2;
constexpr int WGMMA_M = 64, WGMMA_K = BLOCK_K / 4;
constexpr int NUM_PARTS_M = BLOCK_M / WGMMA_M;
static_assert(NUM_THREADS == (NUM_CONSUMERS + 1) * 128, "two warpgroups that compute and one that copies");
static_assert(BLOCK_N == 128 && BLOCK_M % WGMMA_M == 0);
static_assert(IN_FEATURES * sizeof(Operand) % 16 == 0 && OUT_FEATURES % 8 == 0, "rows start at 16 bytes");

struct Stage {
    Operand x[BLOCK_M * BLOCK_K];
    Operand weight[BLOCK_N * BLOCK_K];
};
struct SharedStorage {
    Stage stages[NUM_STAGES];
#if !defined(DTYPE_TF32)
    Out out[NUM_CONSUMERS][BLOCK_N / 64][BLOCK_M * 64];  // a consumer's results, in boxes as its tensor map has them
#endif
    unsigned long long full[NUM_STAGES], empty[NUM_STAGES];
    unsigned long long turn[NUM_CONSUMERS];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES);

// The copies of all tiles of this block, one K slice after another, as soon as a stage is free.
__device__ __forceinline__ void produce(
    SharedStorage& shared, const TensorMap& x_map, const TensorMap& weight_map, int num_tiles) {
    int step = 0;
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        int row = tile / NUM_TILES_N * BLOCK_M, column = tile % NUM_TILES_N * BLOCK_N;
        for (int k = 0; k < NUM_TILES_K; ++k, ++step) {
            int stage = step % NUM_STAGES;
            // The first round finds every stage free: the phase before the first counts as ended.
            mbarrier_wait(&shared.empty[stage], step / NUM_STAGES % 2 ^ 1);
            mbarrier_arrive_expect_tx(&shared.full[stage], sizeof(Stage));
            tma_load_2d(shared.stages[stage].x, x_map, k * BLOCK_K, row, &shared.full[stage]);
            tma_load_2d(shared.stages[stage].weight, weight_map, k * BLOCK_K, column, &shared.full[stage]);
        }
    }
}

constexpr int NUM_ARRIVALS = 4;  // one lane of each warp of the warpgroup

// sums = x @ weight^T of a consumer's next tile, whose slices are the ring's steps from `step` on.
__device__ __forceinline__ void multiply(float (&sums)[NUM_PARTS_M][64], SharedStorage& shared, int step, int consumer_idx) {
    for (int k = 0; k < NUM_TILES_K; ++k, ++step) {
        int stage = step % NUM_STAGES;
        mbarrier_wait(&shared.full[stage], step / NUM_STAGES % 2);
        wgmma_fence();
#pragma unroll
        for (int part_k = 0; part_k < BLOCK_K / WGMMA_K; ++part_k) {
            unsigned long long weight = wgmma_descriptor(shared.stages[stage].weight + part_k * WGMMA_K);
#pragma unroll
            for (int part_m = 0; part_m < NUM_PARTS_M; ++part_m) {
                const Operand* x = shared.stages[stage].x + part_m * WGMMA_M * BLOCK_K + part_k * WGMMA_K;
                wgmma(sums[part_m], wgmma_descriptor(x), weight, k > 0 || part_k > 0);
            }
        }
        wgmma_commit();
        // All but the newest products are done, and with them the stage before.
        wgmma_wait<1>();
        if (k > 0) mbarrier_arrive_warp(&shared.empty[(step - 1) % NUM_STAGES]);
    }
    mbarrier_arrive_warp(&shared.turn[(consumer_idx + 1) % NUM_CONSUMERS]);
    wgmma_wait<0>();
    mbarrier_arrive_warp(&shared.empty[(step - 1) % NUM_STAGES]);
}

// How a consumer's tile gets from registers to out. NOTE: 4 lanes hold 8 neighbouring columns of a row. Of 4 bytes each they
// fill a sector of global memory, and are stored as they are: shared memory is all stages. Of 2 bytes they fill half a one, and
// leave in boxes, by the copy engine.
#if defined(DTYPE_TF32)
using Destination = Out*;
struct Tile {
    Out* out;
    int num_rows, row, column;

    __device__ __forceinline__ Tile(Out* out, SharedStorage&, int, int num_rows, int row, int column)
        : out(out), num_rows(num_rows), row(row), column(column) {}
    __device__ __forceinline__ void begin() {}
    // A lane's two neighbouring results of a row and of 8 columns of the tile.
    __device__ __forceinline__ void store(int tile_row, int tile_n, float low, float high) {
        int out_row = row + tile_row, out_column = column + tile_n * 8 + threadIdx.x % 4 * 2;
        if (out_row >= num_rows || out_column >= OUT_FEATURES) return;
        store_pair(out + static_cast<size_t>(out_row) * OUT_FEATURES + out_column, low, high);
    }
    __device__ __forceinline__ void end() {}
};
#else
using Destination = TensorMap;
struct Tile {
    const TensorMap& map;
    Out (&smem_out)[BLOCK_N / 64][BLOCK_M * 64];
    int row, column, consumer_idx;

    __device__ __forceinline__ Tile(
        const TensorMap& map, SharedStorage& shared, int consumer_idx, int, int row, int column)
        : map(map), smem_out(shared.out[consumer_idx]), row(row), column(column), consumer_idx(consumer_idx) {}
    __device__ __forceinline__ void begin() {
        if (threadIdx.x % 128 == 0) bulk_wait_read();  // of the tile before
        barrier_sync(1 + consumer_idx, 128);
    }
    __device__ __forceinline__ void store(int tile_row, int tile_n, float low, float high) {
        Out* box = smem_out[tile_n / 8];
        store_pair(box + swizzle_128(tile_row, tile_n % 8) + threadIdx.x % 4 * 2, low, high);
    }
    __device__ __forceinline__ void end() {
        fence_proxy_async();
        barrier_sync(1 + consumer_idx, 128);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int box = 0; box < BLOCK_N / 64; ++box) {
                if (column + box * 64 < OUT_FEATURES) tma_store_2d(map, column + box * 64, row, smem_out[box]);
            }
            bulk_commit();
        }
    }
};
#endif

__device__ __forceinline__ void store(float (&sums)[NUM_PARTS_M][64], Tile tile, const float* bias) {
    int thread_idx = threadIdx.x % 128, lane_idx = threadIdx.x % 32;
    int warp_row = thread_idx / 32 * 16 + lane_idx / 4;
    tile.begin();
#pragma unroll
    for (int tile_n = 0; tile_n < BLOCK_N / 8; ++tile_n) {
        int n = tile.column + tile_n * 8 + lane_idx % 4 * 2;
        float bias0 = 0.0f, bias1 = 0.0f;
        if (OUT_FEATURES % BLOCK_N == 0 || n < OUT_FEATURES) {
            bias0 = bias[n];
            bias1 = bias[n + 1];
        }
#pragma unroll
        for (int part_m = 0; part_m < NUM_PARTS_M; ++part_m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float low = sums[part_m][tile_n * 4 + half * 2] + bias0;
                float high = sums[part_m][tile_n * 4 + half * 2 + 1] + bias1;
                if (GELU) {
                    low = gelu(low);
                    high = gelu(high);
                }
                tile.store(part_m * WGMMA_M + warp_row + half * 8, tile_n, low, high);
            }
        }
    }
    tile.end();
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, 1) void linear_wgmma(
    const __grid_constant__ Destination out,
    const __grid_constant__ TensorMap x_map,
    const __grid_constant__ TensorMap weight_map,
    const float* bias,
    const int* row_count) {
    extern __shared__ __align__(1024) unsigned char smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(&shared.full[stage], 1);
            mbarrier_init(&shared.empty[stage], NUM_ARRIVALS);
        }
        for (int consumer = 0; consumer < NUM_CONSUMERS; ++consumer) mbarrier_init(&shared.turn[consumer], NUM_ARRIVALS);
        fence_mbarrier_init();
    }
    grid_launch_next();
    grid_wait();
    __syncthreads();

    int num_rows = *row_count, num_tiles = (num_rows + BLOCK_M - 1) / BLOCK_M * NUM_TILES_N;
    int warpgroup_idx = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup_idx == NUM_CONSUMERS) {
        setmaxnreg_dec<40>();
        if (threadIdx.x == NUM_CONSUMERS * 128) produce(shared, x_map, weight_map, num_tiles);
    } else {
        setmaxnreg_inc<232>();
        // The consumers take tiles in turn: while one stores, the other multiplies.
        int step = warpgroup_idx * NUM_TILES_K;
        unsigned parity = warpgroup_idx == 0;
        for (int tile = blockIdx.x + warpgroup_idx * gridDim.x; tile < num_tiles; tile += NUM_CONSUMERS * gridDim.x) {
            float sums[NUM_PARTS_M][64];
            // NOTE: a stage's barrier can be waited for only in the phase that it is in or has just left, so not before the
            // other consumer has waited for all of its tile. The first tile's turn counts as given.
            mbarrier_wait(&shared.turn[warpgroup_idx], parity);
            multiply(sums, shared, step, warpgroup_idx);
            int row = tile / NUM_TILES_N * BLOCK_M, column = tile % NUM_TILES_N * BLOCK_N;
            store(sums, Tile(out, shared, warpgroup_idx, num_rows, row, column), bias);
            step += NUM_CONSUMERS * NUM_TILES_K;
            parity ^= 1;
        }
        if (threadIdx.x % 128 == 0) bulk_wait_read();  // shared memory lives as long as its block
    }
}
