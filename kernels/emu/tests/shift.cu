// Each block writes its part of one buffer to the next, shifted by one thread through shared
// memory, plus one: a chain of launches, each of which depends on all of the one before.
#include "common/prims.cuh"

constexpr uint32_t NUM_THREADS = 64;

struct ShiftParams {
    const uint32_t* from;
    uint32_t* to;
};

KERNEL(shift, ShiftParams, NUM_THREADS, 1) {
    uint32_t* words = reinterpret_cast<uint32_t*>(shared_memory());
    // The words of another block's part, or the chain would hold without grid_wait.
    const uint32_t other = (block_index() + 1) % num_blocks();
    grid_wait();
    words[thread_index()] = p.from[other * NUM_THREADS + thread_index()];
    grid_launch_dependents();
    barrier_all();
    const uint32_t neighbour = words[(thread_index() + 1) % NUM_THREADS];
    p.to[block_index() * NUM_THREADS + thread_index()] = neighbour + 1;
}
