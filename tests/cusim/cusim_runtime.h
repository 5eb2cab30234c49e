// What the parts of the runtime share; kernels do not see it.
#pragma once
#include <string>
#include <vector>

#include "cusim.h"

namespace cusim {

// The order in which blocks are run, and the threads of a block take turns. `random` draws a new order each turn, and
// the warps that sit it out.
enum class Order : uint32_t { forward, reverse, random };

// As harness.py packs it.
struct LaunchShape {
    uint32_t grid[3];
    uint32_t num_threads;
    uint32_t smem_bytes;
    uint32_t order;
};

// What a TensorMap holds here, as harness.py packs it: a matrix without gaps whose rows are divided into planes, and how high
// and how deep a box of 128 bytes width is.
struct MatrixMap {
    unsigned char* data;
    uint64_t num_rows, num_columns, num_planes;  // columns of a plane
    uint32_t element_bytes, box_rows, box_planes;
    uint32_t num_dimensions;  // 2, or 3 with planes
};
constexpr size_t TENSOR_MAP_BYTES = 128;

// Runs a kernel; returns an empty text, or why the launch failed.
std::string launch(const Entry& entry, const LaunchShape& shape, const char* kinds, void* const* arguments);

// 16 bytes on their way to shared memory.
struct Copy {
    void* destination;
    unsigned char data[16];
    unsigned group;
};

struct Fiber;

// What threads wait for when it is neither their block nor lanes of their warp.
struct Event {
    std::vector<Fiber*> waiting;

    // "for ..." or "at ...", in the report of a deadlock.
    virtual std::string describe() const = 0;

protected:
    ~Event() = default;
};

// A CUDA thread.
struct Fiber {
    enum class State { runnable, at_block_barrier, at_warp_collective, at_event, returned };

    char* stack = nullptr;
    void* stack_pointer = nullptr;
    State state = State::runnable;
    uint3 thread_index{};
    unsigned warp_idx = 0, lane = 0;
    std::vector<Copy> copies;  // in the order of their groups
    unsigned num_committed_groups = 0;
    const Event* event = nullptr;   // that it waits for
    const Event* polled = nullptr;  // that it has just been told had not happened
};

extern Fiber* current;

// The running thread joins those who wait, up to `release`; it goes on until it gives up its turn.
void join(Event& event);
void release(Event& event);
void give_up_turn();

Order launch_order();
// The next of the launch's random numbers, which are the same each time.
unsigned random_below(unsigned count);

// ---- What cusim_sm90.cpp does of a block, outside of its threads -------------------------------------------------

void begin_engines();
// One of the copies under way arrives; false if there is none.
bool let_copy_arrive();
// When the running thread, or the whole block, has returned: what must not be under way then fails the launch.
void end_thread();
// An empty text if the block may end.
std::string end_engines();

}  // namespace cusim
