// Inline PTX: all of it, one instruction a function, so that each can have a second body in the CPU emulator
// (tests/cusim/cusim_ptx.h). Section numbers are of the PTX ISA document.
#pragma once
#ifdef CUSIM
#include <cusim_ptx.h>
#else

// 9.7.9.21 cvt
__device__ __forceinline__ float cvt_f32_f16(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ unsigned short cvt_f16_f32(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned short cvt_bf16_f32(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
// Two values at once, `low` in the low half.
__device__ __forceinline__ unsigned cvt_f16x2_f32(float low, float high) {
    unsigned bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
__device__ __forceinline__ unsigned cvt_bf16x2_f32(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
#endif

// 9.7.3.21 ex2: 2^x, with a relative error of 2^-22.5
__device__ __forceinline__ float ex2_approx(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

#if __CUDA_ARCH__ >= 800
// 9.7.9.25.3 cp.async: 16 bytes from global to shared memory, both aligned to 16; 0 source bytes write zeros
__device__ __forceinline__ void cp_async_16(void* smem, const void* gmem, int source_bytes) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(smem));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(gmem), "r"(source_bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of the thread's newest groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 9.7.14.5.15 ldmatrix: four 8x8 matrices of 16-bit elements, each lane giving the address of one row of 16 bytes
__device__ __forceinline__ void ldmatrix_x4(unsigned (&matrix)[4], const void* smem_row) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&matrix)[4], const void* smem_row) {
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(smem_row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(address)
                 : "memory");
}

// 9.7.14.5.14 mma.m16n8k16: d += a * b, 16-bit operands, fp32 accumulator; a is row-major, b column-major
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
#endif
