// Writes words that differ, as a product in front of the attention writes keys and values, while the kernel behind it may
// have begun.
#include "common/prims.cuh"

constexpr uint32_t NUM_THREADS = 64;

struct RefillParams {
    const uint32_t* from;
    uint32_t* to;
    uint32_t num_words;
    uint32_t unused;
};

KERNEL(refill, RefillParams, NUM_THREADS, 1) {
    grid_wait();
    grid_launch_dependents();
    const uint32_t stride = num_blocks() * NUM_THREADS;
    for (uint32_t i = block_index() * NUM_THREADS + thread_index(); i < p.num_words; i += stride) {
        if (p.to[i] != p.from[i]) {
            p.to[i] = p.from[i];
        }
    }
}
