// Exact selection from many: where a cut falls if tokens are taken from the largest key down, the lowest
// token first on ties, until what they measure reaches a goal. A radix search over 8 bits at a time; sums are
// of integers, so that their order does not matter.
#pragma once
#include "sample/block.cuh"

constexpr uint32_t NUM_BINS = 256;

// Shared memory of a search.
struct SelectScratch {
    uint32_t low[NUM_BINS];
    uint32_t high[NUM_BINS];
    uint64_t above;
    uint64_t held;
    uint32_t bin;
};

// The last token taken: its key, and its id among those with this key.
struct Cut {
    uint32_t key;
    uint32_t last;

    DEVICE bool keeps(uint32_t other, uint32_t id) const {
        return other > key || (other == key && id <= last);
    }
};

constexpr Cut KEEP_ALL = {0, 0xffffffffu};

// Preserves the order of floats, with -0 below 0.
DEVICE uint32_t ordered_key(float value) {
    const uint32_t bits = float_bits(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Of 0, which may stand for either zero.
DEVICE uint32_t lowest_key(float value) {
    return ordered_key(value == 0.0f ? -0.0f : value);
}

DEVICE uint32_t highest_key(float value) {
    return ordered_key(value == 0.0f ? 0.0f : value);
}

DEVICE float ordered_float(uint32_t key) {
    return bits_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// One token: `measure` 0 does not take part.
struct Item {
    uint32_t id;
    uint32_t key;
    uint64_t measure;
};

// Where a goal is reached.
struct Reached {
    bool any;        // else everything together is less
    uint32_t key;
    uint64_t above;  // what the larger keys measure
    uint64_t held;   // what this key measures
};

// Adds to a bin of 64 bits; the carry of the lower half is noticed by exactly one thread.
DEVICE void deposit(SelectScratch& scratch, uint32_t bin, uint64_t measure) {
    const uint32_t low = static_cast<uint32_t>(measure);
    const uint32_t old = atomic_add(&scratch.low[bin], low);
    const uint32_t high = static_cast<uint32_t>(measure >> 32) + (old + low < low ? 1 : 0);
    if (high != 0) {
        atomic_add(&scratch.high[bin], high);
    }
}

DEVICE uint64_t bin_value(const SelectScratch& scratch, uint32_t bin) {
    return static_cast<uint64_t>(scratch.high[bin]) << 32 | scratch.low[bin];
}

// The one bin in which the goal is reached, counting down, told to all through the scratch.
DEVICE void find_bin(SelectScratch& scratch, uint64_t goal) {
    constexpr uint32_t PER_LANE = NUM_BINS / 32;
    if (warp_index() != 0) {
        return;
    }
    const uint32_t first = NUM_BINS - 1 - lane_index() * PER_LANE;
    uint64_t own = 0;
    for (uint32_t idx = 0; idx < PER_LANE; idx++) {
        own += bin_value(scratch, first - idx);
    }
    uint64_t above = own;
    UNROLL
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const uint64_t before = shuffle_up(above, distance);
        above += lane_index() >= distance ? before : 0;
    }
    above -= own;
    for (uint32_t idx = 0; idx < PER_LANE; idx++) {
        const uint64_t held = bin_value(scratch, first - idx);
        if (above < goal && above + held >= goal) {
            scratch.bin = first - idx;
            scratch.above = above;
            scratch.held = held;
        }
        above += held;
    }
}

// The bits of keys in which all from the lowest to the highest may differ.
DEVICE uint32_t differing_bits(uint32_t low, uint32_t high) {
    return 32 - leading_zeros(low ^ high);
}

DEVICE uint32_t without_low_bits(uint32_t key, uint32_t bits) {
    return bits == 32 ? 0 : key >> bits << bits;
}

// The largest key at which all items down to it reach the goal (at least 1). Keys are from `low` to `high`.
template <class Items>
DEVICE Reached reach(const Items& items, uint32_t count, uint64_t goal, uint32_t low, uint32_t high,
                     SelectScratch& scratch) {
    uint32_t shift = maximum(differing_bits(low, high), 1u);
    Reached reached = {true, without_low_bits(high, shift), 0, 0};
    while (shift > 0) {
        for (uint32_t bin = thread_index(); bin < NUM_BINS; bin += num_threads()) {
            scratch.low[bin] = 0;
            scratch.high[bin] = 0;
        }
        if (thread_index() == 0) {
            scratch.bin = NUM_BINS;
        }
        barrier_all();
        const uint32_t open = shift;
        shift -= minimum(shift, 8u);
        for (uint32_t idx = thread_index(); idx < count; idx += num_threads()) {
            const Item item = items(idx);
            if (item.measure != 0 && without_low_bits(item.key, open) == reached.key) {
                deposit(scratch, item.key >> shift & 0xffu, item.measure);
            }
        }
        barrier_all();
        find_bin(scratch, goal - reached.above);
        barrier_all();
        if (scratch.bin == NUM_BINS) {
            reached.any = false;
        } else {
            reached.key |= scratch.bin << shift;
            reached.above += scratch.above;
            reached.held = scratch.held;
        }
        // Before the bins are cleared again.
        barrier_all();
        if (!reached.any) {
            break;
        }
    }
    return reached;
}

// As above, down to a single token: items of equal keys have equal measures. Ids are below 2^24.
template <class Items>
DEVICE Cut select(const Items& items, uint32_t count, uint64_t goal, uint32_t low, uint32_t high,
                  SelectScratch& scratch) {
    const Reached reached = reach(items, count, goal, low, high, scratch);
    if (!reached.any) {
        return KEEP_ALL;
    }
    const uint64_t each = items.measure(reached.key);
    const uint64_t wanted = divide_up(goal - reached.above, each);
    if (wanted * each >= reached.held) {
        return {reached.key, 0xffffffffu};
    }
    const uint32_t top = (1u << 24) - 1;
    const auto ties = [&](uint32_t idx) {
        const Item item = items(idx);
        return Item{item.id, top - item.id, item.measure != 0 && item.key == reached.key ? 1u : 0u};
    };
    return {reached.key, top - reach(ties, count, wanted, 0, top, scratch).key};
}
