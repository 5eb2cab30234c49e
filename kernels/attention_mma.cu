// attention_mma: out = softmax(q @ k.T / sqrt(HEAD_DIM)) @ v within each text and head, on the tensor cores
// out (num_tokens, NUM_HEADS * HEAD_DIM), qkv (num_tokens, 3 * NUM_HEADS * HEAD_DIM) Operand, of 16 bits or tf32, a row of qkv
// being all queries, all keys, all values; work (num_items, 3) i32; scale_log2 = log2(e) / sqrt(HEAD_DIM); fp32 scores, softmax
// and sums, weights rounded to Operand before the second product; with MAX_DISTANCE defined, bias (include/attention.cuh) is
// added to the scores times bias_factor = sqrt(HEAD_DIM), before their scale
// launch  grid = (num_items, NUM_HEADS), block = NUM_THREADS, smem = SMEM_BYTES; a warp holds
//         BLOCK_Q / (NUM_THREADS / 32) queries and walks the text's keys in blocks of BLOCK_K
// bound   arithmetic: mma.sync, then in equal parts exponentials (one for every 4 * HEAD_DIM operations), the reads of
//         shared memory and the issue of instructions, of which the blocks of a multiprocessor overlap what they can; a bias
//         costs a multiply-add a score, and of 64 keys and 128 queries 22 loads of the first-level cache for 64 scores
// source  see gkd/ops/attention.py; tiles and registers as in Dao 2023 (FlashAttention-2)
#include "include/attention_mma.cuh"

// NOTE: at a head width of 128, and for sm_120 already at 64, the queries' fragments would spill: they are read again for
// each block of keys. Those of tf32 are twice as many.
constexpr bool QUERY_IN_REGISTERS = HEAD_DIM * sizeof(Operand) <= (__CUDA_ARCH__ >= 1200 ? 64 : 128);

struct SharedStorage {
    Operand query[BLOCK_Q * HEAD_DIM];
    Operand key[NUM_STAGES][BLOCK_K * HEAD_DIM];
    Operand value[NUM_STAGES][BLOCK_K * HEAD_DIM];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES);

// Starts to copy a block of keys, of which the first num_keys exist, and their values, one group of copies.
__device__ __forceinline__ void load_block(SharedStorage& shared, int stage, const Operand* key_rows, int num_keys) {
    load_tile<BLOCK_K>(shared.key[stage], key_rows, num_keys);
    load_tile<BLOCK_K>(shared.value[stage], key_rows + HIDDEN_SIZE, num_keys);
    cp_async_commit();
}

// scores = queries @ keys.T, a warp's rows by BLOCK_K
__device__ __forceinline__ void multiply_keys(
    float (&scores)[ROW_TILES][KEY_TILES][4],
    const unsigned (&query)[ROW_TILES][QUERY_IN_REGISTERS ? DIM_STEPS : 1][4],
    const Operand* smem_query,
    const Operand* smem_key) {
#pragma unroll
    for (int step = 0; step < DIM_STEPS; ++step) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
            if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[row_tile][i] = query[row_tile][step][i];
            } else {
                load_query(a[row_tile], smem_query, row_tile, step);
            }
        }
#pragma unroll
        for (int key_tile = 0; key_tile < KEY_TILES; key_tile += 2) {
            unsigned b[4];
            load_keys(b, smem_key, key_tile, step);
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                mma(scores[row_tile][key_tile], a[row_tile], b[0], b[1]);
                mma(scores[row_tile][key_tile + 1], a[row_tile], b[2], b[3]);
            }
        }
    }
}

// context += weights @ values, the weights rounded to Operand
__device__ __forceinline__ void multiply_values(
    float (&context)[ROW_TILES][DIM_TILES][4], const float (&weights)[ROW_TILES][KEY_TILES][4], const Operand* smem_value) {
#pragma unroll
    for (int key_tile = 0; key_tile < KEY_TILES; key_tile += 4 / sizeof(Operand)) {
        unsigned a[ROW_TILES][4];
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) round_weights(a[row_tile], weights[row_tile], key_tile);
#pragma unroll
        for (int dim_tile = 0; dim_tile < DIM_TILES; dim_tile += 2) {
            unsigned b[4];
            load_values(b, smem_value, key_tile, dim_tile);
#pragma unroll
            for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
                mma(context[row_tile][dim_tile], a[row_tile], b[0], b[1]);
                mma(context[row_tile][dim_tile + 1], a[row_tile], b[2], b[3]);
            }
        }
    }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, MIN_BLOCKS) void attention_mma(
    Operand* out, const Operand* qkv, const int* work, float scale_log2
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
    const Operand* query_rows = qkv + static_cast<size_t>(start) * QKV_STRIDE + blockIdx.y * HEAD_DIM;
    const Operand* key_rows = query_rows + HIDDEN_SIZE;

    load_tile<BLOCK_Q>(shared.query, query_rows + static_cast<size_t>(first_query) * QKV_STRIDE, num_rows);
    load_block(shared, 0, key_rows, length);

    const Operand* smem_query = shared.query + first_row * HEAD_DIM;
    unsigned query[ROW_TILES][QUERY_IN_REGISTERS ? DIM_STEPS : 1][4];
    float context[ROW_TILES][DIM_TILES][4] = {};
    float running_max[ROW_TILES][2], running_sum[ROW_TILES][2];
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
        running_max[row_tile][0] = running_max[row_tile][1] = NEGATIVE_INFINITY;
        running_sum[row_tile][0] = running_sum[row_tile][1] = 0.0f;
    }

    for (int first_key = 0, stage = 0; first_key < length; first_key += BLOCK_K, stage ^= 1) {
        // Arrival of the stage's keys and values, and of the queries with the first. The barrier, of all threads, shows each
        // the others' copies and says that all are done with the other stage, which is filled while this one is used.
        cp_async_wait<0>();
        __syncthreads();
        int next_key = first_key + BLOCK_K;
        key_rows += static_cast<size_t>(BLOCK_K) * QKV_STRIDE;
        if (next_key < length) load_block(shared, stage ^ 1, key_rows, length - next_key);
        if (first_row >= num_rows) continue;  // a whole warp, which only helps to load

        if constexpr (QUERY_IN_REGISTERS) {
            if (first_key == 0) {
#pragma unroll
                for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
                    for (int step = 0; step < DIM_STEPS; ++step) {
                        load_query(query[row_tile][step], smem_query, row_tile, step);
                    }
                }
            }
        }
        float scores[ROW_TILES][KEY_TILES][4] = {};
        multiply_keys(scores, query, smem_query, shared.key[stage]);
#if defined(MAX_DISTANCE)
        add_bias(scores, bias, bias_factor, first_key - (first_query + first_row));
#endif
        mask(scores, first_key, length);
#pragma unroll
        for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float &row_max = running_max[row_tile][half], &row_sum = running_sum[row_tile][half];
                float correction = weigh<1>(scores[row_tile], half * 2, row_max, row_sum, scale_log2);
#pragma unroll
                for (int i = 0; i < DIM_TILES * 2; ++i) context[row_tile][i / 2][half * 2 + i % 2] *= correction;
            }
        }
        multiply_values(context, scores, shared.value[stage]);
    }
    if (first_row >= num_rows) return;
#if defined(DTYPE_TF32)
    // A lane has 4 neighbouring dimensions of each two tiles (see load_values), and 4 lanes two sectors of global memory.
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float inverse = 1.0f / warp_sum<4>(running_sum[row_tile][half]);
            int row = first_row + row_tile * 16 + half * 8 + lane_idx / 4;
            if (row >= num_rows) continue;
            Operand* out_row = out + static_cast<size_t>(start + first_query + row) * HIDDEN_SIZE + blockIdx.y * HEAD_DIM;
#pragma unroll
            for (int dim_tile = 0; dim_tile < DIM_TILES; dim_tile += 2) {
                Vector<Operand, 4> vector;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float value = context[row_tile][dim_tile + i % 2][half * 2 + i / 2];
                    vector.values[i] = from_float<Operand>(value * inverse);
                }
                store_vector(out_row + dim_tile * 8 + lane_idx % 4 * 4, vector);
            }
        }
    }
#else
    // The warp's own queries are no longer needed: its context takes their place, to leave in whole rows.
    __syncwarp();  // the warp's 32 lanes: each overwrites what others have read
#pragma unroll
    for (int row_tile = 0; row_tile < ROW_TILES; ++row_tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float inverse = 1.0f / warp_sum<4>(running_sum[row_tile][half]);
            int row = first_row + row_tile * 16 + half * 8 + lane_idx / 4;
#pragma unroll
            for (int dim_tile = 0; dim_tile < DIM_TILES; ++dim_tile) {
                const float(&values)[4] = context[row_tile][dim_tile];
                *reinterpret_cast<unsigned*>(shared.query + swizzle(row, dim_tile) + lane_idx % 4 * 2) =
                    pack(values[half * 2] * inverse, values[half * 2 + 1] * inverse);
            }
        }
    }
    __syncwarp();
    Operand* out_rows = out + static_cast<size_t>(start + first_query) * HIDDEN_SIZE + blockIdx.y * HEAD_DIM;
    store_tile<HIDDEN_SIZE>(out_rows, shared.query, first_row, num_rows);
#endif
}
