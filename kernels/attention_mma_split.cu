// attention_mma_split: out = softmax(q @ k.T / sqrt(HEAD_DIM)) @ v within each text and head, for split operands, on the
// tensor cores of sm_80 and later
// out (num_tokens, NUM_HEADS * HEAD_DIM), qkv (num_tokens, 3 * NUM_HEADS * HEAD_DIM) split (include/split.cuh), a row of qkv
// being all queries, all keys, all values, at 16 bytes; work (num_items, 3) i32;
// scale_log2 = log2(e) / sqrt(HEAD_DIM) / scale of qkv^2; out_scale = scale of out / scale of qkv; with MAX_DISTANCE defined, bias
// (include/attention.cuh) is added to the scores times bias_factor = sqrt(HEAD_DIM) * scale of qkv^2, before their scale
// launch  grid = (num_items, NUM_HEADS), block = NUM_THREADS, smem = SMEM_BYTES; a warp holds
//         BLOCK_Q / (NUM_THREADS / 32) queries and walks the text's keys in blocks of BLOCK_K
// bound   arithmetic: mma.sync, three products for one of fp32; then the exponentials, the splitting of weights and the reads
//         of shared memory, of which the warps of a multiprocessor overlap what they can; a bias costs a multiply-add a score,
//         and of 64 keys and 64 queries 18 loads of the first-level cache for 32 scores
// order   A score is one chain of products for every 64 dimensions, and these are added in fp32, ascending. A block's part of
//         the context is one chain over its keys, and is added to the blocks before in fp32: the tensor cores cut their
//         running sums off. A chain takes all products with a low part, and then high * high.
// source  see gkd/ops/attention.py; tiles and registers as in Dao 2023 (FlashAttention-2), the split and the sums outside the
//         tensor cores as in Ootomo & Yokota 2022
#include "include/attention_mma.cuh"

// Of weights, of which the largest is 1: so a split one has its 22 bits down to 2^-17, and an error of 2^-39 below. Up to the
// end of f16 there is room for the rounding of scores as large as 2^25. Their sum, which divides the context, has the factor,
// too. It is that of weights before they are split: what the split rounds off is of either sign, and of 2^-22 of each at most.
constexpr int WEIGHT_FACTOR = 1 << 14;
constexpr int CHUNK_STEPS = DIM_STEPS < 4 ? DIM_STEPS : 4;
static_assert(BLOCK_K <= 64, "a chain of products in each block of keys");

// High and low parts.
struct SharedStorage {
    f16 query[2][BLOCK_Q * HEAD_DIM];
    f16 key[NUM_STAGES][2][BLOCK_K * HEAD_DIM];
    f16 value[NUM_STAGES][2][BLOCK_K * HEAD_DIM];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES);

template <int ROWS>
__device__ __forceinline__ void load_parts(f16 (&smem_parts)[2][ROWS * HEAD_DIM], const f16* gmem_tile, int num_rows) {
    load_tile<ROWS>(smem_parts[0], gmem_tile, num_rows);
    load_tile<ROWS>(smem_parts[1], gmem_tile + QKV_COLUMNS, num_rows);
}

// Starts to copy a block of keys, of which the first num_keys exist, and their values, one group of copies.
__device__ __forceinline__ void load_block(SharedStorage& shared, int stage, const f16* key_rows, int num_keys) {
    load_parts<BLOCK_K>(shared.key[stage], key_rows, num_keys);
    load_parts<BLOCK_K>(shared.value[stage], key_rows + HIDDEN_SIZE, num_keys);
    cp_async_commit();
}

// Two values in the high and in the low parts' halves of a register.
__device__ __forceinline__ void pack_parts(unsigned& high, unsigned& low, float first, float second) {
    high = pack(first, second);
    low = pack(
        first - cvt_f32_f16(static_cast<unsigned short>(high)), second - cvt_f32_f16(static_cast<unsigned short>(high >> 16)));
}

// Two products side by side for each row tile: 16 rows by 16 columns.
__device__ __forceinline__ void multiply(
    float (&left)[4], float (&right)[4], const unsigned (&a)[4], const unsigned (&b)[4]) {
    mma(left, a, b[0], b[1]);
    mma(right, a, b[2], b[3]);
}

// sums = queries @ keys.T over the dimensions of CHUNK_STEPS steps, a warp's rows by BLOCK_K
__device__ __forceinline__ void multiply_chunk(
    float (&sums)[ROW_TILES][KEY_TILES][4],
    const unsigned (&query)[DIM_STEPS][ROW_TILES][4],
    const f16* smem_query_low,
    const f16 (&smem_key)[2][BLOCK_K * HEAD_DIM],
    int first_step) {
#pragma unroll
    for (int step = first_step; step < first_step + CHUNK_STEPS; ++step) {
        unsigned query_low[ROW_TILES][4];
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
            load_query(query_low[row_tile], smem_query_low, row_tile, step);
        }
#pragma unroll
        for (int key_tile = 0; key_tile < KEY_TILES; key_tile += 2) {
            unsigned low[4], high[4];
            load_keys(low, smem_key[1], key_tile, step);
            load_keys(high, smem_key[0], key_tile, step);
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                multiply(sums[row_tile][key_tile], sums[row_tile][key_tile + 1], query[step][row_tile], low);
            }
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                multiply(sums[row_tile][key_tile], sums[row_tile][key_tile + 1], query_low[row_tile], high);
            }
        }
    }
#pragma unroll
    for (int step = first_step; step < first_step + CHUNK_STEPS; ++step) {
#pragma unroll
        for (int key_tile = 0; key_tile < KEY_TILES; key_tile += 2) {
            unsigned high[4];
            load_keys(high, smem_key[0], key_tile, step);
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                multiply(sums[row_tile][key_tile], sums[row_tile][key_tile + 1], query[step][row_tile], high);
            }
        }
    }
}

// scores = queries @ keys.T
__device__ __forceinline__ void multiply_keys(
    float (&scores)[ROW_TILES][KEY_TILES][4],
    const unsigned (&query)[DIM_STEPS][ROW_TILES][4],
    const f16* smem_query_low,
    const f16 (&smem_key)[2][BLOCK_K * HEAD_DIM]) {
    multiply_chunk(scores, query, smem_query_low, smem_key, 0);
#pragma unroll
    for (int step = CHUNK_STEPS; step < DIM_STEPS; step += CHUNK_STEPS) {
        float sums[ROW_TILES][KEY_TILES][4] = {};
        multiply_chunk(sums, query, smem_query_low, smem_key, step);
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
            for (int i = 0; i < KEY_TILES * 4; ++i) scores[row_tile][i / 4][i % 4] += sums[row_tile][i / 4][i % 4];
        }
    }
}

// context = context * correction + weights @ values
__device__ __forceinline__ void multiply_values(
    float (&context)[ROW_TILES][DIM_TILES][4],
    const float (&correction)[ROW_TILES][2],
    const float (&weights)[ROW_TILES][KEY_TILES][4],
    const f16 (&smem_value)[2][BLOCK_K * HEAD_DIM]) {
    unsigned high[KEY_TILES / 2][ROW_TILES][4], low[KEY_TILES / 2][ROW_TILES][4];
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
        for (int i = 0; i < KEY_TILES * 2; ++i) {
            const float* pair = &weights[row_tile][i / 2][i % 2 * 2];
            pack_parts(high[i / 4][row_tile][i % 4], low[i / 4][row_tile][i % 4], pair[0], pair[1]);
        }
    }
#pragma unroll
    for (int dim_tile = 0; dim_tile < DIM_TILES; dim_tile += 2) {
        float sums[ROW_TILES][2][4] = {};
        unsigned value_high[KEY_TILES / 2][4], value_low[4];
#pragma unroll
        for (int step = 0; step < KEY_TILES / 2; ++step) {
            load_values(value_low, smem_value[1], step * 2, dim_tile);
            load_values(value_high[step], smem_value[0], step * 2, dim_tile);
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                multiply(sums[row_tile][0], sums[row_tile][1], high[step][row_tile], value_low);
            }
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                multiply(sums[row_tile][0], sums[row_tile][1], low[step][row_tile], value_high[step]);
            }
        }
#pragma unroll
        for (int step = 0; step < KEY_TILES / 2; ++step) {
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                multiply(sums[row_tile][0], sums[row_tile][1], high[step][row_tile], value_high[step]);
            }
        }
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& sum = context[row_tile][dim_tile + i / 4][i % 4];
                sum = fmaf(sum, correction[row_tile][i % 4 / 2], sums[row_tile][i / 4][i % 4]);
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, MIN_BLOCKS) void attention_mma_split(
    f16* out, const f16* qkv, const int* work, float scale_log2, float out_scale
#if defined(MAX_DISTANCE)
    , const float* bias, float bias_factor
#endif
) {
    grid_launch_next();
    grid_wait();
    extern __shared__ uint4 smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

    Item item(work);
    int start = item.start, length = item.length;
    int first_query = item.first_query;
    if (first_query >= length) return;  // the whole block
    // NOTE: from a shuffle the compiler knows that it is one value for the warp, and that a branch on it divides no warp.
    int warp_idx = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane_idx = threadIdx.x % 32;
    int first_row = warp_idx * WARP_ROWS, num_rows = length - first_query;
    const f16* query_rows = qkv + static_cast<size_t>(start) * QKV_STRIDE + blockIdx.y * HEAD_DIM;
    const f16* key_rows = query_rows + HIDDEN_SIZE;

    load_parts<BLOCK_Q>(shared.query, query_rows + static_cast<size_t>(first_query) * QKV_STRIDE, num_rows);
    cp_async_commit();
    load_block(shared, 0, key_rows, length);

    const f16* smem_query_low = shared.query[1] + first_row * HEAD_DIM;
    unsigned query[DIM_STEPS][ROW_TILES][4];  // high parts
    cp_async_wait<1>();
    __syncthreads();  // all threads: the queries are there
#pragma unroll
    for (int step = 0; step < DIM_STEPS; ++step) {
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
            load_query(query[step][row_tile], shared.query[0] + first_row * HEAD_DIM, row_tile, step);
        }
    }
    float context[ROW_TILES][DIM_TILES][4] = {};
    float running_max[ROW_TILES][2], running_sum[ROW_TILES][2];
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
        running_max[row_tile][0] = running_max[row_tile][1] = NEGATIVE_INFINITY;
        running_sum[row_tile][0] = running_sum[row_tile][1] = 0.0f;
    }

#pragma unroll 1
    for (int first_key = 0, stage = 0; first_key < length; first_key += BLOCK_K, stage ^= 1) {
        // Arrival of the stage's keys and values, and of the queries with the first. The barrier, of all threads, shows each
        // the others' copies and says that all are done with the other stage, which is filled while this one is used.
        cp_async_wait<0>();
        __syncthreads();
        int next_key = first_key + BLOCK_K;
        key_rows += static_cast<size_t>(BLOCK_K) * QKV_STRIDE;
        if (next_key < length) load_block(shared, stage ^ 1, key_rows, length - next_key);
        if (first_row >= num_rows) continue;  // a whole warp, which only helps to load

        float scores[ROW_TILES][KEY_TILES][4] = {}, correction[ROW_TILES][2];
        multiply_keys(scores, query, smem_query_low, shared.key[stage]);
#if defined(MAX_DISTANCE)
        add_bias(scores, bias, bias_factor, first_key - (first_query + first_row));
#endif
        mask(scores, first_key, length);
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float &row_max = running_max[row_tile][half], &row_sum = running_sum[row_tile][half];
                correction[row_tile][half] = weigh<WEIGHT_FACTOR>(scores[row_tile], half * 2, row_max, row_sum, scale_log2);
            }
        }
        multiply_values(context, correction, scores, shared.value[stage]);
    }
    if (first_row >= num_rows) return;

    // The warp's own queries are no longer needed: its context takes their place, to leave in whole rows.
    __syncwarp();  // the warp's 32 lanes: each overwrites what others have read
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float factor = 1.0f / warp_sum<4>(running_sum[row_tile][half]) * out_scale;
            int row = first_row + row_tile * 16 + half * 8 + lane_idx / 4;
#pragma unroll
            for (int dim_tile = 0; dim_tile < DIM_TILES; ++dim_tile) {
                const float* values = &context[row_tile][dim_tile][half * 2];
                unsigned high, low;
                pack_parts(high, low, values[0] * factor, values[1] * factor);
                int element = swizzle(row, dim_tile) + lane_idx % 4 * 2;
                *reinterpret_cast<unsigned*>(shared.query[0] + element) = high;
                *reinterpret_cast<unsigned*>(shared.query[1] + element) = low;
            }
        }
    }
    __syncwarp();
    constexpr int OUT_STRIDE = 2 * HIDDEN_SIZE;
    f16* out_rows = out + static_cast<size_t>(start + first_query) * OUT_STRIDE + blockIdx.y * HEAD_DIM;
    store_tile<OUT_STRIDE>(out_rows, shared.query[0], first_row, num_rows);
    store_tile<OUT_STRIDE>(out_rows + HIDDEN_SIZE, shared.query[1], first_row, num_rows);
}
