// attention_simt: out = softmax(q @ k.T / sqrt(HEAD_DIM)) @ v within each text and head, in fp32 throughout
// out (num_tokens, NUM_HEADS * HEAD_DIM), qkv (num_tokens, 3 * NUM_HEADS * HEAD_DIM) Operand, a row of qkv being all
// queries, all keys, all values; work (num_items, 3) i32; scale = 1 / sqrt(HEAD_DIM); rounded once, at the store; with MAX_DISTANCE defined,
// bias (include/attention.cuh) is added to the scores
// launch  grid = (num_items, NUM_HEADS), block = NUM_THREADS, smem = SMEM_BYTES; a thread has
//         BLOCK_Q / 16 queries, which eight lanes share, and walks the text's keys in blocks of BLOCK_K
// bound   arithmetic: fused multiply-adds, for which a thread reads as few operands from shared memory as registers allow; a bias
//         costs an addition a score, and of 64 keys and 128 queries 22 loads for 64 scores
// source  see gkd/ops/attention.py; blocks as in Dao et al. 2022 (FlashAttention)
#include "include/attention.cuh"
#include "include/reduce.cuh"
#include "include/vector.cuh"

#if !defined(BLOCK_Q) || !defined(BLOCK_K) || !defined(NUM_THREADS) || !defined(MIN_BLOCKS) || !defined(SMEM_BYTES)
#error "BLOCK_Q, BLOCK_K, NUM_THREADS, MIN_BLOCKS, SMEM_BYTES: set by gkd.ops.attention"
#endif

// A warp is 4 x 8 lanes: lane / 8 chooses among its queries, lane % 8 among keys and then among dimensions.
constexpr int ROW_LANES = 4;
constexpr int COLUMN_LANES = 8;
// Queries of the block are dealt out so, ROW_LANES to a warp, that a short tail still keeps every warp busy.
constexpr int ROW_STEP = NUM_THREADS / COLUMN_LANES;
constexpr int THREAD_KEYS = BLOCK_K / COLUMN_LANES;
constexpr int THREAD_DIMS = HEAD_DIM / COLUMN_LANES;
// Keys whose weights are in shared memory at a time, between the softmax's and the product's shares of a warp.
constexpr int WEIGHT_KEYS = 32;
static_assert(HEAD_DIM % 32 == 0 && BLOCK_K % WEIGHT_KEYS == 0 && BLOCK_Q % ROW_STEP == 0);
static_assert(BLOCK_Q >= 2 * ROW_STEP);

// NOTE: rows are padded so that what a warp reads or writes at once lies in different banks: 4 words for rows of which
// eight lanes read 16 bytes each, 8 words for rows of which four are written by eight lanes each.
struct SharedStorage {
    float query[BLOCK_Q][HEAD_DIM + 4];
    float key[BLOCK_K][HEAD_DIM + 4];
    float value[BLOCK_K][HEAD_DIM];
    float weight[BLOCK_Q][WEIGHT_KEYS + 8];
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES);

// Copies ROWS rows times `scale`, of which the first num_rows exist; the others become zeros.
template <int ROWS, int STRIDE>
__device__ __forceinline__ void load_tile(float (*smem_tile)[STRIDE], const Operand* gmem_tile, int num_rows, float scale) {
    constexpr int ROW_VECTORS = HEAD_DIM / 4;
#pragma unroll
    for (int i = 0; i < ROWS * ROW_VECTORS / NUM_THREADS; ++i) {
        int vector_idx = i * NUM_THREADS + threadIdx.x, row = vector_idx / ROW_VECTORS, dim = vector_idx % ROW_VECTORS * 4;
        Vector<float, 4> vector = {};
        if (row < num_rows) {
            Vector<Operand, 4> source = load_vector<4>(gmem_tile + static_cast<size_t>(row) * QKV_STRIDE + dim);
#pragma unroll
            for (int element = 0; element < 4; ++element) vector.values[element] = to_float(source.values[element]) * scale;
        }
        store_vector(&smem_tile[row][dim], vector);
    }
}

// scores = queries @ keys.T, each by one chain of additions along the dimensions
template <int THREAD_ROWS>
__device__ __forceinline__ void multiply_keys(
    float (&scores)[THREAD_ROWS][THREAD_KEYS], const SharedStorage& shared, int first_row, int column) {
// NOTE: one step holds 12 or 16 vectors and all sums in registers; a second one at a time would spill.
#pragma unroll 1
    for (int dim = 0; dim < HEAD_DIM; dim += 4) {
        Vector<float, 4> query[THREAD_ROWS];
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) query[i] = load_vector<4>(&shared.query[first_row + i * ROW_STEP][dim]);
#pragma unroll
        for (int j = 0; j < THREAD_KEYS; ++j) {
            Vector<float, 4> key = load_vector<4>(&shared.key[column + j * COLUMN_LANES][dim]);
#pragma unroll
            for (int i = 0; i < THREAD_ROWS; ++i) {
#pragma unroll
                for (int element = 0; element < 4; ++element) {
                    scores[i][j] = fmaf(query[i].values[element], key.values[element], scores[i][j]);
                }
            }
        }
    }
}

#if defined(MAX_DISTANCE)
// Adds the bias to a thread's scores; first_distance is from its first query to its first key. Scores of the same distance share
// a load.
template <int THREAD_ROWS>
__device__ __forceinline__ void add_bias(
    float (&scores)[THREAD_ROWS][THREAD_KEYS], const float* bias, int first_distance) {
    constexpr int ROW_KEYS = ROW_STEP / COLUMN_LANES;  // the next query is as far from keys so many further on
#pragma unroll
    for (int diagonal = -(THREAD_ROWS - 1) * ROW_KEYS; diagonal < THREAD_KEYS; ++diagonal) {
        float value = load_bias(bias, first_distance + diagonal * COLUMN_LANES);
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
            int j = diagonal + i * ROW_KEYS;
            if (j >= 0 && j < THREAD_KEYS) scores[i][j] += value;
        }
    }
}
#endif

// context += weights @ values for WEIGHT_KEYS keys from first_key on, each by one chain of additions along the keys
template <int THREAD_ROWS>
__device__ __forceinline__ void multiply_values(
    float (&context)[THREAD_ROWS][THREAD_DIMS], const SharedStorage& shared, int first_row, int first_key, int column) {
#pragma unroll 1
    for (int step = 0; step < WEIGHT_KEYS; step += 4) {
        Vector<float, 4> weight[THREAD_ROWS];
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) weight[i] = load_vector<4>(&shared.weight[first_row + i * ROW_STEP][step]);
#pragma unroll
        for (int key = 0; key < 4; ++key) {
#pragma unroll
            for (int dim = 0; dim < THREAD_DIMS; dim += 4) {
                const float* row = shared.value[first_key + step + key];
                Vector<float, 4> value = load_vector<4>(row + dim * COLUMN_LANES + column * 4);
#pragma unroll
                for (int i = 0; i < THREAD_ROWS; ++i) {
#pragma unroll
                    for (int element = 0; element < 4; ++element) {
                        float& sum = context[i][dim + element];
                        sum = fmaf(weight[i].values[key], value.values[element], sum);
                    }
                }
            }
        }
    }
}

// The block's first THREAD_ROWS * ROW_STEP queries, of which num_queries exist, against all keys of the text.
template <int THREAD_ROWS>
__device__ __forceinline__ void attend(
    Operand* out_rows,
    const Operand* query_rows,
    const Operand* key_rows,
    const float* bias,
    int first_query,
    int length,
    float scale,
    SharedStorage& shared) {
    int num_queries = length - first_query;
    int lane_idx = threadIdx.x % 32, column = lane_idx % COLUMN_LANES;
    int first_row = threadIdx.x / 32 * ROW_LANES + lane_idx / COLUMN_LANES;
    load_tile<THREAD_ROWS * ROW_STEP>(shared.query, query_rows, num_queries, scale);

    float context[THREAD_ROWS][THREAD_DIMS] = {};
    // running_sum is the lane's own part, completed once at the end.
    float running_max[THREAD_ROWS], running_sum[THREAD_ROWS];
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i) {
        running_max[i] = NEGATIVE_INFINITY;
        running_sum[i] = 0.0f;
    }
    for (int first_key = 0; first_key < length; first_key += BLOCK_K) {
        int num_keys = length - first_key;
        const Operand* key_tile = key_rows + static_cast<size_t>(first_key) * QKV_STRIDE;
        __syncthreads();  // of all threads: none reads the last keys and values any more
        load_tile<BLOCK_K>(shared.key, key_tile, num_keys, 1.0f);
        load_tile<BLOCK_K>(shared.value, key_tile + HIDDEN_SIZE, num_keys, 1.0f);
        __syncthreads();  // of all threads: the keys and values, and at first the queries, are there

        float scores[THREAD_ROWS][THREAD_KEYS] = {};
        multiply_keys(scores, shared, first_row, column);
#if defined(MAX_DISTANCE)
        add_bias(scores, bias, first_key + column - (first_query + first_row));
#endif
        if (num_keys < BLOCK_K) {
#pragma unroll
            for (int j = 0; j < THREAD_KEYS; ++j) {
                if (column + j * COLUMN_LANES < num_keys) continue;
#pragma unroll
                for (int i = 0; i < THREAD_ROWS; ++i) scores[i][j] = NEGATIVE_INFINITY;
            }
        }
#pragma unroll
        for (int i = 0; i < THREAD_ROWS; ++i) {
            float block_max = scores[i][0];
#pragma unroll
            for (int j = 1; j < THREAD_KEYS; ++j) block_max = fmaxf(block_max, scores[i][j]);
            float new_max = fmaxf(running_max[i], warp_max<COLUMN_LANES>(block_max));
            float correction = expf(running_max[i] - new_max);
            running_max[i] = new_max;
            float block_sum = 0.0f;
#pragma unroll
            for (int j = 0; j < THREAD_KEYS; ++j) {
                scores[i][j] = expf(scores[i][j] - new_max);
                block_sum += scores[i][j];
            }
            running_sum[i] = fmaf(running_sum[i], correction, block_sum);
#pragma unroll
            for (int dim = 0; dim < THREAD_DIMS; ++dim) context[i][dim] *= correction;
        }
#pragma unroll
        for (int piece = 0; piece < BLOCK_K; piece += WEIGHT_KEYS) {
            if (piece >= num_keys) break;
            // A warp's rows of weights are its own.
            __syncwarp();
#pragma unroll
            for (int i = 0; i < THREAD_ROWS; ++i) {
#pragma unroll
                for (int key = 0; key < WEIGHT_KEYS; key += COLUMN_LANES) {
                    shared.weight[first_row + i * ROW_STEP][key + column] = scores[i][(piece + key) / COLUMN_LANES];
                }
            }
            __syncwarp();
            multiply_values(context, shared, first_row, piece, column);
        }
    }

#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i) {
        float inverse = 1.0f / warp_sum<COLUMN_LANES>(running_sum[i]);
        int row = first_row + i * ROW_STEP;
        if (row >= num_queries) continue;
#pragma unroll
        for (int dim = 0; dim < THREAD_DIMS; dim += 4) {
            Vector<Operand, 4> vector;
#pragma unroll
            for (int element = 0; element < 4; ++element) {
                vector.values[element] = from_float<Operand>(context[i][dim + element] * inverse);
            }
            store_vector(out_rows + static_cast<size_t>(row) * HIDDEN_SIZE + dim * COLUMN_LANES + column * 4, vector);
        }
    }
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, MIN_BLOCKS) void attention_simt(
    Operand* out, const Operand* qkv, const int* work, float scale
#if defined(MAX_DISTANCE)
    , const float* bias
#endif
) {
#if !defined(MAX_DISTANCE)
    constexpr const float* bias = nullptr;
#endif
    grid_launch_next();
    grid_wait();
    extern __shared__ uint4 smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

    Item item(work);
    int start = item.start, length = item.length;
    int first_query = item.first_query;
    if (first_query >= length) return;  // the whole block
    int num_queries = length - first_query;
    const Operand* text_rows = qkv + static_cast<size_t>(start) * QKV_STRIDE + blockIdx.y * HEAD_DIM;
    const Operand* query_rows = text_rows + static_cast<size_t>(first_query) * QKV_STRIDE;
    const Operand* key_rows = text_rows + HIDDEN_SIZE;
    Operand* out_rows = out + static_cast<size_t>(start + first_query) * HIDDEN_SIZE + blockIdx.y * HEAD_DIM;
    // A short text, or the tail of a long one, takes the same steps for each query, on fewer queries a thread.
    if (num_queries <= 2 * ROW_STEP) {
        attend<2>(out_rows, query_rows, key_rows, bias, first_query, length, scale, shared);
    } else {
        attend<BLOCK_Q / ROW_STEP>(out_rows, query_rows, key_rows, bias, first_query, length, scale, shared);
    }
}
