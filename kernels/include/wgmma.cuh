// The product of a warpgroup of 16-bit elements, by T. Of a 64 x N accumulator warp w holds rows 16 * w to 16 * w + 15, and of
// each 8 columns a lane what it holds of m16n8k16 (include/mma.cuh): d[4 * (n / 8) ...].
#pragma once
#include "include/ptx.cuh"
#include "include/types.cuh"

// Of an operand in rows of 128 bytes, as the copy engine's swizzle of 128 bytes lays them, 8 rows every 1024 bytes. Rows are of
// K, or, transposed, of the other dimension: if that has more than 64 elements, the next 64 lie box_bytes further on.
// PTX ISA 9.7.15.5.1: address, leading and stride offset in units of 16 bytes, swizzle mode.
__device__ __forceinline__ unsigned long long wgmma_descriptor(const void* smem, unsigned box_bytes = 16) {
    unsigned long long address = smem_address(smem) & 0x3ffffu;
    return address >> 4 | static_cast<unsigned long long>(box_bytes >> 4) << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_m64n128k16(
    float (&d)[64], unsigned long long a, unsigned long long b, int accumulate) {
#if defined(DTYPE_BF16)
    wgmma_m64n128k16_bf16(d, a, b, accumulate);
#else
    wgmma_m64n128k16_f16(d, a, b, accumulate);
#endif
}

// The number of columns is d's.
__device__ __forceinline__ void wgmma_registers(
    float (&d)[32], const unsigned (&a)[4], unsigned long long b, int accumulate) {
#if defined(DTYPE_BF16)
    wgmma_m64n64k16_registers_bf16(d, a, b, accumulate);
#else
    wgmma_m64n64k16_registers_f16(d, a, b, accumulate);
#endif
}
__device__ __forceinline__ void wgmma_registers(
    float (&d)[64], const unsigned (&a)[4], unsigned long long b, int accumulate) {
#if defined(DTYPE_BF16)
    wgmma_m64n128k16_registers_bf16(d, a, b, accumulate);
#else
    wgmma_m64n128k16_registers_f16(d, a, b, accumulate);
#endif
}
