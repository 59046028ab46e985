// Each block copies the same bytes, which the L2 cache holds, to its shared memory, as activations come.
#include "common/prims.cuh"
#include "clocks.cuh"

constexpr uint32_t THREADS = 256;

struct DrawParams {
    const uint8_t* from;
    uint64_t* out;        // clocks a block
    uint32_t bytes;       // a power of two, STAGE_BYTES at least
    uint32_t rounds;
    uint32_t is_spread;   // each block begins elsewhere
    uint32_t unused;
};

constexpr uint32_t STAGES = 4;
constexpr uint32_t COPIES = 4;
constexpr uint32_t STAGE_BYTES = THREADS * COPIES * 16;

KERNEL(draw, DrawParams, THREADS, 1) {
    const uint32_t num_stages = p.bytes / STAGE_BYTES * p.rounds;
    const uint32_t start = p.is_spread != 0 ? block_index() * STAGE_BYTES : 0;
    const uint64_t begin = clocks();
    KEEP_LOOP for (uint32_t stage = 0; stage < num_stages; ++stage) {
        uint8_t* to = shared_memory() + stage % STAGES * STAGE_BYTES;
        UNROLL for (uint32_t i = 0; i < COPIES; ++i) {
            const uint32_t chunk = (i * THREADS + thread_index()) * 16;
            async_copy16(to + chunk, p.from + ((start + stage * STAGE_BYTES + chunk) & (p.bytes - 1)));
        }
        async_commit();
        async_wait<STAGES - 1>();
    }
    async_wait<0>();
    barrier_all();
    if (thread_index() == 0) {
        p.out[block_index()] = clocks() - begin;
    }
}
