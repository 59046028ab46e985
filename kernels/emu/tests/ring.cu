// A ring that one warp fills and two empty, as the products have it: each consumer adds up its
// words of all units. Exercises mbarriers and the asynchronous copies of both kinds of
// architecture.
#include "common/prims.cuh"

constexpr uint32_t NUM_STAGES = 2;
constexpr uint32_t UNIT_BYTES = 512;
constexpr uint32_t NUM_CONSUMERS = 64;

struct RingParams {
    const uint8_t* units;
    uint32_t* sums;
    uint32_t num_units;
    uint32_t unused;
};

DEVICE void produce(const RingParams& p, uint8_t* stages, uint64_t* full, uint64_t* empty) {
    for (uint32_t unit = 0; unit < p.num_units; unit++) {
        const uint32_t stage = unit % NUM_STAGES;
        const uint8_t* from = p.units + unit * UNIT_BYTES;
#if ARCH >= 900
        if (lane_index() == 0) {
            mbar_wait(&empty[stage], unit / NUM_STAGES % 2 ^ 1);
            mbar_expect(&full[stage], UNIT_BYTES);
            bulk_copy(stages + stage * UNIT_BYTES, from, UNIT_BYTES, &full[stage]);
        }
#else
        const uint32_t offset = lane_index() * 16;
        mbar_wait(&empty[stage], unit / NUM_STAGES % 2 ^ 1);
        async_copy16(stages + stage * UNIT_BYTES + offset, from + offset);
        async_arrive(&full[stage]);
#endif
    }
}

KERNEL(ring, RingParams, 96, 1) {
    uint8_t* stages = shared_memory();
    uint64_t* full = reinterpret_cast<uint64_t*>(stages + NUM_STAGES * UNIT_BYTES);
    uint64_t* empty = full + NUM_STAGES;
    if (thread_index() == 0) {
        for (uint32_t stage = 0; stage < NUM_STAGES; stage++) {
            mbar_init(&full[stage], ARCH >= 900 ? 1 : 32);
            mbar_init(&empty[stage], NUM_CONSUMERS / 32);
        }
        mbar_init_fence();
    }
    barrier_all();
    grid_wait();
    if (warp_index() == NUM_CONSUMERS / 32) {
        produce(p, stages, full, empty);
        return;
    }
    uint32_t sum = 0;
    for (uint32_t unit = 0; unit < p.num_units; unit++) {
        const uint32_t stage = unit % NUM_STAGES;
        mbar_wait(&full[stage], unit / NUM_STAGES % 2);
        const uint32_t* words = reinterpret_cast<const uint32_t*>(stages + stage * UNIT_BYTES);
        sum += words[thread_index()] + words[thread_index() + NUM_CONSUMERS];
        warp_sync();
        if (lane_index() == 0) {
            mbar_arrive(&empty[stage]);
        }
    }
    p.sums[block_index() * NUM_CONSUMERS + thread_index()] = sum;
}
