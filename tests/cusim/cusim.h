// cusim: runs a kernel's .cu file on the CPU. What a kernel sees of CUDA C++ is declared here; cusim.cpp runs it.
//
// One fiber per CUDA thread, all on one OS thread: blocks one after another, and the threads of a block in turns, each
// running until it waits in a barrier or a warp collective. Every launch is deterministic; its order of blocks and
// threads is an argument. docs/cusim.md says what a run shows and what it cannot. x86-64 and GCC only.
#pragma once
// Few and light headers, and the functions of <math.h> declared by hand: <cmath> takes longer to compile than a kernel.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern "C" {
float ceilf(float) noexcept;
float erff(float) noexcept;
float exp2f(float) noexcept;
float expf(float) noexcept;
float fabsf(float) noexcept;
float floorf(float) noexcept;
float fmaf(float, float, float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float log2f(float) noexcept;
float logf(float) noexcept;
float sqrtf(float) noexcept;
float tanhf(float) noexcept;
}

// After the system's headers, which may look at it.
#define __CUDA_ARCH__ CUSIM_ARCH

// ---- Declarations ------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __restrict__ __restrict

// A section of its own, so that it can be filled before each block; the sanitized build puts red zones round each
// array in it. `extern __shared__ T name[]` cannot be a macro's work: the harness rewrites it (see dynamic_shared).
#define __shared__ static __attribute__((section("cusim_shared")))

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

// The vector types, with CUDA's alignment: a misaligned access is reported by the sanitized build.
#define CUSIM_VECTORS(Scalar, name)                                                                            \
    struct alignas(2 * sizeof(Scalar)) name##2 {                                                               \
        Scalar x, y;                                                                                           \
    };                                                                                                         \
    struct alignas(4 * sizeof(Scalar) > 16 ? 16 : 4 * sizeof(Scalar)) name##4 {                                \
        Scalar x, y, z, w;                                                                                     \
    };                                                                                                         \
    inline name##2 make_##name##2(Scalar x, Scalar y) { return {x, y}; }                                       \
    inline name##4 make_##name##4(Scalar x, Scalar y, Scalar z, Scalar w) { return {x, y, z, w}; }
CUSIM_VECTORS(char, char)
CUSIM_VECTORS(unsigned char, uchar)
CUSIM_VECTORS(short, short)
CUSIM_VECTORS(unsigned short, ushort)
CUSIM_VECTORS(int, int)
CUSIM_VECTORS(unsigned, uint)
CUSIM_VECTORS(float, float)
#undef CUSIM_VECTORS

struct TensorMap;  // kernels/include/ptx.cuh

namespace cusim {

// ---- The running thread ------------------------------------------------------------------------------------------

constexpr unsigned WARP_SIZE = 32;
constexpr uint32_t ALL_LANES = 0xffffffffu;

extern uint3 thread_index, block_index;
extern dim3 block_dim, grid_dim;

inline unsigned lane_index() {
    return (thread_index.x + block_dim.x * (thread_index.y + block_dim.y * thread_index.z)) % WARP_SIZE;
}

// Ends the launch with an error; the calling thread does not go on.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Waits until every thread of the block that has not returned is here: at this line, or the launch fails.
void block_barrier(const char* file, int line);

// One lane's part in an operation that a warp does together. Waits until every lane of `mask` that has not returned is
// here; the last to come calls `combine` for all of them, with each lane's `arguments` (on its own stack) and the set
// of lanes that take part. Lanes that meet must name the same mask and the same `combine`.
using Combine = void (*)(void* const (&arguments)[WARP_SIZE], uint32_t lanes);
void warp_collective(const char* name, uint32_t mask, Combine combine, void* arguments);

// The block's dynamic shared memory, as many bytes as the launch asked for. The harness makes
// `T*& name = cusim::dynamic_shared<T>();` of `extern __shared__ T name[];`.
extern void* dynamic_shared_base;
template <class Element>
Element*& dynamic_shared() {
    return reinterpret_cast<Element*&>(dynamic_shared_base);
}

// A parameter whose type follows from another's.
template <class Type>
struct Identity {
    using type = Type;
};
template <class Type>
using Same = typename Identity<Type>::type;

// Whether these bytes are shared memory, static or dynamic.
bool is_shared(const void* address, size_t num_bytes);

// Shared memory as instructions address it: from 0 on, the static before the dynamic, both as far from a multiple of
// 1024 as they are here. The pointer is one only if it is_shared.
unsigned shared_address(const void* address);
unsigned char* shared_pointer(unsigned address);

// ---- Warp collectives --------------------------------------------------------------------------------------------

template <class Value>
struct Shuffle {
    Value value;
    unsigned source_lane;
    Value result;
};

template <class Value>
void combine_shuffle(void* const (&arguments)[WARP_SIZE], uint32_t lanes) {
    for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        auto* shuffle = static_cast<Shuffle<Value>*>(arguments[lane]);
        if (lanes >> shuffle->source_lane & 1) {
            shuffle->result = static_cast<Shuffle<Value>*>(arguments[shuffle->source_lane])->value;
        } else {
            memset(&shuffle->result, 0xff, sizeof(Value));  // undefined: a lane that takes no part was asked
        }
    }
}

template <class Value>
Value shuffle(const char* name, uint32_t mask, Value value, unsigned source_lane) {
    static_assert(__is_trivially_copyable(Value) && sizeof(Value) <= 8);
    Shuffle<Value> arguments{value, source_lane, value};
    warp_collective(name, mask, combine_shuffle<Value>, &arguments);
    return arguments.result;
}

struct Ballot {
    bool predicate;
    uint32_t result;
};
void combine_ballot(void* const (&arguments)[WARP_SIZE], uint32_t lanes);
void combine_nothing(void* const (&arguments)[WARP_SIZE], uint32_t lanes);

// ---- The kernel's entry, as the runtime calls it -----------------------------------------------------------------

// One letter a parameter: i 32-bit integer, f float; 1, 2, 4 or 8 pointer to elements of that many bytes, p to others;
// m tensor map; ? what no launch can pass.
template <class Parameter>
constexpr char KIND = '?';
template <>
constexpr char KIND<int> = 'i';
template <>
constexpr char KIND<unsigned> = 'i';
template <>
constexpr char KIND<float> = 'f';
template <>
constexpr char KIND<TensorMap> = 'm';
template <class Element>
constexpr char KIND<Element*> = 8 % sizeof(Element) == 0 ? '0' + sizeof(Element) : 'p';
template <>
constexpr char KIND<void*> = 'p';
template <>
constexpr char KIND<const void*> = 'p';

// Wherever the launch put it: not always as aligned as the type asks for.
template <class Parameter>
Parameter read_argument(const void* bytes) {
    Parameter value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

template <size_t... values>
struct Indices {};

template <auto kernel, class... Parameters>
struct Caller {
    static constexpr char kinds[] = {KIND<Parameters>..., '\0'};

    // Calls the kernel with the parameters that the pointers point to.
    static void invoke(void* const* arguments) { call(arguments, Indices<__integer_pack(sizeof...(Parameters))...>()); }

    template <size_t... indices>
    static void call(void* const* arguments, Indices<indices...>) {
        kernel(read_argument<Parameters>(arguments[indices])...);
    }
};

struct Entry {
    const char* kinds;
    void (*invoke)(void* const* arguments);
    char *static_shared_begin, *static_shared_end;
};

template <auto kernel, class... Parameters>
constexpr Entry entry_of(void (*)(Parameters...), char* static_shared_begin, char* static_shared_end) {
    using Call = Caller<kernel, Parameters...>;
    return {Call::kinds, Call::invoke, static_shared_begin, static_shared_end};
}

}  // namespace cusim

// The linker's names for the ends of the section; null in a kernel without static shared memory.
extern "C" {
extern char __start_cusim_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_cusim_shared[] __attribute__((weak, visibility("hidden")));
}

// What the harness puts at the end of each kernel's translation unit.
#define CUSIM_EXPORT(kernel)                \
    extern const cusim::Entry cusim_entry;  \
    const cusim::Entry cusim_entry = cusim::entry_of<kernel>(kernel, __start_cusim_shared, __stop_cusim_shared);

// ---- Built-in variables and functions ----------------------------------------------------------------------------

#define threadIdx (cusim::thread_index)
#define blockIdx (cusim::block_index)
#define blockDim (cusim::block_dim)
#define gridDim (cusim::grid_dim)
#define warpSize 32

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    cusim::block_barrier(file, line);
}
inline void __syncwarp(uint32_t mask = cusim::ALL_LANES) {
    cusim::warp_collective("__syncwarp", mask, cusim::combine_nothing, nullptr);
}

// A segment is `width` neighbouring lanes; a source outside it is the lane itself (up, down) or wraps (idx).
template <class Value>
Value __shfl_sync(uint32_t mask, Value value, int source, int width = 32) {
    unsigned first = cusim::lane_index() & ~(width - 1u);
    return cusim::shuffle("__shfl_sync", mask, value, first | (source & (width - 1u)));
}
template <class Value>
Value __shfl_xor_sync(uint32_t mask, Value value, int lane_mask, int width = 32) {
    unsigned lane = cusim::lane_index(), source = lane ^ lane_mask;
    bool outside = source > (lane | (width - 1u));
    return cusim::shuffle("__shfl_xor_sync", mask, value, outside ? lane : source);
}
template <class Value>
Value __shfl_up_sync(uint32_t mask, Value value, unsigned delta, int width = 32) {
    unsigned lane = cusim::lane_index(), place = lane & (width - 1u);
    return cusim::shuffle("__shfl_up_sync", mask, value, place >= delta ? lane - delta : lane);
}
template <class Value>
Value __shfl_down_sync(uint32_t mask, Value value, unsigned delta, int width = 32) {
    unsigned lane = cusim::lane_index(), place = lane & (width - 1u);
    return cusim::shuffle("__shfl_down_sync", mask, value, place + delta < unsigned(width) ? lane + delta : lane);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
    cusim::Ballot ballot{predicate != 0, 0};
    cusim::warp_collective("__ballot_sync", mask, cusim::combine_ballot, &ballot);
    return ballot.result;
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }

// Fibers are never interrupted between two waits: plain reads and writes are atomic.
template <class Value>
Value atomicAdd(Value* address, cusim::Same<Value> value) {
    Value old = *address;
    *address = old + value;
    return old;
}
template <class Value>
Value atomicMax(Value* address, cusim::Same<Value> value) {
    Value old = *address;
    *address = old < value ? value : old;
    return old;
}
template <class Value>
Value atomicMin(Value* address, cusim::Same<Value> value) {
    Value old = *address;
    *address = value < old ? value : old;
    return old;
}
template <class Value>
Value atomicExch(Value* address, cusim::Same<Value> value) {
    Value old = *address;
    *address = value;
    return old;
}
template <class Value>
Value atomicCAS(Value* address, cusim::Same<Value> compare, cusim::Same<Value> value) {
    Value old = *address;
    if (old == compare) *address = value;
    return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

inline size_t __cvta_generic_to_shared(const void* address) { return reinterpret_cast<size_t>(address); }
template <class Value>
Value __ldg(const Value* address) {
    return *address;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a < b ? b : a; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a < b ? b : a; }
inline size_t min(size_t a, size_t b) { return a < b ? a : b; }
inline size_t max(size_t a, size_t b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline bool isfinite(float value) { return __builtin_isfinite(value); }
inline bool isinf(float value) { return __builtin_isinf(value); }
inline bool isnan(float value) { return __builtin_isnan(value); }

template <class To, class From>
To cusim_bit_cast(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
inline float __int_as_float(int bits) { return cusim_bit_cast<float>(bits); }
inline int __float_as_int(float value) { return cusim_bit_cast<int>(value); }
inline float __uint_as_float(unsigned bits) { return cusim_bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return cusim_bit_cast<unsigned>(value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

// The fast ones are as exact here as libm: a tolerance must not count on that.
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Never contracted with a neighbour; the volatile keeps GCC from doing so.
inline float __fmul_rn(float a, float b) {
    volatile float product = a * b;
    return product;
}
inline float __fadd_rn(float a, float b) {
    volatile float sum = a + b;
    return sum;
}
inline float __fsub_rn(float a, float b) {
    volatile float difference = a - b;
    return difference;
}
inline float __fdiv_rn(float a, float b) { return a / b; }
