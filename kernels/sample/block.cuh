// Reductions over a block of any number of whole warps. Every thread gets the result, and its bits depend on
// the values and the number of threads alone.
#pragma once
#include "common/exact.cuh"
#include "common/types.cuh"

// The emulator's time goes by threads, so that tests ask for fewer.
#ifndef SAMPLE_THREADS
#define SAMPLE_THREADS 512
#endif

constexpr uint32_t MAX_THREADS = SAMPLE_THREADS;
constexpr uint32_t MAX_WARPS = MAX_THREADS / 32;
static_assert(MAX_WARPS <= 32, "a lane each");

// Shared memory of the reductions.
struct BlockScratch {
    double values[MAX_WARPS];
    uint32_t ids[MAX_WARPS];
};

// A token and how it did.
struct Scored {
    double score;
    uint32_t id;
};

// The higher score, the lower token on ties.
DEVICE Scored better(const Scored& a, const Scored& b) {
    const bool is_second = b.score > a.score || (b.score == a.score && b.id < a.id);
    return is_second ? b : a;
}

DEVICE double block_sum(BlockScratch& scratch, double value) {
    value = warp_sum(value);
    // Nobody reads an earlier result any more.
    barrier_all();
    if (lane_index() == 0) {
        scratch.values[warp_index()] = value;
    }
    barrier_all();
    return warp_sum(lane_index() < num_threads() / 32 ? scratch.values[lane_index()] : 0.0);
}

DEVICE Scored warp_best(Scored best) {
    // A loop: code that is run for the first time is slow to come.
    KEEP_LOOP
    for (uint32_t mask = 16; mask > 0; mask /= 2) {
        best = better(best, {shuffle_xor(best.score, mask), shuffle_xor(best.id, mask)});
    }
    return best;
}

DEVICE Scored block_best(BlockScratch& scratch, Scored best) {
    best = warp_best(best);
    barrier_all();
    if (lane_index() == 0) {
        scratch.values[warp_index()] = best.score;
        scratch.ids[warp_index()] = best.id;
    }
    barrier_all();
    // The first warp's twice changes nothing.
    const uint32_t warp = lane_index() < num_threads() / 32 ? lane_index() : 0;
    return warp_best({scratch.values[warp], scratch.ids[warp]});
}
