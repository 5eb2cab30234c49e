// linear_mma_split: out = activation(x @ weight^T + bias) for split operands and few rows, on the tensor cores of sm_80 and
// later
// x (max_rows, IN_FEATURES), weight (OUT_FEATURES, IN_FEATURES) split (include/split.cuh), at 16 bytes; out
// (max_rows, OUT_FEATURES) f32 or, OUT_SPLIT, split by out_scale; bias (OUT_FEATURES) f32; row_count (1) i32;
// inverse_scale = 1 / (the scale of x * that of the weights)
// launch  grid = ceil(max_rows / BLOCK_M) * ceil(OUT_FEATURES / BLOCK_N), block = NUM_THREADS, smem = SMEM_BYTES
// bound   the reading of the weights, and the latency of a chunk's chain: warps take chunks in turn
// order   linear_wgmma_split's, and its bits: chunks of 64, each one chain of products, added in fp32, ascending
// source  see gkd/ops/linear.py
#include "include/gelu.cuh"
#include "include/mma.cuh"
#include "include/split.cuh"

#if !defined(IN_FEATURES) || !defined(OUT_FEATURES) || !defined(GELU) || !defined(OUT_SPLIT) || !defined(BLOCK_M) || \
    !defined(BLOCK_N) || !defined(NUM_STAGES) || !defined(NUM_THREADS) || !defined(SMEM_BYTES)
#error "IN_FEATURES, OUT_FEATURES, GELU, OUT_SPLIT, BLOCK_M/N, NUM_STAGES, NUM_THREADS, SMEM_BYTES: set by gkd.ops.linear"
#endif

constexpr int CHUNK_K = 64;
constexpr int NUM_CHUNKS = IN_FEATURES / CHUNK_K;
constexpr int NUM_WARPS = NUM_THREADS / 32;
constexpr int VECTOR = 8;   // elements of 16 bytes, which is what cp.async copies and a row of ldmatrix has
constexpr int NUM_STEPS = CHUNK_K / 16;
static_assert(BLOCK_M == 16 && BLOCK_N == 16, "two products of m16n8k16");
static_assert(NUM_THREADS == BLOCK_M * BLOCK_N, "a thread a result");
static_assert(IN_FEATURES % CHUNK_K == 0);

struct Chunk {
    f16 x[2][BLOCK_M * CHUNK_K];  // high and low parts
    f16 weight[2][BLOCK_N * CHUNK_K];
};
struct SharedStorage {
    Chunk chunks[NUM_WARPS][NUM_STAGES];
    float sums[NUM_CHUNKS][BLOCK_M * BLOCK_N];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES);

// Where 8 elements of a tile with rows of 64 lie: exchanged within the row by its number, so that equal vectors of 8 rows,
// which ldmatrix reads at once, lie in different banks.
__device__ __forceinline__ f16* swizzle(f16* smem_tile, int row, int vector_idx) {
    return smem_tile + row * CHUNK_K + (vector_idx ^ row % 8) * VECTOR;
}

// Starts a warp's copy of both parts of 16 rows of a matrix, of which num_rows exist; the others become zeros.
__device__ __forceinline__ void load_rows(f16 (&smem_parts)[2][16 * CHUNK_K], const f16* rows, int num_rows, int chunk) {
    int lane_idx = threadIdx.x % 32, vector_idx = lane_idx % 8;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = i * 4 + lane_idx / 8;
            const f16* source = rows + static_cast<size_t>(row) * (2 * IN_FEATURES) + part * IN_FEATURES + chunk * CHUNK_K;
            cp_async_16(swizzle(smem_parts[part], row, vector_idx), source + vector_idx * VECTOR, row < num_rows ? 16 : 0);
        }
    }
}

// A warp's operands of a chunk, in the registers' order of m16n8k16, and their products.
__device__ __forceinline__ void multiply(float (&sums)[2][4], Chunk& chunk) {
    int lane_idx = threadIdx.x % 32;
    unsigned x[2][NUM_STEPS][4], weight[2][NUM_STEPS][4];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int step = 0; step < NUM_STEPS; ++step) {
            // Lanes 0-15 give 16 rows of x at the step's first 8 k, lanes 16-31 the same rows at the other 8; of the weights
            // lanes 0-15 give 8 rows at the first 8 k and again at the other 8, lanes 16-31 the next 8 rows.
            ldmatrix_x4(x[part][step], swizzle(chunk.x[part], lane_idx % 16, step * 2 + lane_idx / 16));
            int row = lane_idx / 16 * 8 + lane_idx % 8;
            ldmatrix_x4(weight[part][step], swizzle(chunk.weight[part], row, step * 2 + lane_idx / 8 % 2));
        }
    }
#pragma unroll
    for (int product = 0; product < 3; ++product) {
#pragma unroll
        for (int step = 0; step < NUM_STEPS; ++step) {
            const unsigned(&pairs)[4] = weight[product == 0][step];
            mma_m16n8k16(sums[0], x[product == 1][step], pairs[0], pairs[1]);
            mma_m16n8k16(sums[1], x[product == 1][step], pairs[2], pairs[3]);
        }
    }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS) void linear_mma_split(
    Out* out,
    const f16* x,
    const f16* weight,
    const float* bias,
    const int* row_count,
    float inverse_scale,
    float out_scale) {
    extern __shared__ uint4 smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

    constexpr int NUM_COLUMN_BLOCKS = (OUT_FEATURES + BLOCK_N - 1) / BLOCK_N;
    int first_row = blockIdx.x / NUM_COLUMN_BLOCKS * BLOCK_M, first_column = blockIdx.x % NUM_COLUMN_BLOCKS * BLOCK_N;
    int num_rows = *row_count - first_row;
    if (num_rows <= 0) return;  // the whole block
    int warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const f16* x_rows = x + static_cast<size_t>(first_row) * (2 * IN_FEATURES);
    const f16* weight_rows = weight + static_cast<size_t>(first_column) * (2 * IN_FEATURES);

    // One group of copies a chunk. Past the last chunk the group is empty, so that the number of groups tells the chunk.
    auto load_weight = [&](int turn) {
        int chunk = warp_idx + turn * NUM_WARPS;
        f16(&stage)[2][BLOCK_N * CHUNK_K] = shared.chunks[warp_idx][turn % NUM_STAGES].weight;
        if (chunk < NUM_CHUNKS) load_rows(stage, weight_rows, OUT_FEATURES - first_column, chunk);
    };
    auto load_x = [&](int turn) {
        int chunk = warp_idx + turn * NUM_WARPS;
        if (chunk < NUM_CHUNKS) load_rows(shared.chunks[warp_idx][turn % NUM_STAGES].x, x_rows, num_rows, chunk);
        cp_async_commit();
    };
    // The weights are on their way before the kernel that computes x has ended.
    grid_launch_next();
    for (int turn = 0; turn < NUM_STAGES; ++turn) load_weight(turn);
    grid_wait();
    for (int turn = 0; turn < NUM_STAGES; ++turn) load_x(turn);
    for (int turn = 0; warp_idx + turn * NUM_WARPS < NUM_CHUNKS; ++turn) {
        cp_async_wait<NUM_STAGES - 1>();
        __syncwarp();  // the warp's 32 lanes: each has waited for its own copies
        float sums[2][4] = {};
        multiply(sums, shared.chunks[warp_idx][turn % NUM_STAGES]);
        float* chunk_sums = shared.sums[warp_idx + turn * NUM_WARPS];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int element = (lane_idx / 4 + i / 2 * 8) * BLOCK_N + lane_idx % 4 * 2 + i % 2;
            chunk_sums[element] = sums[0][i];
            chunk_sums[element + 8] = sums[1][i];
        }
        __syncwarp();  // the warp's 32 lanes: the stage has been read
        load_weight(turn + NUM_STAGES);
        load_x(turn + NUM_STAGES);
    }
    __syncthreads();  // all threads: the sums of all chunks are there

    float total = 0.0f;
#pragma unroll 8
    for (int chunk = 0; chunk < NUM_CHUNKS; ++chunk) total += shared.sums[chunk][threadIdx.x];
    int row = threadIdx.x / BLOCK_N, column = first_column + threadIdx.x % BLOCK_N;
    if (row >= num_rows || column >= OUT_FEATURES) return;
    float values[1] = {fmaf(total, inverse_scale, bias[column])};
    if constexpr (GELU) values[0] = gelu(values[0]);
#if OUT_SPLIT
    store_operand<OUT_FEATURES>(out, first_row + row, column, values, out_scale);
#else
    out[static_cast<size_t>(first_row + row) * OUT_FEATURES + column] = values[0];
#endif
}
