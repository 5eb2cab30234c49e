// The product of a warpgroup by Operand, of 32 bytes of K. Of a 64 x N accumulator warp w holds rows 16 * w to 16 * w + 15, and
// of each 8 columns a lane what it holds of mma's (include/mma.cuh): d[4 * (n / 8) ...].
#pragma once
#include "include/ptx.cuh"
#include "include/types.cuh"

// Of an operand in rows of 128 bytes, as the copy engine's swizzle of 128 bytes lays them, 8 rows every 1024 bytes. Rows are of
// K, or, transposed, of the other dimension: if that has more than 64 elements, the next 64 lie box_bytes further on. Only 16-bit
// elements can be transposed.
// PTX ISA 9.7.15.5.1: address, leading and stride offset in units of 16 bytes, swizzle mode.
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* smem, unsigned box_bytes = 16) {
    unsigned long long address = smem_address(smem) & 0x3ffffu;
    return address >> 4 | static_cast<unsigned long long>(box_bytes >> 4) << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

// The number of columns is twice d's.
#if defined(DTYPE_TF32)
#define DEFINE_WGMMA_OF_T(N) DEFINE_WGMMA_OVERLOAD(wgmma_m64n##N##k8_tf32, N)
#define DEFINE_WGMMA_REGISTERS_OF_T(N)
#elif defined(DTYPE_BF16)
#define DEFINE_WGMMA_OF_T(N) DEFINE_WGMMA_OVERLOAD(wgmma_m64n##N##k16_bf16, N)
#define DEFINE_WGMMA_REGISTERS_OF_T(N) DEFINE_WGMMA_REGISTERS_OVERLOAD(wgmma_m64n##N##k16_registers_bf16, N)
#else
#define DEFINE_WGMMA_OF_T(N) DEFINE_WGMMA_OVERLOAD(wgmma_m64n##N##k16_f16, N)
#define DEFINE_WGMMA_REGISTERS_OF_T(N) DEFINE_WGMMA_REGISTERS_OVERLOAD(wgmma_m64n##N##k16_registers_f16, N)
#endif
#define DEFINE_WGMMA_OVERLOAD(NAME, N) \
    __device__ __forceinline__ void wgmma( \
        float (&d)[N / 2], unsigned long long a, unsigned long long b, int accumulate) { \
        NAME(d, a, b, accumulate); \
    }
#define DEFINE_WGMMA_REGISTERS_OVERLOAD(NAME, N) \
    __device__ __forceinline__ void wgmma( \
        float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, int accumulate) { \
        NAME(d, a, b, accumulate); \
    }
DEFINE_WGMMA_OF_T(8)
DEFINE_WGMMA_OF_T(16)
DEFINE_WGMMA_OF_T(32)
DEFINE_WGMMA_OF_T(64)
DEFINE_WGMMA_OF_T(128)
DEFINE_WGMMA_REGISTERS_OF_T(64)
DEFINE_WGMMA_REGISTERS_OF_T(128)
