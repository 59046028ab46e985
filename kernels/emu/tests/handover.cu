// Every block adds its part to device memory, and the last to arrive adds up all parts: what orders
// the parts before their reader is one counter.
#include "common/prims.cuh"

constexpr uint32_t NUM_THREADS = 64;

struct HandoverParams {
    float* parts;
    uint32_t* arrivals;
    float* sums;
};

KERNEL(handover, HandoverParams, NUM_THREADS, 1) {
    uint32_t* is_last = reinterpret_cast<uint32_t*>(shared_memory());
    const uint32_t thread = thread_index();
    p.parts[block_index() * NUM_THREADS + thread] = static_cast<float>(block_index() * thread);
    barrier_all();
    if (thread == 0) {
        *is_last = atomic_add_acq_rel(p.arrivals, 1) == num_blocks() - 1;
    }
    barrier_all();
    if (*is_last == 0) {
        return;
    }
    float sum = 0.0f;
    for (uint32_t block = 0; block < num_blocks(); block++) {
        sum += p.parts[block * NUM_THREADS + thread];
    }
    p.sums[thread] = sum;
    if (thread == 0) {
        *p.arrivals = 0;
    }
}
