// Second bodies of the wrappers in kernels/include/ptx.cuh, by the PTX ISA's tables; the warp's part is cusim_ptx.cpp.
#pragma once
#include <cusim.h>

namespace cusim {

struct MatrixLoad {
    unsigned short row[8];  // the row that this lane gives
    unsigned* matrix;       // [4]: this lane's part of each matrix
};
void combine_ldmatrix(void* const (&arguments)[WARP_SIZE], uint32_t lanes);
void combine_ldmatrix_trans(void* const (&arguments)[WARP_SIZE], uint32_t lanes);

struct MatrixProduct {
    float* d;           // [4]
    const unsigned* a;  // [4]
    unsigned b[2];
};
void combine_mma_bf16(void* const (&arguments)[WARP_SIZE], uint32_t lanes);
void combine_mma_f16(void* const (&arguments)[WARP_SIZE], uint32_t lanes);

// The running thread's asynchronous copies.
void issue_copy(void* destination, const unsigned char (&data)[16]);
void commit_copies();
void wait_for_copies(int num_pending_groups);

inline MatrixLoad matrix_load(unsigned (&matrix)[4], const void* smem_row) {
    if (!is_shared(smem_row, 16)) fail("ldmatrix: a row is not in shared memory");
    if (reinterpret_cast<size_t>(smem_row) % 16 != 0) fail("ldmatrix: a row is not aligned to 16 bytes");
    MatrixLoad load;
    // Here rather than in `combine`, so that the sanitizer names the kernel's line. Reading before the other lanes have
    // come is allowed: ldmatrix orders no memory.
    memcpy(load.row, smem_row, 16);
    load.matrix = matrix;
    return load;
}

}  // namespace cusim

float cvt_f32_f16(unsigned short bits);
unsigned short cvt_f16_f32(float value);
inline unsigned short cvt_bf16_f32(float value) {
    if (isnan(value)) return 0x7fff;
    unsigned bits = __float_as_uint(value);
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline unsigned cvt_f16x2_f32(float low, float high) {
    return cvt_f16_f32(low) | static_cast<unsigned>(cvt_f16_f32(high)) << 16;
}
inline unsigned cvt_bf16x2_f32(float low, float high) {
    return cvt_bf16_f32(low) | static_cast<unsigned>(cvt_bf16_f32(high)) << 16;
}

// Subnormal inputs and results are zero (.ftz). Otherwise more exact than the instruction.
inline float ex2_approx(float x) {
    float value = exp2f(x);
    return value < 0x1p-126f ? 0.0f : value;
}

// The destination is undefined from here to the wait: it is filled with NaN now, and written at the wait. So both a
// missing wait and a copy into memory that another thread still reads show.
inline void cp_async_16(void* smem, const void* gmem, int source_bytes) {
    using cusim::fail;
    if (source_bytes < 0 || source_bytes > 16) fail("cp.async: %d source bytes", source_bytes);
    if (!cusim::is_shared(smem, 16)) fail("cp.async: the destination is not in shared memory");
    if (reinterpret_cast<size_t>(smem) % 16 != 0) fail("cp.async: the destination is not aligned to 16 bytes");
    if (reinterpret_cast<size_t>(gmem) % 16 != 0) fail("cp.async: the source is not aligned to 16 bytes");
    unsigned char data[16] = {};
    if (source_bytes > 0) memcpy(data, gmem, static_cast<size_t>(source_bytes));
    memset(smem, 0xff, 16);
    cusim::issue_copy(smem, data);
}
inline void cp_async_commit() { cusim::commit_copies(); }
template <int PENDING>
inline void cp_async_wait() {
    cusim::wait_for_copies(PENDING);
}

inline void ldmatrix_x4(unsigned (&matrix)[4], const void* smem_row) {
    cusim::MatrixLoad load = cusim::matrix_load(matrix, smem_row);
    cusim::warp_collective("ldmatrix", cusim::ALL_LANES, cusim::combine_ldmatrix, &load);
}
inline void ldmatrix_x4_trans(unsigned (&matrix)[4], const void* smem_row) {
    cusim::MatrixLoad load = cusim::matrix_load(matrix, smem_row);
    cusim::warp_collective("ldmatrix.trans", cusim::ALL_LANES, cusim::combine_ldmatrix_trans, &load);
}

inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    cusim::MatrixProduct product{d, a, {b0, b1}};
    cusim::warp_collective("mma.bf16", cusim::ALL_LANES, cusim::combine_mma_bf16, &product);
}
inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    cusim::MatrixProduct product{d, a, {b0, b1}};
    cusim::warp_collective("mma.f16", cusim::ALL_LANES, cusim::combine_mma_f16, &product);
}
