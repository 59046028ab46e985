// The largest blocks there are: each adds up its thread indices through all warps.
#include "common/prims.cuh"

constexpr uint32_t NUM_THREADS = 1024;

struct WideParams {
    uint32_t* sums;
};

KERNEL(wide, WideParams, NUM_THREADS, 1) {
    uint32_t* parts = reinterpret_cast<uint32_t*>(shared_memory());
    const uint32_t sum = warp_sum(thread_index() + block_index());
    if (lane_index() == 0) {
        parts[warp_index()] = sum;
    }
    barrier_all();
    const uint32_t total = warp_sum(parts[lane_index()]);
    if (thread_index() == NUM_THREADS - 1) {
        p.sums[block_index()] = total;
    }
}
