// Second bodies of the wrappers in kernels/include/ptx.cuh, by the PTX ISA's tables; what a warp does together is
// cusim_ptx.cpp, what is asynchronous or of a warpgroup on sm_90 is cusim_sm90.cpp.
//
// NOTE: fences, of barriers' initialisation and of proxies, do nothing here, and neither does setmaxnreg: that one is
// missing shows on a device only, if there.
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
void combine_mma_tf32(void* const (&arguments)[WARP_SIZE], uint32_t lanes);
// Tensor cores leave out what is below the 10 bits of mantissa; here an operand that was not rounded to them is an error.
float widen_tf32(unsigned bits);

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

// ---- sm_90 ----

void init_mbarrier(unsigned long long* barrier, int num_arrivals);
// Also expects the bytes.
void arrive_at_mbarrier(unsigned long long* barrier, int num_bytes);
bool poll_mbarrier(unsigned long long* barrier, unsigned parity);
void wait_at_named_barrier(int barrier_idx, int num_threads, const char* file, int line);

// The size of the box that will come.
size_t start_load(
    const char* name, void* smem, const TensorMap& map, unsigned num_dimensions, int column, int row, int plane,
    unsigned long long* barrier);
struct Snapshot {
    unsigned char* bytes;
    size_t num_bytes;
};
// To be filled with what is in shared memory now.
Snapshot start_store(const TensorMap& map, int column, int row, const void* smem);
void commit_stores();
void wait_for_stores();

enum class WgmmaType { f16, bf16, tf32 };
// m64nNk16, or k8 of tf32. The left operand is in shared memory, or in each thread's registers if those are given.
struct Wgmma {
    WgmmaType type;
    unsigned num_columns;
    const unsigned* a_registers;
    unsigned long long a, b;  // descriptors
    bool is_b_transposed;
    bool accumulate;
};
void start_wgmma(const Wgmma& wgmma, float* d);
void fence_wgmma();
void commit_wgmma();
void wait_for_wgmma(int num_pending_groups);

}  // namespace cusim

// One kernel runs at a time.
inline void grid_launch_next() {}
inline void grid_wait() {}

float cvt_f32_f16(unsigned short bits);
unsigned short cvt_f16_f32(float value);
inline unsigned short cvt_bf16_f32(float value) {
    if (isnan(value)) return 0x7fff;
    unsigned bits = __float_as_uint(value);
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline unsigned cvt_tf32_f32(float value) {
    if (isnan(value)) return 0x7fffffff;
    return (__float_as_uint(value) + 0x1000) & 0xffffe000;
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
inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    cusim::MatrixProduct product{d, a, {b0, b1}};
    cusim::warp_collective("mma.tf32", cusim::ALL_LANES, cusim::combine_mma_tf32, &product);
}

#if __CUDA_ARCH_FEAT_SM90_ALL

// For the descriptors of wgmma, which leave out the last 4 bits and have room for 18.
inline unsigned smem_address(const void* smem) {
    if (!cusim::is_shared(smem, 1)) cusim::fail("smem_address: not in shared memory");
    unsigned address = cusim::shared_address(smem);
    if (address % 16 != 0) cusim::fail("smem_address: 0x%x is not aligned to 16 bytes", address);
    if (address >= 1 << 18) cusim::fail("smem_address: 0x%x, which is past 256 KiB", address);
    return address;
}

inline void mbarrier_init(unsigned long long* barrier, int num_arrivals) {
    cusim::init_mbarrier(barrier, num_arrivals);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(unsigned long long* barrier) { cusim::arrive_at_mbarrier(barrier, 0); }
inline void mbarrier_arrive_expect_tx(unsigned long long* barrier, int num_bytes) {
    cusim::arrive_at_mbarrier(barrier, num_bytes);
}
// The first answer to a thread that would have to wait is no, as it may be on a device; if it asks again, it waits.
inline bool mbarrier_try_wait(unsigned long long* barrier, unsigned parity) {
    return cusim::poll_mbarrier(barrier, parity);
}

inline void prefetch_tensor_map(const TensorMap&) {}

// The box is NaN from here to its arrival: when no thread can go on, or at random. It is filled here, so that the
// sanitizer names the kernel's line.
inline void tma_load_2d(void* smem, const TensorMap& map, int column, int row, unsigned long long* barrier) {
    memset(smem, 0xff, cusim::start_load("tma_load_2d", smem, map, 2, column, row, 0, barrier));
}
inline void tma_load_3d(
    void* smem, const TensorMap& map, int column, int row, int plane, unsigned long long* barrier) {
    memset(smem, 0xff, cusim::start_load("tma_load_3d", smem, map, 3, column, row, plane, barrier));
}
// Written at bulk_wait_read; shared memory must be then what it is now.
inline void tma_store_2d(const TensorMap& map, int column, int row, const void* smem) {
    cusim::Snapshot snapshot = cusim::start_store(map, column, row, smem);
    memcpy(snapshot.bytes, smem, snapshot.num_bytes);
}
inline void bulk_commit() { cusim::commit_stores(); }
inline void bulk_wait_read() { cusim::wait_for_stores(); }
inline void fence_proxy_async() {}

inline void barrier_sync(
    int barrier_idx, int num_threads, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    cusim::wait_at_named_barrier(barrier_idx, num_threads, file, line);
}

template <int NUM_REGISTERS>
inline void setmaxnreg_dec() {}
template <int NUM_REGISTERS>
inline void setmaxnreg_inc() {}

// Accumulators are NaN from the first product to the wait for the last. Operands in shared memory must be the same at
// the wait as when the first thread gave them.
inline void wgmma_fence() { cusim::fence_wgmma(); }
inline void wgmma_commit() { cusim::commit_wgmma(); }
template <int PENDING>
inline void wgmma_wait() {
    cusim::wait_for_wgmma(PENDING);
}
#define CUSIM_WGMMA(type, depth, n)                                                             \
    inline void wgmma_m64n##n##k##depth##_##type(                                               \
        float (&d)[n / 2], unsigned long long a, unsigned long long b, int accumulate) {        \
        cusim::start_wgmma({cusim::WgmmaType::type, n, nullptr, a, b, false, accumulate != 0}, d); \
    }
#define CUSIM_WGMMA_REGISTERS(type, n)                                                          \
    inline void wgmma_m64n##n##k16_registers_##type(                                            \
        float (&d)[n / 2], const unsigned (&a)[4], unsigned long long b, int accumulate) {      \
        cusim::start_wgmma({cusim::WgmmaType::type, n, a, 0, b, true, accumulate != 0}, d);     \
    }
#define CUSIM_WGMMA_OF(type, depth)                                                             \
    CUSIM_WGMMA(type, depth, 8)                                                                 \
    CUSIM_WGMMA(type, depth, 16)                                                                \
    CUSIM_WGMMA(type, depth, 32)                                                                \
    CUSIM_WGMMA(type, depth, 64)                                                                \
    CUSIM_WGMMA(type, depth, 128)
CUSIM_WGMMA_OF(f16, 16)
CUSIM_WGMMA_OF(bf16, 16)
CUSIM_WGMMA_OF(tf32, 8)
CUSIM_WGMMA_REGISTERS(f16, 64)
CUSIM_WGMMA_REGISTERS(f16, 128)
CUSIM_WGMMA_REGISTERS(bf16, 64)
CUSIM_WGMMA_REGISTERS(bf16, 128)
#undef CUSIM_WGMMA_OF
#undef CUSIM_WGMMA_REGISTERS
#undef CUSIM_WGMMA

#endif
