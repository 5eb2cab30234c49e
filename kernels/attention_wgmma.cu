// attention_wgmma: out = softmax(q @ k.T / sqrt(HEAD_DIM)) @ v within each text and head, on the tensor cores of sm_90
// out (num_tokens, NUM_HEADS * HEAD_DIM) T; qkv (num_tokens, 3 * NUM_HEADS * HEAD_DIM) T, a row being all queries, all
// keys, all values, by two tensor maps, of boxes of 64 and of BLOCK_K rows by 128 bytes; work (num_items, 3) i32;
// scale_log2 = log2(e) / sqrt(HEAD_DIM); T f16 or bf16, fp32 scores, softmax and sums, weights rounded to T before the
// second product
// launch  grid = (num_items, NUM_HEADS), block = NUM_THREADS, smem = SMEM_BYTES; a warpgroup
//         holds 64 queries and walks the text's keys in blocks of BLOCK_K; one more copies
// bound   arithmetic, and in equal parts exponentials, at a head width of 64 one for every 256 operations: each
//         warpgroup's overlap the others' products
// source  see gkd/ops/attention.py; the pipeline as in Shah et al. 2024 (FlashAttention-3)
#include "include/attention.cuh"
#include "include/mma.cuh"
#include "include/reduce.cuh"
#include "include/tma.cuh"
#include "include/vector.cuh"
#include "include/wgmma.cuh"

#if !defined(BLOCK_Q) || !defined(BLOCK_K) || !defined(NUM_STAGES) || !defined(NUM_THREADS) || !defined(MIN_BLOCKS) || \
    !defined(SMEM_BYTES)
#error "BLOCK_Q, BLOCK_K, NUM_STAGES, NUM_THREADS, MIN_BLOCKS, SMEM_BYTES: set by gkd.ops.attention"
#endif

constexpr int ROWS = 64;  // of a warpgroup
constexpr int NUM_CONSUMERS = BLOCK_Q / ROWS;
constexpr int BOX = 64;  // elements of 128 bytes
constexpr int NUM_BOXES = HEAD_DIM / BOX;
constexpr int STEP_K = 16;  // depth of a product
constexpr int KEY_TILES = BLOCK_K / 8, DIM_TILES = HEAD_DIM / 8;
// What a thread may have: 65,536 registers shared out, most to those that compute.
constexpr int CONSUMER_REGISTERS = NUM_CONSUMERS == 3 ? 160 : NUM_CONSUMERS == 2 ? 232 : 208;
constexpr int PRODUCER_REGISTERS = NUM_CONSUMERS == 3 ? 32 : 40;
static_assert((NUM_CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS) * 128 * MIN_BLOCKS <= 65536);
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128);
static_assert(BLOCK_K == 128, "the columns of one product");
static_assert(NUM_THREADS == (NUM_CONSUMERS + 1) * 128);

struct SharedStorage {
    T query[NUM_CONSUMERS][NUM_BOXES][ROWS * BOX];
    T key[NUM_STAGES][NUM_BOXES][BLOCK_K * BOX];
    T value[NUM_STAGES][NUM_BOXES][BLOCK_K * BOX];
    unsigned long long query_full, key_full[NUM_STAGES], key_empty[NUM_STAGES], value_full[NUM_STAGES],
        value_empty[NUM_STAGES], value_tail;
};
static_assert(sizeof(SharedStorage) <= SMEM_BYTES);

// The copies of a block, by one warp: queries, then keys and values of one block after another.
__device__ __forceinline__ void produce(
    SharedStorage& shared, const TensorMap& query_map, const TensorMap& key_map, int start, int first_query, int length) {
    int lane_idx = threadIdx.x % 32, column = blockIdx.y * HEAD_DIM;
    if (lane_idx == 0) {
        int num_active = min(NUM_CONSUMERS, (length - first_query + ROWS - 1) / ROWS);
        mbarrier_arrive_expect_tx(&shared.query_full, num_active * sizeof(shared.query[0]));
        for (int consumer = 0; consumer < num_active; ++consumer) {
            for (int box = 0; box < NUM_BOXES; ++box) {
                int row = start + first_query + consumer * ROWS;
                tma_load_2d(shared.query[consumer][box], query_map, column + box * BOX, row, &shared.query_full);
            }
        }
    }
    for (int first_key = 0, step = 0; first_key < length; first_key += BLOCK_K, ++step) {
        int stage = step % NUM_STAGES;
        unsigned parity = step / NUM_STAGES % 2 ^ 1;  // the first round finds every stage free
        int row = start + first_key, num_keys = length - first_key;
        mbarrier_wait(&shared.key_empty[stage], parity);
        if (lane_idx == 0) {
            mbarrier_arrive_expect_tx(&shared.key_full[stage], sizeof(shared.key[0]));
            for (int box = 0; box < NUM_BOXES; ++box) {
                tma_load_2d(shared.key[stage][box], key_map, HIDDEN_SIZE + column + box * BOX, row, &shared.key_full[stage]);
            }
        }
        mbarrier_wait(&shared.value_empty[stage], parity);
        unsigned long long* full = num_keys >= BLOCK_K ? &shared.value_full[stage] : &shared.value_tail;
        if (lane_idx == 0) {
            mbarrier_arrive_expect_tx(full, sizeof(shared.value[0]));
            for (int box = 0; box < NUM_BOXES; ++box) {
                tma_load_2d(shared.value[stage][box], key_map, 2 * HIDDEN_SIZE + column + box * BOX, row, full);
            }
        }
        if (num_keys < BLOCK_K) {
            // NOTE: the rows behind the text's last are another's, and a weight of 0 times infinity would be NaN. As many are
            // set to 0 as the last product of 16 keys reads.
            mbarrier_wait(full, 0);
            int end = (num_keys + STEP_K - 1) / STEP_K * STEP_K;
            for (int i = lane_idx; i < (end - num_keys) * 8 * NUM_BOXES; i += 32) {
                T* tail = shared.value[stage][i / 8 % NUM_BOXES] + swizzle_128(num_keys + i / 8 / NUM_BOXES, i % 8);
                store_vector(tail, Vector<T, 8>{});
            }
            fence_proxy_async();
            __syncwarp();
            if (lane_idx == 0) mbarrier_arrive(&shared.value_full[stage]);
        }
    }
}

// Starts scores = queries @ keys.T.
__device__ __forceinline__ void multiply_keys(
    float (&scores)[KEY_TILES * 4], const T (&query)[NUM_BOXES][ROWS * BOX], const T (&key)[NUM_BOXES][BLOCK_K * BOX]) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < HEAD_DIM / STEP_K; ++step) {
        int box = step * STEP_K / BOX, offset = step * STEP_K % BOX;
        wgmma(scores, wgmma_descriptor(query[box] + offset), wgmma_descriptor(key[box] + offset), step > 0);
    }
    wgmma_commit();
}

// Starts context += weights @ values, of the first num_keys keys and zeros behind.
__device__ __forceinline__ void multiply_values(
    float (&context)[DIM_TILES * 4],
    const unsigned (&weights)[BLOCK_K / STEP_K][4],
    const T (&value)[NUM_BOXES][BLOCK_K * BOX],
    int num_keys,
    bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_K / STEP_K; ++step) {
        if (step * STEP_K < num_keys) {
            unsigned long long rows = wgmma_descriptor(value[0] + step * STEP_K * BOX, sizeof(value[0]));
            wgmma(context, weights[step], rows, step > 0 || accumulate);
        }
    }
    wgmma_commit();
}

// A thread's two rows: their maximum so far, of scaled scores, and the thread's own part of the sum of weights.
struct Softmax {
    float maximum[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {};
    float correction[2];  // by which what was summed up before is multiplied

    // Scores to weights, 2^(score * scale_log2 - maximum).
    __device__ __forceinline__ void weigh(float (&scores)[KEY_TILES * 4], float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float block_max = NEGATIVE_INFINITY;
#pragma unroll
            for (int tile = 0; tile < KEY_TILES; ++tile) {
                block_max = fmaxf(block_max, fmaxf(scores[tile * 4 + half * 2], scores[tile * 4 + half * 2 + 1]));
            }
            float new_max = fmaxf(maximum[half], warp_max<4>(block_max) * scale_log2);
            correction[half] = ex2_approx(maximum[half] - new_max);
            maximum[half] = new_max;
            float block_sum = 0.0f;
#pragma unroll
            for (int tile = 0; tile < KEY_TILES; ++tile) {
#pragma unroll
                for (int i = tile * 4 + half * 2; i < tile * 4 + half * 2 + 2; ++i) {
                    scores[i] = ex2_approx(fmaf(scores[i], scale_log2, -new_max));
                    block_sum += scores[i];
                }
            }
            sum[half] = fmaf(sum[half], correction[half], block_sum);
        }
    }

    __device__ __forceinline__ void correct(float (&context)[DIM_TILES * 4]) const {
#pragma unroll
        for (int i = 0; i < DIM_TILES * 4; ++i) context[i] *= correction[i / 2 % 2];
    }
};

__device__ __forceinline__ void mask(float (&scores)[KEY_TILES * 4], int num_keys) {
#pragma unroll
    for (int i = 0; i < KEY_TILES * 4; ++i) {
        if (i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 >= num_keys) scores[i] = NEGATIVE_INFINITY;
    }
}

// As the left operand of 8 products.
__device__ __forceinline__ void round_weights(unsigned (&weights)[BLOCK_K / STEP_K][4], const float (&scores)[KEY_TILES * 4]) {
#pragma unroll
    for (int i = 0; i < BLOCK_K / STEP_K * 4; ++i) weights[i / 4][i % 4] = pack(scores[i * 2], scores[i * 2 + 1]);
}

// The context of a warpgroup's queries.
__device__ __forceinline__ void attend(
    float (&context)[DIM_TILES * 4], Softmax& softmax, SharedStorage& shared, int consumer_idx, int length, float scale_log2) {
    const auto& query = shared.query[consumer_idx];
    unsigned weights[BLOCK_K / STEP_K][4];
    {
        float scores[KEY_TILES * 4];
        mbarrier_wait(&shared.query_full, 0);
        mbarrier_wait(&shared.key_full[0], 0);
        multiply_keys(scores, query, shared.key[0]);
        wgmma_wait<0>();
        mbarrier_arrive_warp(&shared.key_empty[0]);
        if (length < BLOCK_K) mask(scores, length);
        softmax.weigh(scores, scale_log2);
        round_weights(weights, scores);
    }
    // The products of a block's keys and of the values before it run while the tensor cores' other users are weighing.
    int step = 1;
    for (int first_key = BLOCK_K; first_key < length; first_key += BLOCK_K, ++step) {
        float scores[KEY_TILES * 4];
        int stage = step % NUM_STAGES, value_stage = (step - 1) % NUM_STAGES;
        mbarrier_wait(&shared.key_full[stage], step / NUM_STAGES % 2);
        multiply_keys(scores, query, shared.key[stage]);
        mbarrier_wait(&shared.value_full[value_stage], (step - 1) / NUM_STAGES % 2);
        multiply_values(context, weights, shared.value[value_stage], BLOCK_K, step > 1);
        wgmma_wait<1>();
        mbarrier_arrive_warp(&shared.key_empty[stage]);
        if (length - first_key < BLOCK_K) mask(scores, length - first_key);
        softmax.weigh(scores, scale_log2);
        wgmma_wait<0>();
        mbarrier_arrive_warp(&shared.value_empty[value_stage]);
        softmax.correct(context);
        round_weights(weights, scores);
    }
    int value_stage = (step - 1) % NUM_STAGES;
    mbarrier_wait(&shared.value_full[value_stage], (step - 1) / NUM_STAGES % 2);
    multiply_values(context, weights, shared.value[value_stage], length - (step - 1) * BLOCK_K, step > 1);
    wgmma_wait<0>();
}

extern "C" __global__ __launch_bounds__(NUM_THREADS, MIN_BLOCKS) void attention_wgmma(
    T* out,
    const __grid_constant__ TensorMap query_map,
    const __grid_constant__ TensorMap key_map,
    const int* work,
    float scale_log2) {
    extern __shared__ __align__(1024) unsigned char smem[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(smem);

    Item item(work);
    int start = item.start, length = item.length;
    int first_query = item.first_query;
    if (first_query >= length) return;  // the whole block

    if (threadIdx.x == 0) {
        // A lane of each warp of the warpgroups that have queries.
        int num_arrivals = 4 * min(NUM_CONSUMERS, (length - first_query + ROWS - 1) / ROWS);
        mbarrier_init(&shared.query_full, 1);
        mbarrier_init(&shared.value_tail, 1);
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            mbarrier_init(&shared.key_full[stage], 1);
            mbarrier_init(&shared.value_full[stage], 1);
            mbarrier_init(&shared.key_empty[stage], num_arrivals);
            mbarrier_init(&shared.value_empty[stage], num_arrivals);
        }
        fence_mbarrier_init();
        prefetch_tensor_map(query_map);
        prefetch_tensor_map(key_map);
    }
    grid_launch_next();
    grid_wait();
    __syncthreads();

    int warp_idx = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane_idx = threadIdx.x % 32;
    int consumer_idx = warp_idx / 4;
    if (consumer_idx == NUM_CONSUMERS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp_idx == NUM_CONSUMERS * 4) produce(shared, query_map, key_map, start, first_query, length);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        int num_rows = length - first_query - consumer_idx * ROWS;
        if (num_rows <= 0) return;
        float context[DIM_TILES * 4];
        Softmax softmax;
        attend(context, softmax, shared, consumer_idx, length, scale_log2);

        // A warp's own queries are no longer needed: its context takes their place, to leave in whole rows.
        int first_row = warp_idx % 4 * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float inverse = 1.0f / warp_sum<4>(softmax.sum[half]);
            int row = first_row + half * 8 + lane_idx / 4;
#pragma unroll
            for (int tile = 0; tile < DIM_TILES; ++tile) {
                T* smem_row = shared.query[consumer_idx][tile / 8] + swizzle_128(row, tile % 8);
                float low = context[tile * 4 + half * 2] * inverse, high = context[tile * 4 + half * 2 + 1] * inverse;
                *reinterpret_cast<unsigned*>(smem_row + lane_idx % 4 * 2) = pack(low, high);
            }
        }
        __syncwarp();
        T* out_rows = out + static_cast<size_t>(start + first_query + consumer_idx * ROWS) * HIDDEN_SIZE +
                      blockIdx.y * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < 16 * DIM_TILES / 32; ++i) {
            int row = first_row + (i * 32 + lane_idx) / DIM_TILES, chunk = (i * 32 + lane_idx) % DIM_TILES;
            if (row < num_rows) {
                const T* smem_row = shared.query[consumer_idx][chunk / 8] + swizzle_128(row, chunk % 8);
                store_vector(out_rows + static_cast<size_t>(row) * HIDDEN_SIZE + chunk * 8, load_vector<8>(smem_row));
            }
        }
    }
}
