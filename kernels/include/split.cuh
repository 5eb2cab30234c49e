// Matrices that are multiplied, `Operand`: of T, or split. A split number is the sum of two f16 over a scale, a power of two:
// high = f16(x * scale), low = f16(x * scale - high), together 22 bits of it; a row holds all its high parts, then all its low
// ones, and takes as many bytes as a row of float.
#pragma once
#include "include/types.cuh"
#include "include/vector.cuh"

#if defined(DTYPE_SPLIT)
constexpr int OPERAND_PARTS = 2;
#else
constexpr int OPERAND_PARTS = 1;
#endif

__device__ __forceinline__ void to_halves(f16& high, f16& low, float scaled) {
    high = from_float<f16>(scaled);
    low = from_float<f16>(scaled - to_float(high));
}

// Neighbouring values to a row of an operand matrix of COLUMNS. Only a split one has a scale.
template <int COLUMNS, int SIZE>
__device__ __forceinline__ void store_operand(
    Operand* matrix, size_t row, int column, const float (&values)[SIZE], float scale) {
    Operand* destination = matrix + row * (COLUMNS * OPERAND_PARTS) + column;
#if defined(DTYPE_SPLIT)
    Vector<f16, SIZE> high, low;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) to_halves(high.values[i], low.values[i], values[i] * scale);
    store_vector(destination, high);
    store_vector(destination + COLUMNS, low);
#else
    Vector<Operand, SIZE> vector;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) vector.values[i] = from_float<Operand>(values[i]);
    store_vector(destination, vector);
#endif
}

// One of them, times the scale of a split matrix.
template <int COLUMNS>
__device__ __forceinline__ float load_operand(const Operand* row, int column) {
    float value = to_float(row[column]);
    if constexpr (OPERAND_PARTS == 2) value += to_float(row[COLUMNS + column]);
    return value;
}
