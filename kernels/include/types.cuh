// Element types without CUDA's headers, and their way to float and back. `T` is the type that the kernel is compiled
// for: -D DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_TF32 or DTYPE_SPLIT. `Operand` is that of the matrices which are multiplied:
// T, but where T is float and they are tf32, or split, f16 (see split.cuh).
#pragma once
#include "include/ptx.cuh"

struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};
// A float whose last 13 bits are zero.
struct tf32 {
    unsigned bits;
};

#if defined(DTYPE_F32)
using T = float;
using Operand = float;
#elif defined(DTYPE_F16)
using T = f16;
using Operand = f16;
#elif defined(DTYPE_BF16)
using T = bf16;
using Operand = bf16;
#elif defined(DTYPE_TF32)
using T = float;
using Operand = tf32;
#elif defined(DTYPE_SPLIT)
using T = float;
using Operand = f16;
#endif

// What a linear layer writes: what is multiplied again, or, with TO_SUM, what is added to something. Of 16 bits they are one.
#if defined(OUT_FEATURES)
#if TO_SUM
using Out = T;
#else
using Out = Operand;
#endif
#endif

// What is converted, where a kernel does no more than that.
#if defined(SOURCE_F32)
using Source = float;
#elif defined(SOURCE_F16)
using Source = f16;
#elif defined(SOURCE_BF16)
using Source = bf16;
#endif

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(f16 value) { return cvt_f32_f16(value.bits); }
__device__ __forceinline__ float to_float(tf32 value) { return __int_as_float(static_cast<int>(value.bits)); }
__device__ __forceinline__ float to_float(bf16 value) { return __int_as_float(static_cast<int>(value.bits) << 16); }

// To nearest even. bf16 has no instruction before sm_80: there the rounding is done on the bits, and a NaN, whose mantissa
// the rounding would carry into the exponent, is cut off and kept quiet.
__device__ __forceinline__ unsigned short bf16_bits(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return cvt_bf16_f32(value);
#else
    unsigned bits = static_cast<unsigned>(__float_as_int(value));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>((bits >> 16) | 0x40u);
    return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

template <class Element>
__device__ __forceinline__ Element from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float value) {
    return f16{cvt_f16_f32(value)};
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
    return bf16{bf16_bits(value)};
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ tf32 from_float<tf32>(float value) {
    return tf32{cvt_tf32_f32(value)};
}
#endif
