// What sm_90 does beside a block's threads: barriers in shared memory, the copy engine, the products of warpgroups.
// Named barriers, which are older, are here because only its kernels use them.
#include <immintrin.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>

#include "cusim_ptx.h"
#include "cusim_runtime.h"

namespace cusim {
namespace {

template <class... Values>
std::string text_of(const char* format, Values... values) {
    char text[256];
    snprintf(text, sizeof text, format, values...);
    return text;
}

// In shared memory everything lies in rows of 128 bytes. The swizzle exchanges the 16-byte chunks of a row by the row's
// number modulo 8, so that it begins anew every 1024 bytes.
constexpr unsigned ROW_BYTES = 128, CHUNK_BYTES = 16, SWIZZLE_BYTES = 1024;

// The place of a byte within rows. The hardware exchanges by bits 7 to 9 of the address; the rows begin at a multiple
// of 1024, so that they are the place's.
unsigned swizzled(unsigned place) { return place ^ (place >> 3 & 0x70); }

// ---- A block's state ---------------------------------------------------------------------------------------------

struct Mbarrier final : Event {
    unsigned address;
    int num_arrivals;        // of each phase
    int num_pending;         // arrivals, in this phase
    long long num_bytes = 0;  // that are expected and have not come; negative if they came first
    unsigned parity = 0;

    std::string state() const {
        return text_of("the mbarrier at shared memory + 0x%x, which lacks %d of %d arrivals and %lld bytes", address,
                       num_pending, num_arrivals, num_bytes);
    }
    std::string describe() const override { return text_of("for parity %u of ", parity) + state(); }
};

struct NamedBarrier final : Event {
    int index, num_threads, line;
    const char* file;

    std::string describe() const override {
        return text_of("at barrier %d for %d threads in all, at %s:%d", index, num_threads, file, line);
    }
};

// Part of a matrix, 128 bytes by box_rows rows of box_planes planes, and where it lies in shared memory.
struct Box {
    MatrixMap matrix;
    int64_t column, row, plane;
    unsigned char* smem;

    size_t num_bytes() const { return size_t{matrix.box_planes} * matrix.box_rows * ROW_BYTES; }
    bool overlaps(const Box& other) const {
        return smem < other.smem + other.num_bytes() && other.smem < smem + num_bytes();
    }

    // Calls `move(address in shared memory, address in the matrix, num_bytes)` for all that is inside the matrix.
    template <class Move>
    void for_each_piece(Move move) const {
        for (unsigned i = 0; i < matrix.box_planes * matrix.box_rows; ++i) {
            auto from_plane = plane + i / matrix.box_rows, from_row = row + i % matrix.box_rows;
            if (from_plane < 0 || from_plane >= static_cast<int64_t>(matrix.num_planes)) continue;
            if (from_row < 0 || from_row >= static_cast<int64_t>(matrix.num_rows)) continue;
            for_each_piece_of_row(i, from_row * static_cast<int64_t>(matrix.num_planes) + from_plane, move);
        }
    }

private:
    // Of a row of the box, and that of a plane: planes lie side by side.
    template <class Move>
    void for_each_piece_of_row(unsigned box_row, int64_t plane_row, Move move) const {
        int64_t element_bytes = matrix.element_bytes, chunk_elements = CHUNK_BYTES / element_bytes;
        auto num_columns = static_cast<int64_t>(matrix.num_columns);
        for (unsigned chunk = 0; chunk < ROW_BYTES / CHUNK_BYTES; ++chunk) {
            int64_t begin = column + chunk * chunk_elements;
            int64_t first = std::max(begin, int64_t{0}), end = std::min(begin + chunk_elements, num_columns);
            if (first >= end) continue;
            move(smem + swizzled(box_row * ROW_BYTES + chunk * CHUNK_BYTES) + (first - begin) * element_bytes,
                 matrix.data + (plane_row * num_columns + first) * element_bytes,
                 static_cast<size_t>((end - first) * element_bytes));
        }
    }
};

struct Load {
    Box box;
    Mbarrier* barrier;
};

struct Store {
    Box box;
    const Fiber* thread;
    bool is_committed;
    std::unique_ptr<unsigned char[]> snapshot;
};

constexpr unsigned WARPGROUP_SIZE = 128;
// Operands are read in elements of 16 bits. One of tf32 is two, one after the other along k: its lower and its upper half.
constexpr unsigned WGMMA_M = 64, WGMMA_K = 16, MAX_WGMMA_N = 128;
constexpr unsigned CHUNK_ELEMENTS = CHUNK_BYTES / sizeof(uint16_t), ROW_ELEMENTS = ROW_BYTES / sizeof(uint16_t);

// What the threads' registers will be when its products have been waited for.
struct Accumulator {
    float* registers[WARPGROUP_SIZE] = {};  // of the threads that have given them
    unsigned num_products = 0;              // under way
    unsigned num_columns;
    alignas(32) float values[WGMMA_M][MAX_WGMMA_N];

    unsigned num_registers() const { return WGMMA_M * num_columns / WARPGROUP_SIZE; }
};

struct LeftOperand {
    uint16_t values[WGMMA_M][WGMMA_K];
};
struct RightOperand {
    uint16_t values[WGMMA_K][MAX_WGMMA_N];
};

struct Product {
    Wgmma wgmma;
    unsigned group;
    Accumulator* accumulator;
    LeftOperand a;
    RightOperand b;
};

// Its threads issue products without waiting for each other: what the first gives, the others must give, too. They meet
// at the wait.
struct Warpgroup final : Event {
    unsigned index;
    int num_pending_groups;  // that they wait for
    struct {
        unsigned num_products = 0, num_groups = 0;
        bool is_fenced = false;  // since its accumulators were last its own
    } threads[WARPGROUP_SIZE];
    std::deque<Product> products;
    unsigned num_finished = 0;
    std::vector<std::unique_ptr<Accumulator>> accumulators;

    std::string describe() const override { return text_of("in wgmma_wait for all of warpgroup %u", index); }
};

constexpr int NUM_NAMED_BARRIERS = 16;

struct Engines {
    std::map<const void*, Mbarrier> mbarriers;
    NamedBarrier named_barriers[NUM_NAMED_BARRIERS];
    std::vector<Load> loads;
    std::vector<Store> stores;
    std::map<unsigned, Warpgroup> warpgroups;
};

Engines engines;

// ---- mbarrier ----------------------------------------------------------------------------------------------------

// What an initialised barrier's word holds here, as far as a kernel leaves it alone.
constexpr unsigned long long MBARRIER_WORD = 0xcb7d1f5ea36b9204;

void check_mbarrier_place(const char* name, const void* barrier) {
    if (!is_shared(barrier, sizeof MBARRIER_WORD)) fail("%s: the barrier is not in shared memory", name);
    if (reinterpret_cast<size_t>(barrier) % sizeof MBARRIER_WORD != 0) {
        fail("%s: the barrier is not aligned to 8 bytes", name);
    }
}

Mbarrier& find_mbarrier(const char* name, const unsigned long long* barrier) {
    check_mbarrier_place(name, barrier);
    auto found = engines.mbarriers.find(barrier);
    if (found == engines.mbarriers.end()) {
        fail("%s: the barrier at shared memory + 0x%x is not initialised", name, shared_address(barrier));
    }
    if (*barrier != MBARRIER_WORD) {
        fail("%s: the barrier at shared memory + 0x%x was overwritten", name, shared_address(barrier));
    }
    return found->second;
}

void end_phase_if_complete(Mbarrier& barrier) {
    if (barrier.num_pending > 0 || barrier.num_bytes != 0) return;
    barrier.num_pending = barrier.num_arrivals;
    barrier.parity ^= 1;
    release(barrier);
}

// ---- Copies ------------------------------------------------------------------------------------------------------

Box box_of(const char* name, const TensorMap& map, unsigned num_dimensions, int column, int row, int plane, const void* smem) {
    auto* bytes = const_cast<unsigned char*>(static_cast<const unsigned char*>(smem));
    Box box{read_argument<MatrixMap>(&map), column, row, plane, bytes};
    if (box.matrix.num_dimensions != num_dimensions) {
        fail("%s: the tensor map has %u dimensions", name, box.matrix.num_dimensions);
    }
    if (!is_shared(smem, box.num_bytes())) {
        fail("%s: the box of %zu bytes is not in shared memory", name, box.num_bytes());
    }
    if (reinterpret_cast<size_t>(smem) % SWIZZLE_BYTES != 0) {
        fail("%s: the box is not aligned to %u bytes", name, SWIZZLE_BYTES);
    }
    return box;
}

// ---- wgmma -------------------------------------------------------------------------------------------------------

Warpgroup& warpgroup_of_thread(const char* name) {
    unsigned index = thread_index.x / WARPGROUP_SIZE;
    if ((index + 1) * WARPGROUP_SIZE > block_dim.x) {
        fail("%s: needs a warpgroup, 128 threads from a multiple of 128 on", name);
    }
    Warpgroup& group = engines.warpgroups[index];
    group.index = index;
    return group;
}

// PTX ISA, matrix descriptor of wgmma: address, leading and stride offset in units of 16 bytes, base offset, swizzle.
// Here always rows of 128 bytes, swizzled, one after another.
struct Descriptor {
    unsigned address, leading_offset;
};

Descriptor decode_descriptor(const char* name, unsigned long long descriptor) {
    auto bits = [=](int first, int count) { return static_cast<unsigned>(descriptor >> first & ((1u << count) - 1)); };
    if (bits(14, 2) | bits(30, 2) | bits(46, 3) | bits(52, 10)) {
        fail("wgmma: descriptor %s is %#llx, whose unused bits are not zero", name, descriptor);
    }
    unsigned stride = bits(32, 14) * 16, base_offset = bits(49, 3), swizzle = bits(62, 2);
    if (swizzle != 1 || stride != SWIZZLE_BYTES || base_offset != 0) {
        fail("wgmma: descriptor %s has swizzle mode %u, stride %u, base offset %u, which are to be 1, 1024, 0", name,
             swizzle, stride, base_offset);
    }
    return {bits(0, 14) * 16, bits(16, 14) * 16};
}

const unsigned char* operand_rows(const char* name, unsigned address, unsigned num_rows) {
    const unsigned char* rows = shared_pointer(address);
    if (!is_shared(rows, num_rows * ROW_BYTES)) {
        fail("wgmma: operand %s at 0x%x is not in shared memory", name, address);
    }
    return rows;
}

// Rows of K: 32 bytes of each, from the address' place in the first on. Calls `move(row, first k, chunk)`.
template <class Move>
void read_rows_of_k(const char* name, unsigned long long descriptor, unsigned num_rows, Move move) {
    unsigned address = decode_descriptor(name, descriptor).address, place = address % SWIZZLE_BYTES;
    if (place + WGMMA_K * sizeof(uint16_t) > ROW_BYTES) {
        fail("wgmma: descriptor %s points to byte %u of a swizzle's 1024; 32 bytes from there are not in its first row",
             name, place);
    }
    const unsigned char* rows = operand_rows(name, address - place, num_rows);
    for (unsigned row = 0; row < num_rows; ++row) {
        for (unsigned k = 0; k < WGMMA_K; k += CHUNK_ELEMENTS) {
            uint16_t chunk[CHUNK_ELEMENTS];
            memcpy(chunk, rows + swizzled(row * ROW_BYTES + place + k / CHUNK_ELEMENTS * CHUNK_BYTES), sizeof chunk);
            move(row, k, chunk);
        }
    }
}

void read_operand(const Wgmma& wgmma, LeftOperand& a) {
    read_rows_of_k("a", wgmma.a, WGMMA_M, [&](unsigned row, unsigned k, const uint16_t(&chunk)[CHUNK_ELEMENTS]) {
        memcpy(&a.values[row][k], chunk, sizeof chunk);
    });
}

void read_operand(const Wgmma& wgmma, RightOperand& b) {
    if (!wgmma.is_b_transposed) {
        auto move = [&](unsigned n, unsigned first_k, const uint16_t(&chunk)[CHUNK_ELEMENTS]) {
            for (unsigned i = 0; i < CHUNK_ELEMENTS; ++i) b.values[first_k + i][n] = chunk[i];
        };
        return read_rows_of_k("b", wgmma.b, wgmma.num_columns, move);
    }
    // 16 rows, one a k, of 64 columns; the next 64 columns are as far away as the leading offset says.
    auto [address, leading_offset] = decode_descriptor("b", wgmma.b);
    if (address % SWIZZLE_BYTES != 0 || (wgmma.num_columns > ROW_ELEMENTS && leading_offset % SWIZZLE_BYTES != 0)) {
        fail("wgmma: descriptor b has address 0x%x and leading offset %u, which are to be multiples of 1024", address,
             leading_offset);
    }
    for (unsigned n = 0; n < wgmma.num_columns; n += CHUNK_ELEMENTS) {
        const unsigned char* rows = operand_rows("b", address + n / ROW_ELEMENTS * leading_offset, WGMMA_K);
        for (unsigned k = 0; k < WGMMA_K; ++k) {
            unsigned chunk = n % ROW_ELEMENTS / CHUNK_ELEMENTS;
            memcpy(&b.values[k][n], rows + swizzled(k * ROW_BYTES + chunk * CHUNK_BYTES), CHUNK_BYTES);
        }
    }
}

// A thread's part: of 16 rows of its warp as of m16n8k16 (cusim_ptx.cpp).
void take_registers(const unsigned* registers, unsigned thread, LeftOperand& a) {
    unsigned lane = thread % WARP_SIZE;
    for (unsigned i = 0; i < 4; ++i) {
        memcpy(&a.values[thread / WARP_SIZE * 16 + lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8], &registers[i],
               sizeof registers[i]);
    }
}

template <class Operand>
void check_unchanged(const char* name, const Wgmma& wgmma, const Operand& before) {
    Operand now = before;  // for the columns that are not used
    read_operand(wgmma, now);
    if (memcmp(&now, &before, sizeof now) != 0) fail("wgmma: operand %s was changed before wgmma_wait", name);
}

bool is_same(const Wgmma& one, const Wgmma& other) {
    return one.type == other.type && one.num_columns == other.num_columns && one.a == other.a && one.b == other.b &&
           one.is_b_transposed == other.is_b_transposed && one.accumulate == other.accumulate &&
           (one.a_registers == nullptr) == (other.a_registers == nullptr);
}

// Among the accumulators under way; null for a thread's first product.
Accumulator* find_accumulator(const Warpgroup& group, unsigned thread, const float* registers) {
    for (const auto& accumulator : group.accumulators) {
        if (accumulator->registers[thread] == registers) return accumulator.get();
    }
    return nullptr;
}

// PTX ISA, wgmma.m64nNk16 and k8: d[i] of a thread is in row 16 * warp + lane / 4 + 8 * (i / 2 % 2), column
// 8 * (i / 4) + 2 * (lane % 4) + i % 2. Calls `move(register, value)` for all.
template <class Move>
void for_each_register(Accumulator& accumulator, unsigned thread, Move move) {
    unsigned lane = thread % WARP_SIZE, first_row = thread / WARP_SIZE * 16 + lane / 4, first_column = lane % 4 * 2;
    for (unsigned i = 0; i < accumulator.num_registers(); ++i) {
        move(accumulator.registers[thread][i],
             accumulator.values[first_row + i / 2 % 2 * 8][first_column + i / 4 * 8 + i % 2]);
    }
}

void widen(WgmmaType type, const uint16_t* narrow, float* wide, unsigned count) {
    if (type == WgmmaType::f16) {
        for (unsigned i = 0; i < count; i += 8) {
            _mm256_storeu_ps(wide + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(narrow + i))));
        }
    } else {
        for (unsigned i = 0; i < count; ++i) wide[i] = __uint_as_float(static_cast<unsigned>(narrow[i]) << 16);
    }
}

// The instruction's own order of additions is not specified; this one is k ascending, as that of mma in cusim_ptx.cpp.
void multiply(const Product& product) {
    alignas(32) float a[WGMMA_M][WGMMA_K], b[WGMMA_K][MAX_WGMMA_N];
    unsigned num_k = WGMMA_K;
    if (product.wgmma.type == WgmmaType::tf32) {
        num_k /= 2;
        auto join = [](uint16_t low, uint16_t high) { return widen_tf32(low | static_cast<unsigned>(high) << 16); };
        for (unsigned k = 0; k < num_k; ++k) {
            for (unsigned m = 0; m < WGMMA_M; ++m) a[m][k] = join(product.a.values[m][2 * k], product.a.values[m][2 * k + 1]);
            for (unsigned n = 0; n < product.wgmma.num_columns; ++n) {
                b[k][n] = join(product.b.values[2 * k][n], product.b.values[2 * k + 1][n]);
            }
        }
    } else {
        widen(product.wgmma.type, product.a.values[0], a[0], WGMMA_M * WGMMA_K);
        widen(product.wgmma.type, product.b.values[0], b[0], WGMMA_K * MAX_WGMMA_N);
    }
    float(&d)[WGMMA_M][MAX_WGMMA_N] = product.accumulator->values;
    if (!product.wgmma.accumulate) memset(d, 0, sizeof d);

    // Blocks of results that fit into registers.
    using Lanes = float __attribute__((vector_size(32), may_alias));
    constexpr unsigned BLOCK_M = 4, BLOCK_N = 2, LANES = sizeof(Lanes) / sizeof(float);
    for (unsigned first_m = 0; first_m < WGMMA_M; first_m += BLOCK_M) {
        for (unsigned first_n = 0; first_n < product.wgmma.num_columns; first_n += BLOCK_N * LANES) {
            Lanes sums[BLOCK_M][BLOCK_N];
            auto for_each = [&](auto action) {
#pragma GCC unroll 4
                for (unsigned m = 0; m < BLOCK_M; ++m) {
#pragma GCC unroll 2
                    for (unsigned n = 0; n < BLOCK_N; ++n) action(sums[m][n], first_m + m, first_n + n * LANES);
                }
            };
            for_each([&](Lanes& sum, unsigned m, unsigned n) { sum = reinterpret_cast<Lanes&>(d[m][n]); });
            for (unsigned k = 0; k < num_k; ++k) {
                for_each([&](Lanes& sum, unsigned m, unsigned n) {
                    sum += a[m][k] * reinterpret_cast<Lanes&>(b[k][n]);
                });
            }
            for_each([&](Lanes& sum, unsigned m, unsigned n) { reinterpret_cast<Lanes&>(d[m][n]) = sum; });
        }
    }
}

void give_back(Warpgroup& group, Accumulator& accumulator) {
    for (unsigned thread = 0; thread < WARPGROUP_SIZE; ++thread) {
        for_each_register(accumulator, thread, [](float& d, float value) {
            if (__float_as_uint(d) != 0xffffffff) fail("wgmma: an accumulator was written before wgmma_wait");
            d = value;
        });
        group.threads[thread].is_fenced = false;
    }
}

void finish_products(Warpgroup& group) {
    unsigned num_groups = group.threads[0].num_groups;
    for (const auto& thread : group.threads) {
        if (thread.num_products != group.num_finished + group.products.size() || thread.num_groups != num_groups) {
            fail("wgmma_wait: not all threads of the warpgroup have issued the same products and commits");
        }
    }
    auto num_unfinished = static_cast<unsigned>(group.num_pending_groups);
    while (!group.products.empty() && group.products.front().group + num_unfinished < num_groups) {
        const Product& product = group.products.front();
        if (product.wgmma.a_registers == nullptr) check_unchanged("a", product.wgmma, product.a);
        check_unchanged("b", product.wgmma, product.b);
        multiply(product);
        --product.accumulator->num_products;
        group.products.pop_front();
        ++group.num_finished;
    }
    auto is_done = [&](const std::unique_ptr<Accumulator>& accumulator) {
        if (accumulator->num_products > 0) return false;
        give_back(group, *accumulator);
        return true;
    };
    auto& accumulators = group.accumulators;
    accumulators.erase(std::remove_if(accumulators.begin(), accumulators.end(), is_done), accumulators.end());
}

}  // namespace

// ---- What a thread calls -----------------------------------------------------------------------------------------

void init_mbarrier(unsigned long long* barrier, int num_arrivals) {
    constexpr int MAX_ARRIVALS = (1 << 20) - 1;
    check_mbarrier_place("mbarrier.init", barrier);
    if (num_arrivals < 1 || num_arrivals > MAX_ARRIVALS) fail("mbarrier.init: %d arrivals", num_arrivals);
    auto [place, is_new] = engines.mbarriers.try_emplace(barrier);
    if (!is_new) fail("mbarrier.init: the barrier at shared memory + 0x%x is in use", shared_address(barrier));
    *barrier = MBARRIER_WORD;
    place->second.address = shared_address(barrier);
    place->second.num_arrivals = place->second.num_pending = num_arrivals;
}

void arrive_at_mbarrier(unsigned long long* address, int num_bytes) {
    Mbarrier& barrier = find_mbarrier("mbarrier.arrive", address);
    if (num_bytes < 0) fail("mbarrier.arrive: expects %d bytes", num_bytes);
    if (barrier.num_pending == 0) {
        fail("mbarrier.arrive: all %d arrivals of the phase have come at shared memory + 0x%x, but not %lld bytes",
             barrier.num_arrivals, barrier.address, barrier.num_bytes);
    }
    barrier.num_bytes += num_bytes;
    --barrier.num_pending;
    end_phase_if_complete(barrier);
}

bool poll_mbarrier(unsigned long long* address, unsigned parity) {
    Mbarrier& barrier = find_mbarrier("mbarrier.try_wait", address);
    if (parity > 1) fail("mbarrier.try_wait: parity %u", parity);
    bool has_ended = barrier.parity != parity, asks_again = current->polled == &barrier;
    current->polled = has_ended || asks_again ? nullptr : &barrier;
    if (has_ended || !asks_again) return has_ended;
    join(barrier);
    give_up_turn();
    return barrier.parity != parity;  // by now another phase may have ended, too
}

void wait_at_named_barrier(int barrier_idx, int num_threads, const char* file, int line) {
    if (barrier_idx < 1 || barrier_idx >= NUM_NAMED_BARRIERS) {
        fail("bar.sync: barrier %d; there are 1 to 15, and 0 is __syncthreads'", barrier_idx);
    }
    if (num_threads <= 0 || num_threads % int{WARP_SIZE} != 0 || num_threads > static_cast<int>(block_dim.x)) {
        fail("bar.sync: %d threads, which is not a number of whole warps of the block", num_threads);
    }
    NamedBarrier& barrier = engines.named_barriers[barrier_idx];
    if (!barrier.waiting.empty() && barrier.num_threads != num_threads) {
        fail("bar.sync: barrier %d for %d threads, while others wait there for %d", barrier_idx, num_threads,
             barrier.num_threads);
    }
    barrier.index = barrier_idx;
    barrier.num_threads = num_threads;
    barrier.file = file;
    barrier.line = line;
    join(barrier);
    if (static_cast<int>(barrier.waiting.size()) == num_threads) {
        std::map<unsigned, unsigned> num_lanes;
        for (const Fiber* fiber : barrier.waiting) ++num_lanes[fiber->warp_idx];
        for (auto [warp_idx, count] : num_lanes) {
            if (count != WARP_SIZE) fail("bar.sync: barrier %d has %u lanes of warp %u", barrier_idx, count, warp_idx);
        }
        release(barrier);
    }
    give_up_turn();
}

size_t start_load(
    const char* name, void* smem, const TensorMap& map, unsigned num_dimensions, int column, int row, int plane,
    unsigned long long* barrier) {
    Load load{box_of(name, map, num_dimensions, column, row, plane, smem), &find_mbarrier(name, barrier)};
    for (const Load& other : engines.loads) {
        if (load.box.overlaps(other.box)) fail("%s: an earlier copy to the same place is still under way", name);
    }
    engines.loads.push_back(load);
    return load.box.num_bytes();
}

Snapshot start_store(const TensorMap& map, int column, int row, const void* smem) {
    Box box = box_of("tma_store_2d", map, 2, column, row, 0, smem);
    engines.stores.push_back({box, current, false, std::make_unique<unsigned char[]>(box.num_bytes())});
    return {engines.stores.back().snapshot.get(), box.num_bytes()};
}

void commit_stores() {
    for (Store& store : engines.stores) store.is_committed |= store.thread == current;
}

void wait_for_stores() {
    auto finish = [](const Store& store) {
        if (store.thread != current || !store.is_committed) return false;
        store.box.for_each_piece([&](const unsigned char* smem, unsigned char* address, size_t num_bytes) {
            if (memcmp(smem, &store.snapshot[static_cast<size_t>(smem - store.box.smem)], num_bytes) != 0) {
                fail("tma_store_2d: shared memory + 0x%x was changed before bulk_wait_read", shared_address(smem));
            }
            memcpy(address, smem, num_bytes);
        });
        return true;
    };
    engines.stores.erase(std::remove_if(engines.stores.begin(), engines.stores.end(), finish), engines.stores.end());
}

void start_wgmma(const Wgmma& wgmma, float* d) {
    Warpgroup& group = warpgroup_of_thread("wgmma");
    unsigned thread = thread_index.x % WARPGROUP_SIZE;
    auto& state = group.threads[thread];
    Accumulator* under_way = find_accumulator(group, thread, d);
    unsigned product_idx = state.num_products++ - group.num_finished;
    if (product_idx == group.products.size()) {
        Accumulator* accumulator = under_way;
        if (accumulator == nullptr) {
            group.accumulators.push_back(std::make_unique<Accumulator>());
            accumulator = group.accumulators.back().get();
            accumulator->num_columns = wgmma.num_columns;
        }
        ++accumulator->num_products;
        group.products.push_back({wgmma, state.num_groups, accumulator, {}, {}});
        if (wgmma.a_registers == nullptr) read_operand(wgmma, group.products.back().a);
        read_operand(wgmma, group.products.back().b);
    }
    Product& product = group.products[product_idx];
    Accumulator& accumulator = *product.accumulator;
    bool is_first_on_it = accumulator.registers[thread] == nullptr;
    if (!is_same(product.wgmma, wgmma) || product.group != state.num_groups ||
        accumulator.num_columns != wgmma.num_columns || under_way != (is_first_on_it ? nullptr : &accumulator)) {
        fail("wgmma: not the product, of the same operands, that other threads of the warpgroup have issued");
    }
    if (wgmma.a_registers != nullptr) take_registers(wgmma.a_registers, thread, product.a);
    if (is_first_on_it) {
        if (!state.is_fenced) fail("wgmma: no wgmma_fence since the accumulator was last the thread's own");
        accumulator.registers[thread] = d;
        for_each_register(accumulator, thread, [](float& d, float& value) { value = d; });
        memset(d, 0xff, accumulator.num_registers() * sizeof *d);
    }
}

void fence_wgmma() { warpgroup_of_thread("wgmma_fence").threads[thread_index.x % WARPGROUP_SIZE].is_fenced = true; }

void commit_wgmma() { ++warpgroup_of_thread("wgmma_commit").threads[thread_index.x % WARPGROUP_SIZE].num_groups; }

void wait_for_wgmma(int num_pending_groups) {
    Warpgroup& group = warpgroup_of_thread("wgmma_wait");
    if (!group.waiting.empty() && group.num_pending_groups != num_pending_groups) {
        fail("wgmma_wait: %d groups may be pending, but %d for other threads of the warpgroup", num_pending_groups,
             group.num_pending_groups);
    }
    group.num_pending_groups = num_pending_groups;
    join(group);
    if (group.waiting.size() == WARPGROUP_SIZE) {
        finish_products(group);
        release(group);
    }
    give_up_turn();
}

// ---- What the scheduler calls ------------------------------------------------------------------------------------

void begin_engines() { engines = Engines{}; }

bool let_copy_arrive() {
    auto& loads = engines.loads;
    if (loads.empty()) return false;
    // The engine promises no order.
    auto count = static_cast<unsigned>(loads.size());
    unsigned index = launch_order() == Order::reverse ? count - 1 : 0;
    if (launch_order() == Order::random) index = random_below(count);
    auto [box, barrier] = loads[index];
    loads.erase(loads.begin() + index);
    memset(box.smem, 0, box.num_bytes());
    box.for_each_piece([](unsigned char* smem, const unsigned char* address, size_t num_bytes) {
        memcpy(smem, address, num_bytes);
    });
    // What is outside the matrix counts, too.
    barrier->num_bytes -= static_cast<long long>(box.num_bytes());
    end_phase_if_complete(*barrier);
    return true;
}

void end_thread() {
    for (const Store& store : engines.stores) {
        if (store.thread == current) fail("returns after a tma_store_2d without bulk_commit and bulk_wait_read");
    }
}

std::string end_engines() {
    std::string block = text_of("block (%u, %u, %u) ended ", block_index.x, block_index.y, block_index.z);
    size_t num_loads = engines.loads.size();
    if (num_loads > 0) return block + text_of("with %zu copies by tma_load_2d under way", num_loads);
    for (const auto& [place, barrier] : engines.mbarriers) {
        if (barrier.num_bytes != 0) return block + "with " + barrier.state();
    }
    return "";
}

}  // namespace cusim
