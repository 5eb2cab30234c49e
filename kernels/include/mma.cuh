// The tensor-core product by Operand, of 32 bytes of K, fp32 accumulator: m16n8k16 of 16 bits, m16n8k8 of tf32.
// Lane l holds, with row = l / 4 and pair = l % 4: of a 16 x 8 accumulator d[0..1] = (row, 2 * pair + 0..1) and
// d[2..3] = the same columns of row + 8; of a 16 x 16 operand a[0] = (row, 2 * pair + 0..1), a[1] = row + 8, a[2..3] = the
// same rows, columns + 8. Two accumulators side by side, rounded and packed, are therefore an operand. Of tf32 a register
// holds one element in place of two: (row, pair), and columns + 4. In bytes, and so for ldmatrix, the two are the same.
#pragma once
#include "include/ptx.cuh"
#include "include/types.cuh"
#include "include/vector.cuh"

// d += a * b
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(DTYPE_TF32)
    mma_m16n8k8_tf32(d, a, b0, b1);
#elif defined(DTYPE_BF16)
    mma_m16n8k16_bf16(d, a, b0, b1);
#else
    mma_m16n8k16_f16(d, a, b0, b1);
#endif
}

// Two values rounded to 16 bits, the first in the low half: the order of memory.
__device__ __forceinline__ unsigned pack(float low, float high) {
#if defined(DTYPE_BF16)
    return cvt_bf16x2_f32(low, high);
#else
    return cvt_f16x2_f32(low, high);
#endif
}

// Two neighbouring values, rounded, to where they go, which is aligned to both.
template <class Element>
__device__ __forceinline__ void store_pair(Element* destination, float low, float high) {
    if constexpr (sizeof(Element) == 2) {
        *reinterpret_cast<unsigned*>(destination) = pack(low, high);
    } else {
        store_vector(destination, Vector<Element, 2>{{from_float<Element>(low), from_float<Element>(high)}});
    }
}
