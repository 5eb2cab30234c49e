// What the attention kernels on mma.sync share: a block's tiles in shared memory, of BLOCK_Q queries or BLOCK_K keys or values
// of Operand, and what a warp reads and writes of them.
#pragma once
#include "include/attention.cuh"
#include "include/mma.cuh"
#include "include/reduce.cuh"

#if !defined(BLOCK_Q) || !defined(BLOCK_K) || !defined(NUM_THREADS) || !defined(MIN_BLOCKS) || !defined(SMEM_BYTES)
#error "BLOCK_Q, BLOCK_K, NUM_THREADS, MIN_BLOCKS, SMEM_BYTES: set by gkd.ops.attention"
#endif

constexpr int NUM_STAGES = 2;
constexpr int WARP_ROWS = BLOCK_Q / (NUM_THREADS / 32);
// NOTE: each fragment of keys and values that is read from shared memory serves all of a warp's row tiles. With one tile
// of 16 rows those reads alone would take longer than the products.
constexpr int ROW_TILES = WARP_ROWS / 16;
constexpr int KEY_TILES = BLOCK_K / 8;
constexpr int DIM_TILES = HEAD_DIM / 8;
constexpr int DIM_STEPS = HEAD_DIM * sizeof(Operand) / 32;
// A tile's rows are cut into chunks of 16 bytes, what cp.async and ldmatrix move.
constexpr int CHUNKS = HEAD_DIM * sizeof(Operand) / 16;
static_assert(HEAD_DIM == 32 || HEAD_DIM == 64 || HEAD_DIM == 128);
static_assert(WARP_ROWS % 16 == 0 && BLOCK_K % 16 == 0 && BLOCK_K % (NUM_THREADS / CHUNKS) == 0);

// The element at which a chunk of a row begins. NOTE: the 8 rows that ldmatrix reads at once, at one chunk, must lie in
// different 16-byte columns of the 128 bytes that shared memory delivers at a time: the row permutes the chunks.
__device__ __forceinline__ int swizzle(int row, int chunk) {
    constexpr int ROWS_PER_LINE = CHUNKS < 8 ? 8 / CHUNKS : 1;
    constexpr int PERMUTED = CHUNKS < 8 ? CHUNKS : 8;
    return row * HEAD_DIM + (chunk ^ (row / ROWS_PER_LINE % PERMUTED)) * (HEAD_DIM / CHUNKS);
}

// Where in a tile the row begins that a lane gives to ldmatrix, for the tile's first 16 rows and step of dimensions. Of its four
// matrices, 8 rows of 16 bytes, the second lies below the first and the third right of it, for queries and for transposed
// values; for keys, whose rows are the right operand's columns, the other way round. From there, 16 rows down are a sum, and
// chunks to the right an exclusive or, because the permutation is one.
__device__ __forceinline__ int lane_of_rows(int lane_idx) { return swizzle(lane_idx % 16, lane_idx / 16); }
__device__ __forceinline__ int lane_of_keys(int lane_idx) {
    return swizzle(lane_idx / 16 * 8 + lane_idx % 8, lane_idx / 8 % 2);
}

// Starts to copy ROWS rows, of which the first num_rows exist; the others, which are not read, become zeros.
template <int ROWS>
__device__ __forceinline__ void load_tile(Operand* smem_tile, const Operand* gmem_tile, int num_rows) {
    int chunk = threadIdx.x % CHUNKS;
#pragma unroll
    for (int first = 0; first < ROWS; first += NUM_THREADS / CHUNKS) {
        int row = first + threadIdx.x / CHUNKS;
        const Operand* source = gmem_tile + static_cast<size_t>(row) * QKV_STRIDE + chunk * (HEAD_DIM / CHUNKS);
        cp_async_16(smem_tile + swizzle(row, chunk), source, row < num_rows ? 16 : 0);
    }
}

// 16 queries of the warp, the dimensions of a step, as the left operand.
__device__ __forceinline__ void load_query(unsigned (&fragment)[4], const Operand* smem_query, int row_tile, int step) {
    int offset = lane_of_rows(threadIdx.x % 32) ^ step * (HEAD_DIM / DIM_STEPS);
    ldmatrix_x4(fragment, smem_query + row_tile * 16 * HEAD_DIM + offset);
}

// 16 keys, the dimensions of a step, as the right operands of two products.
__device__ __forceinline__ void load_keys(unsigned (&fragments)[4], const Operand* smem_key, int key_tile, int step) {
    int offset = lane_of_keys(threadIdx.x % 32) ^ step * (HEAD_DIM / DIM_STEPS);
    ldmatrix_x4(fragments, smem_key + key_tile * 8 * HEAD_DIM + offset);
}

#if defined(DTYPE_TF32)
// Weights of a tile of 8 keys, rounded, as the left operand. NOTE: with p = lane % 4 a lane has those of keys 2 * p and 2 * p + 1,
// and of the operand holds columns p and p + 4: the product takes the keys in the order 0, 2, 4, 6, 1, 3, 5, 7.
__device__ __forceinline__ void round_weights(unsigned (&fragment)[4], const float (&weights)[KEY_TILES][4], int key_tile) {
    const float(&tile)[4] = weights[key_tile];
    fragment[0] = cvt_tf32_f32(tile[0]);
    fragment[1] = cvt_tf32_f32(tile[2]);
    fragment[2] = cvt_tf32_f32(tile[1]);
    fragment[3] = cvt_tf32_f32(tile[3]);
}

// 16 dimensions of the values of these keys, as the right operands of two products: the even ones of the first, the odd ones of
// the second. NOTE: ldmatrix transposes 16 bits only. A lane reads two neighbouring dimensions of keys 2 * p and 2 * p + 1; rows
// of 4 even or odd keys lie in different 32 bytes of the 128 that shared memory delivers at a time to 16 lanes.
__device__ __forceinline__ void load_values(unsigned (&fragments)[4], const Operand* smem_value, int key_tile, int dim_tile) {
    int lane_idx = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        int offset = swizzle(lane_idx % 4 * 2 + i, lane_idx / 8) + lane_idx / 4 % 2 * 2 ^ dim_tile * 8;
        Vector<Operand, 2> pair = load_vector<2>(smem_value + key_tile * 8 * HEAD_DIM + offset);
        fragments[i] = pair.values[0].bits;
        fragments[2 + i] = pair.values[1].bits;
    }
}
#else
// Weights of two tiles of 8 keys, rounded, as the left operand.
__device__ __forceinline__ void round_weights(unsigned (&fragment)[4], const float (&weights)[KEY_TILES][4], int key_tile) {
    const float(&left)[4] = weights[key_tile], (&right)[4] = weights[key_tile + 1];
    fragment[0] = pack(left[0], left[1]);
    fragment[1] = pack(left[2], left[3]);
    fragment[2] = pack(right[0], right[1]);
    fragment[3] = pack(right[2], right[3]);
}

// 16 dimensions of the values of these keys, as the right operands of two products.
__device__ __forceinline__ void load_values(unsigned (&fragments)[4], const Operand* smem_value, int key_tile, int dim_tile) {
    int offset = lane_of_rows(threadIdx.x % 32) ^ dim_tile * 8;
    ldmatrix_x4_trans(fragments, smem_value + key_tile * 8 * HEAD_DIM + offset);
}
#endif

#if defined(MAX_DISTANCE)
// Adds the bias times `factor` to a warp's scores; first_distance is from the warp's first query to the block's first key.
// NOTE: 8 queries further down, keys 8 further on are at the same distance: a lane's scores on such a diagonal share two loads,
// each of which is of 15 neighbouring words for the warp.
__device__ __forceinline__ void add_bias(
    float (&scores)[ROW_TILES][KEY_TILES][4], const float* bias, float factor, int first_distance) {
    int lane_idx = threadIdx.x % 32;
    int lane_distance = first_distance + lane_idx % 4 * 2 - lane_idx / 4;
    constexpr int ROWS = ROW_TILES * 2;  // of the lane
#pragma unroll
    for (int diagonal = 1 - ROWS; diagonal < KEY_TILES; ++diagonal) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float value = load_bias(bias, lane_distance + diagonal * 8 + i);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                int key_tile = diagonal + row;
                if (key_tile < 0 || key_tile >= KEY_TILES) continue;
                float& score = scores[row / 2][key_tile][row % 2 * 2 + i];
                score = fmaf(value, factor, score);
            }
        }
    }
}
#endif

// The scores of a block's keys that do not exist, of which there are some if the text ends in it.
__device__ __forceinline__ void mask(float (&scores)[ROW_TILES][KEY_TILES][4], int first_key, int length) {
    if (first_key + BLOCK_K <= length) return;
    int lane_idx = threadIdx.x % 32;
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
        for (int key_tile = 0; key_tile < KEY_TILES; ++key_tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int key = first_key + key_tile * 8 + lane_idx % 4 * 2 + i % 2;
                if (key >= length) scores[row_tile][key_tile][i] = NEGATIVE_INFINITY;
            }
        }
    }
}

// Scores to weights, FACTOR * 2^(score * scale_log2 - maximum), of one of a lane's rows: elements [0, 2) or [2, 4) of its row
// tile. running_max is of scaled scores; running_sum is the lane's own part, which the kernel completes at the end. What the
// context before is to be multiplied by is returned.
template <int FACTOR>
__device__ __forceinline__ float weigh(
    float (&scores)[KEY_TILES][4], int element, float& running_max, float& running_sum, float scale_log2) {
    float block_max = NEGATIVE_INFINITY;
#pragma unroll
    for (int key_tile = 0; key_tile < KEY_TILES; ++key_tile) {
        block_max = fmaxf(block_max, fmaxf(scores[key_tile][element], scores[key_tile][element + 1]));
    }
    float new_max = fmaxf(running_max, warp_max<4>(block_max) * scale_log2);
    float correction = ex2_approx(running_max - new_max);
    running_max = new_max;
    float block_sum = 0.0f;
#pragma unroll
    for (int key_tile = 0; key_tile < KEY_TILES; ++key_tile) {
#pragma unroll
        for (int i = element; i < element + 2; ++i) {
            scores[key_tile][i] = ex2_approx(fmaf(scores[key_tile][i], scale_log2, -new_max)) * FACTOR;
            block_sum += scores[key_tile][i];
        }
    }
    running_sum = fmaf(running_sum, correction, block_sum);
    return correction;
}

// A warp's rows of a tile, of which those below num_rows exist, to rows STRIDE apart, in whole ones.
template <int STRIDE>
__device__ __forceinline__ void store_tile(Operand* gmem_tile, const Operand* smem_tile, int first_row, int num_rows) {
    int lane_idx = threadIdx.x % 32, chunk = lane_idx % CHUNKS;
#pragma unroll
    for (int i = 0; i < WARP_ROWS * CHUNKS / 32; ++i) {
        int row = first_row + lane_idx / CHUNKS + i * (32 / CHUNKS);
        if (row < num_rows) {
            // NOTE: of a vector of 8 elements the compiler makes stores of 2 and 4 bytes.
            int offset = chunk * (HEAD_DIM / CHUNKS);
            uint4* destination = reinterpret_cast<uint4*>(gmem_tile + static_cast<size_t>(row) * STRIDE + offset);
            *destination = *reinterpret_cast<const uint4*>(smem_tile + swizzle(row, chunk));
        }
    }
}
