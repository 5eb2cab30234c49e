// LayerNorm of a row that a warp holds in registers, in vectors of neighbouring elements: vector i * 32 + lane_idx of the row
// is values[i * VECTOR ...] of each lane.
#pragma once
#include "include/reduce.cuh"
#include "include/split.cuh"
#include "include/types.cuh"
#include "include/vector.cuh"

template <int SIZE>
struct LaneRow {
    // As wide as every lane can have the same number of; where no width fits, the last vectors of one element are missing.
    static constexpr int VECTOR = SIZE % 256 == 0 ? 8 : SIZE % 128 == 0 ? 4 : SIZE % 64 == 0 ? 2 : 1;
    static constexpr int NUM_VECTORS = (SIZE + 32 * VECTOR - 1) / (32 * VECTOR);

    float values[NUM_VECTORS * VECTOR];

    __device__ __forceinline__ static int column(int vector) { return (vector * 32 + threadIdx.x % 32) * VECTOR; }
    __device__ __forceinline__ static bool exists(int vector) { return SIZE % 32 == 0 || column(vector) < SIZE; }

    template <class Element>
    __device__ __forceinline__ void load(const Element* row) {
#pragma unroll
        for (int i = 0; i < NUM_VECTORS; ++i) {
            Vector<Element, VECTOR> vector{};
            if (exists(i)) vector = load_vector<VECTOR>(row + column(i));
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) values[i * VECTOR + j] = to_float(vector.values[j]);
        }
    }

    template <class Element>
    __device__ __forceinline__ void add(const Element* row) {
        LaneRow other;
        other.load(row);
#pragma unroll
        for (int i = 0; i < NUM_VECTORS * VECTOR; ++i) values[i] += other.values[i];
    }

    template <class Element>
    __device__ __forceinline__ void store(Element* row) const {
#pragma unroll
        for (int i = 0; i < NUM_VECTORS; ++i) {
            Vector<Element, VECTOR> vector;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) vector.values[j] = from_float<Element>(values[i * VECTOR + j]);
            if (exists(i)) store_vector(row + column(i), vector);
        }
    }

    __device__ __forceinline__ void store_operand_row(Operand* matrix, size_t row, float scale) const {
#pragma unroll
        for (int i = 0; i < NUM_VECTORS; ++i) {
            float vector[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) vector[j] = values[i * VECTOR + j];
            if (exists(i)) store_operand<SIZE>(matrix, row, column(i), vector, scale);
        }
    }

    // Biased variance in two passes, eps inside the root.
    __device__ __forceinline__ void normalize(const LaneRow& gamma, const LaneRow& beta, float eps) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < NUM_VECTORS * VECTOR; ++i) sum += values[i];
        float mean = warp_sum(sum) / SIZE;
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < NUM_VECTORS; ++i) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                float& value = values[i * VECTOR + j];
                value -= mean;
                if (exists(i)) squares += value * value;
            }
        }
        float scale = 1.0f / sqrtf(warp_sum(squares) / SIZE + eps);
#pragma unroll
        for (int i = 0; i < NUM_VECTORS * VECTOR; ++i) values[i] = values[i] * scale * gamma.values[i] + beta.values[i];
    }
};
