// The runtime of cusim: fibers, barriers, shared memory and the loop over blocks and threads.
#include "cusim.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cusim_runtime.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// Saves the callee-saved registers on the stack and the stack pointer in *from, and goes on where `to` was saved.
extern "C" void cusim_switch(void** from, void* to);
asm(R"(
    .text
    .type cusim_switch, @function
    .hidden cusim_switch
    .globl cusim_switch
cusim_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size cusim_switch, . - cusim_switch
)");

namespace cusim {

uint3 thread_index, block_index;
dim3 block_dim, grid_dim;
void* dynamic_shared_base = nullptr;
Fiber* current = nullptr;

namespace {

constexpr size_t PAGE_BYTES = 4096;
// Pages that a thread never touches cost nothing.
constexpr size_t STACK_BYTES = 256 * 1024;
constexpr unsigned NUM_SAVED_REGISTERS = 6;
// Stacks begin at unlike offsets: at like ones, all threads' frames would compete for the same few sets of the caches.
constexpr size_t STACK_STAGGER_BYTES = 576, MAX_STAGGER_BYTES = 64 * 1024;

// Lanes of a warp that wait for each other.
struct Meeting {
    uint32_t mask = 0;  // 0: nobody waits
    uint32_t arrived = 0;
    Combine combine = nullptr;
    const char* name = nullptr;
    void* arguments[WARP_SIZE];
};

struct Warp {
    uint32_t live = 0;
    Fiber* lanes[WARP_SIZE] = {};
    // This turn: in a random order, so that warps get ahead of each other by more than a turn.
    bool sits_out = false;
    // By the lowest lane of the mask: groups that meet apart are disjoint.
    Meeting meetings[WARP_SIZE];
};

struct Run {
    const Entry* entry;
    void* const* arguments;
    Order order;
    size_t smem_bytes;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Warp> warps;
    size_t num_live = 0, num_at_barrier = 0;
    // Of the barrier that they wait at.
    const char* barrier_file = nullptr;
    int barrier_line = 0;
    void* scheduler_stack_pointer = nullptr;
    uint32_t random_state = 1;
    std::string error;
};

Run* run = nullptr;

// ---- Switching ---------------------------------------------------------------------------------------------------

#ifdef __SANITIZE_ADDRESS__
// The sanitizer must know which stack is in use.
const void* scheduler_stack;
size_t scheduler_stack_bytes;

void enter(Fiber& fiber) {
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, fiber.stack, STACK_BYTES);
    cusim_switch(&run->scheduler_stack_pointer, fiber.stack_pointer);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}
void leave(Fiber& fiber) {
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, scheduler_stack, scheduler_stack_bytes);
    cusim_switch(&fiber.stack_pointer, run->scheduler_stack_pointer);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}
void begin() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes); }
// Frames of a thread that was left in the middle of a failed launch are still marked.
void clean_stack(Fiber& fiber) { ASAN_UNPOISON_MEMORY_REGION(fiber.stack + PAGE_BYTES, STACK_BYTES - PAGE_BYTES); }
#else
void enter(Fiber& fiber) { cusim_switch(&run->scheduler_stack_pointer, fiber.stack_pointer); }
void leave(Fiber& fiber) { cusim_switch(&fiber.stack_pointer, run->scheduler_stack_pointer); }
void begin() {}
void clean_stack(Fiber&) {}
#endif

void resume(Fiber& fiber) {
    current = &fiber;
    thread_index = fiber.thread_index;
    enter(fiber);
}

// ---- Barriers ----------------------------------------------------------------------------------------------------

void open_barrier_if_complete() {
    if (run->num_at_barrier == 0 || run->num_at_barrier < run->num_live) return;
    run->num_at_barrier = 0;
    for (auto& fiber : run->fibers) {
        if (fiber->state == Fiber::State::at_block_barrier) fiber->state = Fiber::State::runnable;
    }
}

void end_meeting_if_complete(Warp& warp, Meeting& meeting) {
    uint32_t lanes = meeting.mask & warp.live;
    if (lanes == 0 || meeting.arrived != lanes) return;
    meeting.combine(meeting.arguments, lanes);
    meeting.mask = 0;
    for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
        if (lanes >> lane & 1) warp.lanes[lane]->state = Fiber::State::runnable;
    }
}

// Where a fiber begins; it is never returned from.
void thread_main() {
    begin();
    run->entry->invoke(run->arguments);
    end_thread();
    Fiber& fiber = *current;
    Warp& warp = run->warps[fiber.warp_idx];
    --run->num_live;
    warp.live &= ~(1u << fiber.lane);
    // Those who wait for this thread wait no longer.
    open_barrier_if_complete();
    for (Meeting& meeting : warp.meetings) {
        if (meeting.mask != 0) end_meeting_if_complete(warp, meeting);
    }
    fiber.state = Fiber::State::returned;
    leave(fiber);
    abort();
}

// ---- A block -----------------------------------------------------------------------------------------------------

// Not instrumented: the red zones between the arrays are written, too.
__attribute__((no_sanitize("address"))) void fill_shared() {
    for (char* byte = run->entry->static_shared_begin; byte != run->entry->static_shared_end; ++byte) *byte = '\xff';
    memset(dynamic_shared_base, 0xff, run->smem_bytes);
}

void start_threads() {
    run->num_live = run->fibers.size();
    run->num_at_barrier = 0;
    for (Warp& warp : run->warps) warp = Warp{};
    for (unsigned i = 0; i < run->fibers.size(); ++i) {
        Fiber& fiber = *run->fibers[i];
        fiber.state = Fiber::State::runnable;
        fiber.thread_index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
        fiber.warp_idx = i / WARP_SIZE;
        fiber.lane = i % WARP_SIZE;
        fiber.copies.clear();
        fiber.num_committed_groups = 0;
        fiber.polled = nullptr;
        run->warps[fiber.warp_idx].lanes[fiber.lane] = &fiber;
        run->warps[fiber.warp_idx].live |= 1u << fiber.lane;
        clean_stack(fiber);
        // As cusim_switch leaves a stack: saved registers, then the address to go on at. The word above it stands
        // for a caller's, so that the stack is aligned as at a call.
        char* end = fiber.stack + STACK_BYTES - i * STACK_STAGGER_BYTES % MAX_STAGGER_BYTES;
        void** top = reinterpret_cast<void**>(end);
        top[-1] = nullptr;
        top[-2] = reinterpret_cast<void*>(&thread_main);
        fiber.stack_pointer = top - 2 - NUM_SAVED_REGISTERS;
    }
}

void shuffle_items(std::vector<unsigned>& items) {
    for (unsigned i = static_cast<unsigned>(items.size()); i > 1; --i) std::swap(items[i - 1], items[random_below(i)]);
}

// 0 .. count - 1 in the launch's order.
std::vector<unsigned> in_order(unsigned count) {
    std::vector<unsigned> items(count);
    for (unsigned i = 0; i < count; ++i) items[i] = run->order == Order::reverse ? count - 1 - i : i;
    if (run->order == Order::random) shuffle_items(items);
    return items;
}

void report_deadlock() {
    char text[160];
    snprintf(text, sizeof text, "deadlock in block (%u, %u, %u):", block_index.x, block_index.y, block_index.z);
    run->error = text;
    if (run->num_at_barrier > 0) {
        snprintf(text, sizeof text, " %zu of %zu threads wait in __syncthreads at line %d;", run->num_at_barrier,
                 run->num_live, run->barrier_line);
        run->error += text;
    }
    for (unsigned warp_idx = 0; warp_idx < run->warps.size(); ++warp_idx) {
        for (const Meeting& meeting : run->warps[warp_idx].meetings) {
            if (meeting.mask == 0) continue;
            snprintf(text, sizeof text, " warp %u: lanes %#x wait in %s for lanes %#x;", warp_idx, meeting.arrived,
                     meeting.name, meeting.mask & run->warps[warp_idx].live & ~meeting.arrived);
            run->error += text;
        }
    }
    for (const auto& fiber : run->fibers) {
        if (fiber->state != Fiber::State::at_event || fiber->event->waiting.front() != fiber.get()) continue;
        size_t num_others = fiber->event->waiting.size() - 1;
        snprintf(text, sizeof text, num_others == 0 ? " thread %u waits " : " thread %u and %zu more wait ",
                 fiber->thread_index.x, num_others);
        run->error += text + fiber->event->describe() + ";";
    }
    run->error.pop_back();
}

// In a random order a copy arrives about once in so many turns of all threads; in the others when no thread can go on.
constexpr unsigned TURNS_OF_COPY = 4;

// False if the launch has failed.
bool run_block() {
    fill_shared();
    begin_engines();
    start_threads();
    std::vector<unsigned> turn = in_order(static_cast<unsigned>(run->fibers.size()));
    while (run->num_live > 0) {
        bool any_runnable = false;
        if (run->order == Order::random) {
            shuffle_items(turn);
            for (Warp& warp : run->warps) warp.sits_out = random_below(2) == 0;
        }
        for (unsigned i : turn) {
            Fiber& fiber = *run->fibers[i];
            if (fiber.state != Fiber::State::runnable) continue;
            any_runnable = true;
            if (run->warps[fiber.warp_idx].sits_out) continue;
            resume(fiber);
            if (!run->error.empty()) return false;
        }
        bool copy_arrives = !any_runnable || (run->order == Order::random && random_below(TURNS_OF_COPY) == 0);
        if (!(copy_arrives && let_copy_arrive()) && !any_runnable) {
            report_deadlock();
            return false;
        }
    }
    run->error = end_engines();
    return run->error.empty();
}

// ---- A launch ----------------------------------------------------------------------------------------------------

// Stacks are kept from launch to launch. The page below each is a guard.
char* take_stack(size_t index) {
    static std::vector<char*> stacks;
    while (stacks.size() <= index) {
        constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, FLAGS, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, PAGE_BYTES, PROT_NONE) != 0) abort();
        stacks.push_back(static_cast<char*>(stack));
    }
    return stacks[index];
}

void run_blocks() {
    for (unsigned i : in_order(grid_dim.x * grid_dim.y * grid_dim.z)) {
        block_index = {i % grid_dim.x, i / grid_dim.x % grid_dim.y, i / (grid_dim.x * grid_dim.y)};
        if (!run_block()) return;
    }
}

}  // namespace

void fail(const char* format, ...) {
    char text[512];
    int length = snprintf(text, sizeof text, "block (%u, %u, %u), thread (%u, %u, %u): ", block_index.x, block_index.y,
                          block_index.z, thread_index.x, thread_index.y, thread_index.z);
    va_list values;
    va_start(values, format);
    vsnprintf(text + length, sizeof text - static_cast<size_t>(length), format, values);
    va_end(values);
    run->error = text;
    leave(*current);
    abort();
}

void block_barrier(const char* file, int line) {
    if (run->num_at_barrier++ == 0) {
        run->barrier_file = file;
        run->barrier_line = line;
    } else if (line != run->barrier_line || strcmp(file, run->barrier_file) != 0) {
        fail("__syncthreads at %s:%d while other threads of the block wait at %s:%d", file, line, run->barrier_file,
             run->barrier_line);
    }
    current->state = Fiber::State::at_block_barrier;
    open_barrier_if_complete();
    // The last to come gives up its turn as the others did: who goes first after a barrier is the order's choice.
    leave(*current);
}

void warp_collective(const char* name, uint32_t mask, Combine combine, void* arguments) {
    Warp& warp = run->warps[current->warp_idx];
    uint32_t lane_bit = 1u << current->lane;
    if (!(mask & lane_bit)) fail("%s: the mask %#x does not name the calling lane %u", name, mask, current->lane);
    Meeting& meeting = warp.meetings[__builtin_ctz(mask)];
    if (meeting.mask == 0) {
        meeting.mask = mask;
        meeting.arrived = 0;
        meeting.combine = combine;
        meeting.name = name;
    } else if (meeting.mask != mask || meeting.combine != combine) {
        fail("%s with mask %#x while other lanes of the warp are in %s with mask %#x", name, mask, meeting.name,
             meeting.mask);
    }
    meeting.arrived |= lane_bit;
    meeting.arguments[current->lane] = arguments;
    current->state = Fiber::State::at_warp_collective;
    end_meeting_if_complete(warp, meeting);
    leave(*current);
}

void join(Event& event) {
    current->state = Fiber::State::at_event;
    current->event = &event;
    event.waiting.push_back(current);
}

void release(Event& event) {
    for (Fiber* fiber : event.waiting) fiber->state = Fiber::State::runnable;
    event.waiting.clear();
}

void give_up_turn() { leave(*current); }

Order launch_order() { return run->order; }

unsigned random_below(unsigned count) {
    run->random_state = run->random_state * 1664525u + 1013904223u;
    return static_cast<unsigned>(uint64_t{run->random_state} * count >> 32);
}

void combine_nothing(void* const (&)[WARP_SIZE], uint32_t) {}

void combine_ballot(void* const (&arguments)[WARP_SIZE], uint32_t lanes) {
    uint32_t result = 0;
    for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
        if (lanes >> lane & 1 && static_cast<Ballot*>(arguments[lane])->predicate) result |= 1u << lane;
    }
    for (unsigned lane = 0; lane < WARP_SIZE; ++lane) {
        if (lanes >> lane & 1) static_cast<Ballot*>(arguments[lane])->result = result;
    }
}

bool is_shared(const void* address, size_t num_bytes) {
    auto within = [=](const void* first, size_t size) {
        size_t offset = static_cast<size_t>(static_cast<const char*>(address) - static_cast<const char*>(first));
        return offset < size && num_bytes <= size - offset;
    };
    const char *begin = run->entry->static_shared_begin, *end = run->entry->static_shared_end;
    return within(begin, static_cast<size_t>(end - begin)) || within(dynamic_shared_base, run->smem_bytes);
}

namespace {

constexpr size_t SHARED_ALIGNMENT = 1024;

// The address of the first byte of static shared memory, and of dynamic.
size_t static_shared_address() { return reinterpret_cast<size_t>(run->entry->static_shared_begin) % SHARED_ALIGNMENT; }
size_t dynamic_shared_address() {
    auto num_bytes = static_cast<size_t>(run->entry->static_shared_end - run->entry->static_shared_begin);
    return (static_shared_address() + num_bytes + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
}

}  // namespace

unsigned shared_address(const void* address) {
    auto distance = [=](const void* first) {
        return static_cast<size_t>(static_cast<const char*>(address) - static_cast<const char*>(first));
    };
    bool is_static = address >= run->entry->static_shared_begin && address < run->entry->static_shared_end;
    return static_cast<unsigned>(is_static ? static_shared_address() + distance(run->entry->static_shared_begin)
                                           : dynamic_shared_address() + distance(dynamic_shared_base));
}

unsigned char* shared_pointer(unsigned address) {
    size_t dynamic = dynamic_shared_address();
    void* pointer = address < dynamic ? run->entry->static_shared_begin + (address - static_shared_address())
                                      : static_cast<char*>(dynamic_shared_base) + (address - dynamic);
    return static_cast<unsigned char*>(pointer);
}

namespace {

bool kinds_match(const char* passed, const char* taken) {
    if (strlen(passed) != strlen(taken)) return false;
    for (; *taken != 0; ++passed, ++taken) {
        bool any_pointer = *taken == 'p' && *passed >= '1' && *passed <= '8';
        if (*passed != *taken && !any_pointer) return false;
    }
    return true;
}

}  // namespace

std::string launch(const Entry& entry, const LaunchShape& shape, const char* kinds, void* const* arguments) {
    if (!kinds_match(kinds, entry.kinds)) {
        return std::string("the launch passes `") + kinds + "`, the kernel takes `" + entry.kinds +
               "` (a digit: pointer to elements of so many bytes, p: pointer to others, i: int, f: float, "
               "m: tensor map)";
    }
    if (shape.num_threads == 0 || shape.num_threads > 1024) return "a block has 1 to 1024 threads";
    Run launched{&entry, arguments, static_cast<Order>(shape.order), shape.smem_bytes, {}, {}};
    run = &launched;
    grid_dim = {shape.grid[0], shape.grid[1], shape.grid[2]};
    block_dim = {shape.num_threads, 1, 1};
    for (size_t i = 0; i < shape.num_threads; ++i) {
        launched.fibers.push_back(std::make_unique<Fiber>());
        launched.fibers.back()->stack = take_stack(i);
    }
    launched.warps.resize((shape.num_threads + WARP_SIZE - 1) / WARP_SIZE);
    // Exactly as long as asked, so that the sanitizer sees the first byte past it.
    if (posix_memalign(&dynamic_shared_base, SHARED_ALIGNMENT, shape.smem_bytes) != 0) return "no memory";
    run_blocks();
    free(dynamic_shared_base);
    dynamic_shared_base = nullptr;
    run = nullptr;
    return launched.error;
}

}  // namespace cusim

// For ctypes: null, or the error's text, valid until the next launch.
extern "C" const char* cusim_launch(
    const cusim::Entry* entry, const cusim::LaunchShape* shape, const char* kinds, void* const* arguments) {
    static std::string error;
    error = cusim::launch(*entry, *shape, kinds, arguments);
    return error.empty() ? nullptr : error.c_str();
}
