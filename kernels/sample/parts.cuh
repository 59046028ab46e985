// What the blocks of a row tell the one of them that is last, which decides. It adds their sums in order,
// so that bits do not depend on who that is.
#pragma once
#include "sample/block.cuh"
#include "step/step.cuh"

// The emulator's time goes by threads, so that tests ask for fewer blocks a row.
#ifndef SAMPLE_SLICES
#define SAMPLE_SLICES 8
#endif

constexpr uint32_t SLICES = SAMPLE_SLICES;

// Tests ask for fewer, so that they do not suffice.
#ifndef SAMPLE_PROMISING
#define SAMPLE_PROMISING 48
#endif

// Tokens of a slice that are remembered for the race: how many are expected, whatever the weights are, and
// how many there is room for.
constexpr float PROMISING = SAMPLE_PROMISING;
constexpr uint32_t MAX_PROMISING = 7 * SAMPLE_PROMISING / 3;

// Weights below which the total of a slice is told: top-p can leave out all of them if they are little
// enough.
constexpr uint32_t NUM_FLOORS = 4;

// 2^-8, 2^-11, 2^-14 and 2^-17 of the likeliest.
DEVICE float floor_of(uint32_t idx) {
    return bits_float((127 - 8 - 3 * idx) << 23);
}

// A token that can win.
struct alignas(8) Promising {
    uint32_t id;
    float weight;
};

// What became of a slice.
struct SlicePart {
    double total;      // of its weights
    double raw_total;  // of its weights before edits and temperature
    float tails[NUM_FLOORS];  // totals of its weights below each floor, if they are not drawn from as they are
    float bar;         // the noise of tokens that are not listed is more than this a weight, times 2^24
    uint32_t num_listed;
    Promising listed[MAX_PROMISING];
};

// Of a row. Between steps `arrivals` is 0.
struct RowParts {
    SlicePart slices[SLICES];
    uint32_t arrivals;
};
static_assert(sizeof(RowParts) <= SAMPLE_PARTS_BYTES, "a row's place holds it");

DEVICE RowParts* parts_of(const SampleParams& params, uint64_t row) {
    uint8_t* parts = static_cast<uint8_t*>(params.parts) + row * SAMPLE_PARTS_BYTES;
    return reinterpret_cast<RowParts*>(parts);
}

// The total of one of the sums of all slices, in order.
DEVICE double total_of(const RowParts& parts, double SlicePart::*sum) {
    double total = 0.0;
    for (uint32_t slice = 0; slice < SLICES; slice++) {
        total += parts.slices[slice].*sum;
    }
    return total;
}

// Of a row, what weighs less than a floor.
DEVICE float tail_of(const RowParts& parts, uint32_t idx) {
    float total = 0.0f;
    for (uint32_t slice = 0; slice < SLICES; slice++) {
        total += parts.slices[slice].tails[idx];
    }
    return total;
}

// The least noise a weight, times 2^24, of what no slice has listed.
DEVICE float bar_of(const RowParts& parts) {
    float bar = parts.slices[0].bar;
    for (uint32_t slice = 1; slice < SLICES; slice++) {
        bar = minimum(bar, parts.slices[slice].bar);
    }
    return bar;
}

// Publishes what this block has done of the row, and tells all its threads whether it was the last one.
// `told` is shared memory.
DEVICE bool is_last(RowParts& parts, uint32_t* told) {
    // The barrier puts all threads' stores before the counter that one of them moves.
    barrier_all();
    if (thread_index() == 0) {
        *told = atomic_add_acq_rel(&parts.arrivals, 1) == SLICES - 1;
        if (*told) {
            parts.arrivals = 0;
        }
    }
    barrier_all();
    return *told;
}
