// A kernel between others: when it began, when the one in front had ended, when it let the next one begin, and its end.
// All blocks end together, as near as a counter tells them.
#include "common/prims.cuh"
#include "clocks.cuh"

constexpr uint32_t THREADS = 256;

struct LinkParams {
    uint64_t* out;         // 5 words a block: the multiprocessor, and those four
    uint32_t* arrivals;
    uint32_t spin;         // clocks from the trigger to where they meet
    uint32_t unused;
};

KERNEL(link, LinkParams, THREADS, 1) {
    const uint64_t first = clocks();
    grid_wait();
    const uint64_t awaited = clocks();
    grid_launch_dependents();
    const uint64_t triggered = clocks();
    while (clocks() - triggered < p.spin) {
    }
    if (thread_index() == 0) {
        const uint32_t ticket = atomic_add_acq_rel(p.arrivals, 1);
        const uint32_t all = (ticket / num_blocks() + 1) * num_blocks();
        while (load_volatile(p.arrivals) < all) {
        }
        uint64_t* out = p.out + block_index() * 5;
        out[0] = multiprocessor();
        out[1] = first;
        out[2] = awaited;
        out[3] = triggered;
        out[4] = clocks();
    }
}
