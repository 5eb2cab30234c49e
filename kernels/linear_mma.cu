// linear_mma: out = activation(x @ weight^T + bias) on the tensor cores of sm_80 and later, for 16 bits and tf32
// out (max_rows, OUT_FEATURES) Out, x (max_rows, IN_FEATURES), weight (OUT_FEATURES, IN_FEATURES) Operand, all at 16 bytes;
// bias (OUT_FEATURES) f32; row_count (1) i32; fp32 accumulators, rounded once
// launch  grid = ceil(max_rows / BLOCK_M) * ceil(OUT_FEATURES / BLOCK_N), block = NUM_THREADS,
//         smem = NUM_STAGES * (BLOCK_M + BLOCK_N) * 128
// bound   arithmetic for many rows; the reading of the weights for few
// order   a result is one ascending chain of products of STEP_K over K from 0. It depends on the row, the weights and
//         nothing else: no warp shares its sums.
// source  see gkd/ops/linear.py; the pipeline of cp.async stages is CUTLASS's "multistage" one
#include "include/gelu.cuh"
#include "include/mma.cuh"
#include "include/types.cuh"
#include "include/vector.cuh"

#if !defined(IN_FEATURES) || !defined(OUT_FEATURES) || !defined(GELU) || !defined(BLOCK_M) || !defined(BLOCK_N) || \
    !defined(WARP_M) || !defined(WARP_N) || !defined(BLOCK_K) || !defined(NUM_STAGES) || !defined(NUM_THREADS)
#error "IN_FEATURES, OUT_FEATURES, GELU, BLOCK_M/N/K, WARP_M/N, NUM_STAGES, NUM_THREADS: set by gkd.ops.linear"
#endif
#if !defined(DTYPE_F16) && !defined(DTYPE_BF16) && !defined(DTYPE_TF32)
#error "DTYPE_F16, DTYPE_BF16 or DTYPE_TF32"
#endif

constexpr int VECTOR = 16 / sizeof(Operand);  // elements of 16 bytes, which is what cp.async copies and a row of ldmatrix has
constexpr int STEP_K = 2 * VECTOR;            // depth of one tensor-core product
constexpr int NUM_STEPS = BLOCK_K / STEP_K;
constexpr int NUM_TILES = (IN_FEATURES + BLOCK_K - 1) / BLOCK_K;

// NOTE: for many rows, 64 x 64 outputs a warp. Shared memory gives 128 bytes a cycle, and a step reads (64 + 64) * 32 bytes
// for 32 products: with smaller warp tiles the reads, not the products, would be the bound. For few rows it is the weights'
// way from memory, and small tiles put more multiprocessors to it.
constexpr int WARPS_M = BLOCK_M / WARP_M;
constexpr int NUM_WARPS = WARPS_M * (BLOCK_N / WARP_N);  // that multiply; any others only help to copy
constexpr int TILES_M = WARP_M / 16, TILES_N = WARP_N / 8;  // products of a warp in a step

static_assert(IN_FEATURES % VECTOR == 0, "a row of x and of the weights starts at 16 bytes");
static_assert(BLOCK_K * sizeof(Operand) == 128, "a row of a stage: see swizzle");
static_assert(BLOCK_M % WARP_M == 0 && BLOCK_N % WARP_N == 0, "whole warps");
static_assert(TILES_N % 2 == 0, "weights are read in pairs of 8 columns");
static_assert(NUM_THREADS / 32 >= NUM_WARPS, "a warp for each part of the tile");
static_assert(NUM_STAGES >= 2, "one stage is filled while another is read");

struct Stage {
    Operand x[BLOCK_M * BLOCK_K];
    Operand weight[BLOCK_N * BLOCK_K];
};
static_assert(sizeof(Out) == 4 || (WARP_N <= BLOCK_K && NUM_STAGES * sizeof(Stage) >= NUM_WARPS * WARP_M * 128),
              "results go where the tiles were");

// Where a vector of a tile lies.
// NOTE: a row fills all 32 banks, so that equal vectors of 8 rows, which ldmatrix reads at once, would lie in the same
// 4. Exchanged within the row by its number, they lie in 8 different groups of 4, and a row is still 128 bytes in line.
template <class Element>
__device__ __forceinline__ Element* swizzle(Element* smem_tile, int row, int vector_idx) {
    return smem_tile + row * BLOCK_K + (vector_idx ^ row % 8) * VECTOR;
}

// A thread's share of the copies of ROWS rows of x or of the weights, tile after tile: one vector of every ROW_STEP-th
// row.
// NOTE: one pointer a thread. The others lie at constant distances from it, which the copy instructions add.
template <int ROWS>
struct TileCopy {
    static constexpr int ROW_VECTORS = BLOCK_K / VECTOR;
    static constexpr int ROW_STEP = NUM_THREADS / ROW_VECTORS;
    static_assert(ROWS % ROW_STEP == 0 && ROW_STEP % 8 == 0, "the same number of vectors for all, equally swizzled");

    const Operand* source;
    int rows_left;  // in the matrix from the thread's first row on
    int row, vector_idx;

    __device__ __forceinline__ TileCopy(const Operand* matrix, int first_row, int num_rows)
        : row(threadIdx.x / ROW_VECTORS), vector_idx(threadIdx.x % ROW_VECTORS) {
        source = matrix + static_cast<size_t>(first_row + row) * IN_FEATURES + vector_idx * VECTOR;
        rows_left = num_rows - first_row - row;
    }

    // Starts the copy of columns [first_k, first_k + BLOCK_K), each call BLOCK_K further than the one before. Zeros
    // come from outside the matrix: they leave a sum as it is.
    __device__ __forceinline__ void start(Operand* smem_tile, int first_k) {
        bool inside = IN_FEATURES % BLOCK_K == 0 || first_k + vector_idx * VECTOR < IN_FEATURES;
        Operand* destination = swizzle(smem_tile, row, vector_idx);
#pragma unroll
        for (int i = 0; i < ROWS / ROW_STEP; ++i) {
            // NOTE: of 0 source bytes nothing is read, so that the address may lie outside the matrix.
            int source_bytes = inside && i * ROW_STEP < rows_left ? VECTOR * sizeof(Operand) : 0;
            cp_async_16(destination + i * ROW_STEP * BLOCK_K, source + i * ROW_STEP * IN_FEATURES, source_bytes);
        }
        source += BLOCK_K;
    }
};

// A warp's operands of one step, in the registers' order of mma.
struct Fragments {
    unsigned x[TILES_M][4];
    unsigned weight[TILES_N / 2][4];  // two products' each

    __device__ __forceinline__ void load(Stage& stage, int warp_row, int warp_column, int step) {
        int lane_idx = threadIdx.x % 32;
        int vector_idx = step * (STEP_K / VECTOR);
        // Lanes 0-15 give 16 rows of x at the step's first vector, lanes 16-31 the same rows at its second.
        const Operand* smem_x = swizzle(stage.x, warp_row + lane_idx % 16, vector_idx + lane_idx / 16);
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) ldmatrix_x4(x[m], smem_x + m * 16 * BLOCK_K);
        // Lanes 0-15 give 8 rows of the weights at the first vector and again at the second, lanes 16-31 the next 8 rows.
        int row = warp_column + lane_idx / 16 * 8 + lane_idx % 8;
        const Operand* smem_weight = swizzle(stage.weight, row, vector_idx + lane_idx / 8 % 2);
#pragma unroll
        for (int n = 0; n < TILES_N / 2; ++n) ldmatrix_x4(weight[n], smem_weight + n * 16 * BLOCK_K);
    }
};

__device__ __forceinline__ void multiply(float (&sums)[TILES_M][TILES_N][4], const Fragments& fragments) {
#pragma unroll
    for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
        for (int n = 0; n < TILES_N; ++n) {
            const unsigned* pair = &fragments.weight[n / 2][n % 2 * 2];
            mma(sums[m][n], fragments.x[m], pair[0], pair[1]);
        }
    }
}

// Two neighbouring results of a row.
__device__ __forceinline__ void store_pair_of_row(Out* row, int column, float low, float high) {
    if constexpr (OUT_FEATURES % 2 == 0) {
        if (column < OUT_FEATURES) store_pair(row + column, low, high);
    } else {
        if (column < OUT_FEATURES) row[column] = from_float<Out>(low);
        if (column + 1 < OUT_FEATURES) row[column + 1] = from_float<Out>(high);
    }
}

// Activation and rounding. NOTE: of a product 4 lanes hold 8 neighbouring columns. Of 4 bytes each they fill a sector of global
// memory, of 2 bytes half a one: those leave in rows of WARP_N, by way of a warp's part of shared memory, where they lie as in
// a stage.
__device__ __forceinline__ void store_results(
    Out* out, const float (&sums)[TILES_M][TILES_N][4], const float* bias, int num_rows, int first_row, int first_column,
    Out* smem_results) {
    int lane_idx = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
        int column = first_column + n * 8 + lane_idx % 4 * 2;
        float column_bias[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) column_bias[i] = column + i < OUT_FEATURES ? bias[column + i] : 0.0f;
#pragma unroll
        for (int m = 0; m < TILES_M; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float pair[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    pair[i] = sums[m][n][half * 2 + i] + column_bias[i];
                    if constexpr (GELU) pair[i] = gelu(pair[i]);
                }
                int row = m * 16 + half * 8 + lane_idx / 4;
                if constexpr (sizeof(Out) == 2) {
                    store_pair(swizzle(smem_results, row, n) + lane_idx % 4 * 2, pair[0], pair[1]);
                } else if (first_row + row < num_rows) {
                    store_pair_of_row(out + static_cast<size_t>(first_row + row) * OUT_FEATURES, column, pair[0], pair[1]);
                }
            }
        }
    }
    if constexpr (sizeof(Out) == 4) return;
    __syncwarp();  // the warp's 32 lanes: each reads what others wrote
    constexpr int ROW_VECTORS = WARP_N / VECTOR;
    int vector_idx = lane_idx % ROW_VECTORS;
    int column = first_column + vector_idx * VECTOR;
#pragma unroll
    for (int i = 0; i < WARP_M * ROW_VECTORS / 32; ++i) {
        int row = (i * 32 + lane_idx) / ROW_VECTORS;
        if (first_row + row >= num_rows) break;
        Vector<Out, VECTOR> vector = load_vector<VECTOR>(swizzle(smem_results, row, vector_idx));
        Out* destination = out + static_cast<size_t>(first_row + row) * OUT_FEATURES + column;
        if constexpr (OUT_FEATURES % VECTOR == 0) {
            if (column < OUT_FEATURES) store_vector(destination, vector);
        } else {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                if (column + j < OUT_FEATURES) destination[j] = vector.values[j];
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS) void linear_mma(
    Out* out, const Operand* x, const Operand* weight, const float* bias, const int* row_count) {
    extern __shared__ Stage smem_stages[];

    constexpr int NUM_COLUMN_BLOCKS = (OUT_FEATURES + BLOCK_N - 1) / BLOCK_N;
    int block_row = blockIdx.x / NUM_COLUMN_BLOCKS * BLOCK_M;
    int block_column = blockIdx.x % NUM_COLUMN_BLOCKS * BLOCK_N;
    int num_rows = *row_count;
    if (block_row >= num_rows) return;  // the whole block
    int warp_idx = threadIdx.x / 32;
    int warp_row = warp_idx % WARPS_M * WARP_M;
    int warp_column = warp_idx / WARPS_M * WARP_N;
    bool multiplies = NUM_THREADS / 32 == NUM_WARPS || warp_idx < NUM_WARPS;

    TileCopy<BLOCK_M> copy_x(x, block_row, num_rows);
    TileCopy<BLOCK_N> copy_weight(weight, block_column, OUT_FEATURES);
    // One group of copies a tile. Past the last tile the group is empty, so that the number of groups tells the tile.
    auto load_stage = [&](int tile) {
        if (tile < NUM_TILES) {
            Stage& stage = smem_stages[tile % NUM_STAGES];
            copy_x.start(stage.x, tile * BLOCK_K);
            copy_weight.start(stage.weight, tile * BLOCK_K);
        }
        cp_async_commit();
    };
    // The first weights are on their way before the kernel that computes x has ended.
    grid_launch_next();
    for (int tile = 0; tile < min(NUM_STAGES - 1, NUM_TILES); ++tile) {
        copy_weight.start(smem_stages[tile].weight, tile * BLOCK_K);
    }
    grid_wait();
    for (int tile = 0; tile < NUM_STAGES - 1; ++tile) {
        if (tile < NUM_TILES) copy_x.start(smem_stages[tile].x, tile * BLOCK_K);
        cp_async_commit();
    }
    cp_async_wait<NUM_STAGES - 2>();
    __syncthreads();  // all threads: the first tile has come, each thread having waited for its own copies

    // Two sets of operands: a step's are read from shared memory while the products of the step before are under way.
    Fragments fragments[2];
    if (multiplies) fragments[0].load(smem_stages[0], warp_row, warp_column, 0);
    float sums[TILES_M][TILES_N][4] = {};
    for (int tile = 0; tile < NUM_TILES; ++tile) {
#pragma unroll
        for (int step = 0; step < NUM_STEPS; ++step) {
            bool tile_ends = step == NUM_STEPS - 1;
            if (tile_ends) {
                cp_async_wait<NUM_STAGES - 2>();
                __syncthreads();  // all threads, once a tile: the next tile has come, and this one has been read
            }
            if (multiplies && (!tile_ends || tile + 1 < NUM_TILES)) {
                Stage& stage = smem_stages[(tile + tile_ends) % NUM_STAGES];
                fragments[(step + 1) % 2].load(stage, warp_row, warp_column, (step + 1) % NUM_STEPS);
            }
            // Into the stage of the tile before, which all have read since the barrier.
            if (step == 0) load_stage(tile + NUM_STAGES - 1);
            if (multiplies) multiply(sums, fragments[step % 2]);
        }
    }

    if (!multiplies) return;
    // The barrier of the last tile freed the stages: every operand is in registers, and no copy is under way.
    Out* smem_results = reinterpret_cast<Out*>(smem_stages) + warp_idx * (WARP_M * BLOCK_K);
    store_results(out, sums, bias, num_rows, block_row + warp_row, block_column + warp_column, smem_results);
}
