// Follows addresses through memory: one thread, the last round counts.
#include "common/prims.cuh"
#include "clocks.cuh"

struct ChaseParams {
    const uint64_t* first;   // where the address of the next one stands, in a ring
    uint64_t* out;           // clocks, and where it ended
    uint32_t steps;
    uint32_t rounds;
};

KERNEL(chase, ChaseParams, 32, 1) {
    if (thread_index() != 0) {
        return;
    }
    uint64_t at = reinterpret_cast<uint64_t>(p.first);
    uint64_t begin = 0;
    KEEP_LOOP for (uint32_t round = 0; round < p.rounds; ++round) {
        begin = clocks();
        KEEP_LOOP for (uint32_t i = 0; i < p.steps; ++i) {
            asm volatile("ld.global.u64 %0, [%0];" : "+l"(at)::"memory");
        }
    }
    p.out[0] = clocks() - begin;
    p.out[1] = at;
}
