// linear_simt: out = activation(x @ weight^T + bias) with fp32 multiply-adds, for any type but split
// out (max_rows, OUT_FEATURES) Out, x (max_rows, IN_FEATURES), weight (OUT_FEATURES, IN_FEATURES) Operand, all at 16 bytes;
// bias (OUT_FEATURES) f32; row_count (1) i32; fp32 sums, rounded once
// launch  grid = ceil(max_rows / BLOCK_M) * ceil(OUT_FEATURES / BLOCK_N), block = NUM_THREADS, smem = 0
// bound   arithmetic: 8 x 8 outputs a thread, so that 16 shared loads of 16 bytes feed 256 multiply-adds
// order   K is cut into chunks of CHUNK_K; a chunk is one ascending chain of multiply-adds from 0, and chunks are added
//         in fp32, ascending. A result depends on the row, the weights and nothing else: no thread shares its sums.
// source  see gkd/ops/linear.py
#include "include/gelu.cuh"
#include "include/types.cuh"
#include "include/vector.cuh"

#if !defined(IN_FEATURES) || !defined(OUT_FEATURES) || !defined(GELU) || !defined(BLOCK_M) || !defined(BLOCK_N) || \
    !defined(CHUNK_K) || !defined(NUM_THREADS)
#error "IN_FEATURES, OUT_FEATURES, GELU, BLOCK_M, BLOCK_N, CHUNK_K, NUM_THREADS: set by gkd.ops.linear"
#endif

constexpr int THREAD_M = 8, THREAD_N = 8;                   // outputs of a thread
constexpr int WARP_M = 4 * THREAD_M, WARP_N = 8 * THREAD_N;  // outputs of a warp
constexpr int BLOCK_K = 16;                                 // depth of a tile in shared memory
constexpr int VECTOR = 4;                                   // elements of a load
static_assert(BLOCK_N == WARP_N && BLOCK_M == NUM_THREADS / 32 * WARP_M, "warps are stacked along the rows");
static_assert(CHUNK_K % BLOCK_K == 0, "a chunk ends with a tile");

// The last chunk is filled up with zeros, which leave a sum as it is.
constexpr int NUM_CHUNKS = (IN_FEATURES + CHUNK_K - 1) / CHUNK_K;
constexpr int NUM_TILES = NUM_CHUNKS * (CHUNK_K / BLOCK_K);

// NOTE: a stride of 20 words puts the same 4 words of 8 successive rows into 8 different groups of 4 banks.
constexpr int SMEM_STRIDE = BLOCK_K + VECTOR;

// Where a thread's share of a tile of ROWS x BLOCK_K comes from: one vector of every ROW_STEP-th row.
constexpr int ROW_VECTORS = BLOCK_K / VECTOR;
constexpr int ROW_STEP = NUM_THREADS / ROW_VECTORS;
static_assert(BLOCK_M % ROW_STEP == 0 && BLOCK_N % ROW_STEP == 0, "each thread loads the same number of vectors");

// Elements [k, k + VECTOR) of a row of x or of the weights, zeros where there are none.
__device__ __forceinline__ Vector<Operand, VECTOR> load_piece(const Operand* matrix, int row, int num_rows, int k) {
    const Operand* piece = matrix + static_cast<size_t>(row) * IN_FEATURES + k;
    Vector<Operand, VECTOR> vector{};
    if (row >= num_rows) return vector;
    if constexpr (IN_FEATURES % VECTOR == 0) {
        if (k < IN_FEATURES) vector = load_vector<VECTOR>(piece);
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            if (k + i < IN_FEATURES) vector.values[i] = piece[i];
        }
    }
    return vector;
}

// A thread's share of a tile on its way from global to shared memory: in registers while the tile before is multiplied.
template <int ROWS>
struct TileShare {
    Vector<Operand, VECTOR> vectors[ROWS / ROW_STEP];

    __device__ __forceinline__ void load(const Operand* matrix, int first_row, int num_rows, int first_k) {
#pragma unroll
        for (int i = 0; i < ROWS / ROW_STEP; ++i) {
            int row = first_row + threadIdx.x / ROW_VECTORS + i * ROW_STEP;
            vectors[i] = load_piece(matrix, row, num_rows, first_k + threadIdx.x % ROW_VECTORS * VECTOR);
        }
    }

    __device__ __forceinline__ void store(float (&smem_tile)[ROWS][SMEM_STRIDE]) const {
#pragma unroll
        for (int i = 0; i < ROWS / ROW_STEP; ++i) {
            Vector<float, VECTOR> values;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) values.values[j] = to_float(vectors[i].values[j]);
            int row = threadIdx.x / ROW_VECTORS + i * ROW_STEP;
            store_vector(&smem_tile[row][threadIdx.x % ROW_VECTORS * VECTOR], values);
        }
    }
};

extern "C" __global__ __launch_bounds__(NUM_THREADS) void linear_simt(
    Out* out, const Operand* x, const Operand* weight, const float* bias, const int* row_count) {
    grid_launch_next();
    grid_wait();
    __shared__ __align__(16) float smem_x[2][BLOCK_M][SMEM_STRIDE];
    __shared__ __align__(16) float smem_weight[2][BLOCK_N][SMEM_STRIDE];

    constexpr int NUM_COLUMN_BLOCKS = (OUT_FEATURES + BLOCK_N - 1) / BLOCK_N;
    int block_row = blockIdx.x / NUM_COLUMN_BLOCKS * BLOCK_M;
    int block_column = blockIdx.x % NUM_COLUMN_BLOCKS * BLOCK_N;
    int num_rows = *row_count;
    if (block_row >= num_rows) return;  // the whole block

    // NOTE: a warp's 4 x 8 lanes are numbered so that lanes that differ in bit 0 share their columns, and lanes that
    // differ in bit 1 their rows. A 16-byte shared load takes two passes instead of four where either pair is equal.
    int warp_idx = threadIdx.x / 32;
    int lane_idx = threadIdx.x % 32;
    int thread_row = warp_idx * WARP_M + lane_idx / 16 * 2 + lane_idx % 2;
    int thread_column = lane_idx / 2 % 8;

    TileShare<BLOCK_M> share_x;
    TileShare<BLOCK_N> share_weight;
    share_x.load(x, block_row, num_rows, 0);
    share_weight.load(weight, block_column, OUT_FEATURES, 0);
    share_x.store(smem_x[0]);
    share_weight.store(smem_weight[0]);
    // All threads of the block, here and once a tile: the tile is written, and the other buffer has been read.
    __syncthreads();

    float total[THREAD_M][THREAD_N] = {};
    float chunk[THREAD_M][THREAD_N] = {};
    for (int tile = 0; tile < NUM_TILES; ++tile) {
        int buffer = tile % 2;
        // Past the last tile these are zeros that nobody reads.
        share_x.load(x, block_row, num_rows, (tile + 1) * BLOCK_K);
        share_weight.load(weight, block_column, OUT_FEATURES, (tile + 1) * BLOCK_K);
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += VECTOR) {
            Vector<float, VECTOR> columns[THREAD_N];
#pragma unroll
            for (int n = 0; n < THREAD_N; ++n) {
                columns[n] = load_vector<VECTOR>(&smem_weight[buffer][thread_column + n * 8][k]);
            }
#pragma unroll
            for (int m = 0; m < THREAD_M; ++m) {
                Vector<float, VECTOR> row = load_vector<VECTOR>(&smem_x[buffer][thread_row + m * 4][k]);
#pragma unroll
                for (int i = 0; i < VECTOR; ++i) {
#pragma unroll
                    for (int n = 0; n < THREAD_N; ++n) {
                        chunk[m][n] = fmaf(row.values[i], columns[n].values[i], chunk[m][n]);
                    }
                }
            }
        }
        if ((tile + 1) % (CHUNK_K / BLOCK_K) == 0) {
#pragma unroll
            for (int m = 0; m < THREAD_M; ++m) {
#pragma unroll
                for (int n = 0; n < THREAD_N; ++n) {
                    total[m][n] += chunk[m][n];
                    chunk[m][n] = 0.0f;
                }
            }
        }
        share_x.store(smem_x[1 - buffer]);
        share_weight.store(smem_weight[1 - buffer]);
        __syncthreads();
    }

#pragma unroll
    for (int n = 0; n < THREAD_N; ++n) {
        int column = block_column + thread_column + n * 8;
        if (column >= OUT_FEATURES) continue;
        float column_bias = bias[column];
#pragma unroll
        for (int m = 0; m < THREAD_M; ++m) {
            int row = block_row + thread_row + m * 4;
            float value = total[m][n] + column_bias;
            if constexpr (GELU) value = gelu(value);
#if defined(TANH)
            value = tanhf(value);
#endif
            if (row < num_rows) out[static_cast<size_t>(row) * OUT_FEATURES + column] = from_float<Out>(value);
        }
    }
}
