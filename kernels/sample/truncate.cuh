// From scores to weights: temperature, then top-k, top-p and min-p, each on what the one before has left,
// as the host's `sampling::truncate` has them. Hardly any token is left, so that the few likely ones are
// listed first. Where they are too many, all weights of the row are worked on where they are.
#pragma once
#include "sample/list.cuh"

// Some values, of which those of at least `floor` are searched; without ids a value's place is its id.
struct Candidates {
    const float* values;
    const uint32_t* ids;
    uint32_t count;
    float floor;

    DEVICE uint32_t id(uint32_t idx) const {
        return ids == nullptr ? idx : ids[idx];
    }
};

// The k largest of them.
struct CountedFloats {
    Candidates of;

    DEVICE uint64_t measure(uint32_t) const {
        return 1;
    }

    DEVICE Item operator()(uint32_t idx) const {
        const float value = of.values[idx];
        return {of.id(idx), ordered_key(value), value >= of.floor ? 1u : 0u};
    }
};

// Positive weights as integers: multiples of a power of two that is 2^-61 of their total or less.
struct FixedWeights {
    Candidates of;
    double scale;

    DEVICE uint64_t measure(uint32_t key) const {
        const double fixed = static_cast<double>(bits_float(key)) * scale;
        return maximum<uint64_t>(static_cast<uint64_t>(fixed), 1);
    }

    DEVICE Item operator()(uint32_t idx) const {
        const float weight = of.values[idx];
        const uint32_t key = float_bits(weight);
        return {of.id(idx), key, weight > 0.0f && weight >= of.floor ? measure(key) : 0};
    }
};

// The tokens that are worked on: those that are listed, or all, whose weights are then in their row.
struct Pool {
    const float* scores;
    float* weights;
    const uint32_t* ids;  // null for all
    uint32_t count;

    DEVICE Candidates candidates(const float* values, float floor) const {
        return {values, ids, count, floor};
    }
};

DEVICE Pool pool_of(const Place& place, bool is_listed, RowScratch& scratch) {
    if (is_listed) {
        return {scratch.values, scratch.values, scratch.ids, scratch.num_listed};
    }
    return {place.values(), place.weights, nullptr, place.vocab};
}

// The total of the weights. Of multiples of 2^-40 and of 2^-80, so that the order of those that are listed,
// which is no particular one, does not matter.
DEVICE double total_of(const Pool& pool, BlockScratch& scratch) {
    constexpr double UNIT = 1099511627776.0;
    double high = 0.0;
    double low = 0.0;
    for (uint32_t idx = thread_index(); idx < pool.count; idx += num_threads()) {
        const double scaled = product(static_cast<double>(pool.weights[idx]), UNIT);
        const double whole = static_cast<double>(static_cast<uint64_t>(scaled));
        high += whole;
        low += static_cast<double>(static_cast<uint64_t>((scaled - whole) * UNIT));
    }
    high = block_sum(scratch, high);
    low = block_sum(scratch, low);
    return (high + low / UNIT) / UNIT;
}

// A value that at least k scores reach, which leaves few to search: the k-th largest of the threads' own
// largest, or of the tiles' if k is too large for that, or else negative infinity.
DEVICE float top_k_floor(const Place& place, uint32_t k, RowScratch& scratch) {
    const bool is_of_tiles = k > num_threads() / 2;
    const uint32_t count = is_of_tiles ? place.vocab / BEST_TILE : num_threads();
    if (k > count / 2) {
        return negative_infinity();
    }
    const Best* best = place.value_best();
    const auto largest = [&](uint32_t idx) {
        const float value = is_of_tiles ? best[idx].value : scratch.largest[idx];
        return Item{idx, ordered_key(value), 1};
    };
    const uint32_t low = lowest_key(negative_infinity());
    const uint32_t high = highest_key(-negative_infinity());
    return ordered_float(reach(largest, count, k, low, high, scratch.select).key);
}

// Where top-k cuts the scores.
DEVICE Cut top_k(const Candidates& of, uint32_t k, RowScratch& scratch) {
    const uint32_t low = lowest_key(of.floor);
    const uint32_t high = highest_key(-negative_infinity());
    return select(CountedFloats{of}, of.count, k, low, high, scratch.select);
}

// A floor is valid if all tokens below it together weigh less than what top-p may leave out, so that none
// of them is needed. The factor covers the rounding of the sums.
constexpr double FLOOR_SLACK = 0.99;

// However the weights are spread.
DEVICE float top_p_floor(double total, double goal, uint32_t num_tokens) {
    return static_cast<float>(FLOOR_SLACK * (total - goal) / static_cast<double>(num_tokens));
}

// The highest one that the slices of a row know to be valid, or `floor`.
DEVICE float known_floor(const RowParts& parts, double total, double goal, float floor) {
    UNROLL
    for (uint32_t idx = 0; idx < NUM_FLOORS; idx++) {
        const double tail = static_cast<double>(tail_of(parts, idx));
        const bool is_valid = tail <= FLOOR_SLACK * (total - goal);
        floor = is_valid ? maximum(floor, floor_of(idx)) : floor;
    }
    return floor;
}

// Where top-p cuts weights of this total: after the shortest prefix that reaches `goal`.
DEVICE Cut top_p(const Candidates& of, double total, double goal, RowScratch& scratch) {
    // The total is below 2^(exponent + 1), so that no sum reaches 2^63.
    const uint64_t exponent = (double_bits(total) >> 52) - 1023;
    const double scale = bits_double((1023 + 61 - exponent) << 52);
    const double scaled = goal * scale;
    const uint64_t whole = static_cast<uint64_t>(scaled);
    const uint64_t fixed = whole + (static_cast<double>(whole) < scaled ? 1 : 0);
    const uint32_t low = float_bits(of.floor);
    const uint32_t high = float_bits(1.0f);
    return select(FixedWeights{of, scale}, of.count, fixed, low, high, scratch.select);
}

// Scores become weights; what `cut` does not keep weighs nothing.
DEVICE void weigh_pool(const Pool& pool, const Weigh& weigh, const Cut& cut) {
    const Candidates scores = pool.candidates(pool.scores, 0.0f);
    for (uint32_t idx = thread_index(); idx < pool.count; idx += num_threads()) {
        const float score = pool.scores[idx];
        const bool is_kept = cut.keeps(ordered_key(score), scores.id(idx));
        pool.weights[idx] = is_kept ? weigh(score) : 0.0f;
    }
}

// Drops weights that `cut` does not keep or that are below `least`.
DEVICE void narrow(const Pool& pool, const Cut& cut, float least) {
    const Candidates weights = pool.candidates(pool.weights, least);
    for (uint32_t idx = thread_index(); idx < pool.count; idx += num_threads()) {
        const float weight = pool.weights[idx];
        if (weight < least || !cut.keeps(float_bits(weight), weights.id(idx))) {
            pool.weights[idx] = 0.0f;
        }
    }
}

DEVICE bool has_top_k(const StepSequence& s, uint32_t vocab) {
    return s.top_k > 0 && s.top_k < vocab;
}

DEVICE bool truncates(const StepSequence& s, uint32_t vocab) {
    return has_top_k(s, vocab) || s.top_p != 1.0f || s.min_p != 0.0f;
}

DEVICE Filter filter_of(const Place& place, const Weigh& weigh, double total,
                        RowScratch& scratch) {
    const StepSequence& s = *place.context.sequence;
    if (has_top_k(s, place.vocab)) {
        const float floor = top_k_floor(place, s.top_k, scratch);
        return {weigh, true, floor, floor};
    }
    float floor = s.min_p;
    if (s.top_p < 1.0f) {
        const double goal = product(total, static_cast<double>(s.top_p));
        floor = known_floor(*place.parts, total, goal, top_p_floor(total, goal, place.vocab));
    }
    return {weigh, false, floor, TILE_SLACK * floor};
}

// What truncation leaves: whether it is listed, and its total. `total` is that of all weights; only top-p
// without top-k asks for it.
struct Truncated {
    bool is_listed;
    double total;
};

DEVICE Truncated truncate(const Place& place, const Weigh& weigh, double total,
                          RowScratch& scratch) {
    const StepSequence& s = *place.context.sequence;
    const Filter filter = filter_of(place, weigh, total, scratch);
    const bool is_listed = list(place, filter, scratch);
    const Pool pool = pool_of(place, is_listed, scratch);
    Cut cut = KEEP_ALL;
    if (filter.is_of_scores) {
        cut = top_k(pool.candidates(pool.scores, filter.floor), s.top_k, scratch);
    }
    if (filter.is_of_scores || !is_listed) {
        weigh_pool(pool, weigh, cut);
        total = total_of(pool, scratch.block);
    }
    float least = s.min_p;
    cut = KEEP_ALL;
    if (s.top_p < 1.0f) {
        const double goal = total * static_cast<double>(s.top_p);
        const float floor =
            filter.is_of_scores ? top_p_floor(total, goal, s.top_k) : filter.floor;
        cut = top_p(pool.candidates(pool.weights, floor), total, goal, scratch);
        least = maximum(least, floor);
    }
    narrow(pool, cut, least);
    return {is_listed, total_of(pool, scratch.block)};
}

// The weight of a listed token, 0 of another one.
DEVICE float listed_weight(uint32_t token, RowScratch& scratch) {
    if (thread_index() == 0) {
        scratch.found = 0.0f;
    }
    barrier_all();
    for (uint32_t idx = thread_index(); idx < scratch.num_listed; idx += num_threads()) {
        if (scratch.ids[idx] == token) {
            scratch.found = scratch.values[idx];
        }
    }
    barrier_all();
    return scratch.found;
}
