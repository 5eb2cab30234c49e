// Inline PTX: all of it, one instruction a function, so that each can have a second body in the CPU emulator
// (tests/cusim/cusim_ptx.h). Section numbers are of the PTX ISA document.
#pragma once

// What the driver's cuTensorMapEncodeTiled makes of a matrix: a kernel's parameter, and never looked into.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};

#ifdef CUSIM
#include <cusim_ptx.h>
#else

// 9.7.13.14 griddepcontrol: lets the next kernel of the stream start, and waits until the kernel before has ended and what it
// wrote is there. Until it waits a kernel may only read what no kernel writes: weights. Before sm_90 kernels follow one another.
__device__ __forceinline__ void grid_launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

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
// To nearest, and of two as near away from zero.
__device__ __forceinline__ unsigned cvt_tf32_f32(float value) {
    unsigned bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
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

// 9.7.14.5.13 mma.m16n8k8: the same of tf32, whose registers hold an element where those of 16 bits hold two
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

#if __CUDA_ARCH_FEAT_SM90_ALL
// 9.7.13.15 mbarrier: a word of shared memory that counts arrivals, and the bytes of copies, phase after phase. A wait is
// for the end of the phase of this parity, which begins at 0.
__device__ __forceinline__ unsigned smem_address(const void* smem) {
    return static_cast<unsigned>(__cvta_generic_to_shared(smem));
}
__device__ __forceinline__ void mbarrier_init(unsigned long long* barrier, int num_arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(num_arrivals) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned long long* barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(num_bytes)
                 : "memory");
}
// Suspends the thread for a while that the hardware chooses; whether the phase has ended.
__device__ __forceinline__ bool mbarrier_try_wait(unsigned long long* barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(smem_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// 9.7.9.16 prefetch: of a tensor map, which the copy engine has to read before its first copy
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// 9.7.9.27 cp.async.bulk.tensor: a box of a matrix by way of its tensor map, first column and row given; what lies
// outside the matrix is read as zeros and not written
__device__ __forceinline__ void tma_load_2d(
    void* smem, const TensorMap& map, int column, int row, unsigned long long* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            smem_address(smem)),
        "l"(&map), "r"(column), "r"(row), "r"(smem_address(barrier))
        : "memory");
}
// Of a matrix in planes, from the given one on.
__device__ __forceinline__ void tma_load_3d(
    void* smem, const TensorMap& map, int column, int row, int plane, unsigned long long* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(
            smem_address(smem)),
        "l"(&map), "r"(column), "r"(row), "r"(plane), "r"(smem_address(barrier))
        : "memory");
}
__device__ __forceinline__ void tma_store_2d(const TensorMap& map, int column, int row, const void* smem) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(smem_address(smem))
                 : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the thread's stores have read their shared memory.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// 9.7.13.4 Makes the thread's writes to shared memory visible to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 9.7.13.1 bar.sync: a barrier of num_threads threads, one of 16; 0 is __syncthreads'
__device__ __forceinline__ void barrier_sync(int barrier_idx, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier_idx), "r"(num_threads) : "memory");
}

// 9.7.19.5 setmaxnreg: registers of each thread of the warpgroup from here on
template <int NUM_REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}
template <int NUM_REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NUM_REGISTERS));
}

// 9.7.15.7 wgmma: the products of a warpgroup, which run while it goes on
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the newest groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Registers by number, in the text of an instruction, and what they stand for.
#define WGMMA_REGISTERS_4 "%0, %1, %2, %3"
#define WGMMA_REGISTERS_8 WGMMA_REGISTERS_4 ", %4, %5, %6, %7"
#define WGMMA_REGISTERS_16 WGMMA_REGISTERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_REGISTERS_32 \
    WGMMA_REGISTERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_REGISTERS_64 \
    WGMMA_REGISTERS_32 \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
    "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(d, i) WGMMA_D4(d, i), WGMMA_D4(d, i + 4)
#define WGMMA_D16(d, i) WGMMA_D8(d, i), WGMMA_D8(d, i + 8)
#define WGMMA_D32(d, i) WGMMA_D16(d, i), WGMMA_D16(d, i + 16)
#define WGMMA_D64(d, i) WGMMA_D32(d, i), WGMMA_D32(d, i + 32)

// d = a * b, or d += a * b: 64 x K by K x N, both in shared memory by their descriptors, fp32 accumulator. K is 32 bytes. Rows
// are of K: LAYOUT says so of 16-bit operands, and others have no other.
#define DEFINE_WGMMA(TYPE, K, LAYOUT, N, COUNT, A, B, ACCUMULATE) \
    __device__ __forceinline__ void wgmma_m64n##N##k##K##_##TYPE( \
        float (&d)[COUNT], unsigned long long a, unsigned long long b, int accumulate) { \
        asm volatile( \
            "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " ACCUMULATE ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." #TYPE "." #TYPE " {" WGMMA_REGISTERS_##COUNT \
            "}, " A ", " B ", accumulate, 1, 1" LAYOUT ";\n}" \
            : WGMMA_D##COUNT(d, 0) \
            : "l"(a), "l"(b), "r"(accumulate)); \
    }
// The same with the left operand in registers, as m16n8k16's of each warp, and the right one's rows of K side by side
// (transposed).
#define DEFINE_WGMMA_REGISTERS(TYPE, N, COUNT, A, B, ACCUMULATE) \
    __device__ __forceinline__ void wgmma_m64n##N##k16_registers_##TYPE( \
        float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int accumulate) { \
        asm volatile( \
            "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " ACCUMULATE ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {" WGMMA_REGISTERS_##COUNT \
            "}, {" A "}, " B ", accumulate, 1, 1, 1;\n}" \
            : WGMMA_D##COUNT(d, 0) \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
    }
#define DEFINE_WGMMA_OF(TYPE, K, LAYOUT) \
    DEFINE_WGMMA(TYPE, K, LAYOUT, 8, 4, "%4", "%5", "%6") \
    DEFINE_WGMMA(TYPE, K, LAYOUT, 16, 8, "%8", "%9", "%10") \
    DEFINE_WGMMA(TYPE, K, LAYOUT, 32, 16, "%16", "%17", "%18") \
    DEFINE_WGMMA(TYPE, K, LAYOUT, 64, 32, "%32", "%33", "%34") \
    DEFINE_WGMMA(TYPE, K, LAYOUT, 128, 64, "%64", "%65", "%66")
#define DEFINE_WGMMA_REGISTERS_OF(TYPE) \
    DEFINE_WGMMA_REGISTERS(TYPE, 64, 32, "%32, %33, %34, %35", "%36", "%37") \
    DEFINE_WGMMA_REGISTERS(TYPE, 128, 64, "%64, %65, %66, %67", "%68", "%69")
DEFINE_WGMMA_OF(bf16, 16, ", 0, 0")
DEFINE_WGMMA_OF(f16, 16, ", 0, 0")
DEFINE_WGMMA_OF(tf32, 8, "")
DEFINE_WGMMA_REGISTERS_OF(bf16)
DEFINE_WGMMA_REGISTERS_OF(f16)
#endif
#endif
