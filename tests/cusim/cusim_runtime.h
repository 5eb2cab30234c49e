// What the parts of the runtime share; kernels do not see it.
#pragma once
#include <string>
#include <vector>

#include "cusim.h"

namespace cusim {

// The order in which blocks are run, and the threads of a block take turns. `random` draws a new order each turn.
enum class Order : uint32_t { forward, reverse, random };

// As harness.py packs it.
struct LaunchShape {
    uint32_t grid[3];
    uint32_t num_threads;
    uint32_t smem_bytes;
    uint32_t order;
};

// Runs a kernel; returns an empty text, or why the launch failed.
std::string launch(const Entry& entry, const LaunchShape& shape, const char* kinds, void* const* arguments);

// 16 bytes on their way to shared memory.
struct Copy {
    void* destination;
    unsigned char data[16];
    unsigned group;
};

// A CUDA thread.
struct Fiber {
    enum class State { runnable, at_block_barrier, at_warp_collective, returned };

    char* stack = nullptr;
    void* stack_pointer = nullptr;
    State state = State::runnable;
    uint3 thread_index{};
    unsigned warp_idx = 0, lane = 0;
    std::vector<Copy> copies;  // in the order of their groups
    unsigned num_committed_groups = 0;
};

extern Fiber* current;

}  // namespace cusim
