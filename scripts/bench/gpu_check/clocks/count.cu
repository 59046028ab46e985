// What a block does that shares outputs: leaves sums, counts itself, learns whether it is the last one.
#include "common/prims.cuh"
#include "clocks.cuh"

constexpr uint32_t THREADS = 256;

struct CountParams {
    Uint4* sums;          // one a thread of the grid
    uint32_t* counters;   // 32 words a block
    uint64_t* out;        // clocks a block
    uint32_t rounds;
    uint32_t unused;
};

KERNEL(count, CountParams, THREADS, 1) {
    uint32_t* seen = reinterpret_cast<uint32_t*>(shared_memory());
    uint32_t all = 0;
    const uint64_t begin = clocks();
    KEEP_LOOP for (uint32_t round = 0; round < p.rounds; ++round) {
        p.sums[block_index() * THREADS + thread_index()] = Uint4{round, all, 0, 0};
        barrier_all();
        if (thread_index() == 0) {
            *seen = atomic_add_acq_rel(p.counters + block_index() * 32, 1);
        }
        barrier_all();
        all += *seen;
    }
    if (thread_index() == 0) {
        p.out[block_index()] = clocks() - begin;
    }
}
