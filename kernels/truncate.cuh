// From scores to weights: temperature, then top-k, top-p and min-p, each on what the one before has left, as
// the host's `sampling::truncate` has them. Hardly any token is left, and the best of a tile tells whether one
// of it can be: the few are listed in shared memory. Where too many are likely, all weights of the row are worked
// on where they are.
#pragma once
#include "place.cuh"
#include "select.cuh"

// Tokens that are listed at most.
constexpr uint32_t MAX_LISTED = 4096;

// Tiles that a warp reads at once.
constexpr uint32_t TILES_AT_ONCE = 4;

// Covers that exp_weight is not monotonic in its last bits.
constexpr float TILE_SLACK = 0.999f;

// Shared memory of a row.
struct RowScratch {
    BlockScratch block;
    SelectScratch select;
    float largest[MAX_THREADS];  // each thread's largest score
    uint32_t is_last;
    float found;
    uint32_t num_listed;
    uint32_t ids[MAX_LISTED];
    float values[MAX_LISTED];  // scores, then weights
};

// A weight from a score.
struct Weigh {
    float most;  // the largest score
    float temperature;

    DEVICE float operator()(float score) const {
        // Infinite scores would give NaN against an infinite maximum.
        const float finite = score > LARGEST_FLOAT ? LARGEST_FLOAT : score;
        return exp_weight((finite - most) / temperature);
    }
};

DEVICE Weigh weigh_of(const StepSequence& s, float largest) {
    return {minimum(largest, LARGEST_FLOAT), s.temperature};
}

// Scores as they are.
struct Plain {
    DEVICE float operator()(float score) const {
        return score;
    }
};

// Some values, of which those of at least `floor` are searched; without ids a value's place is its id.
struct Candidates {
    const float* values;
    const uint32_t* ids;
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

// The likeliest token, NO_TOKEN if there are none but NaN and negative infinity; leaves each thread's largest
// score behind. Of a tile that is only partly of the vocabulary what is held to be its best does not count.
DEVICE Scored likeliest(const float* scores, const Best* best, uint32_t vocab,
                        RowScratch& scratch) {
    const uint32_t num_tiles = vocab / BEST_TILE;
    Scored own = {negative_infinity(), NO_TOKEN};
    for (uint32_t tile = thread_index(); tile < num_tiles; tile += num_threads()) {
        const Best found = best[tile];
        if (found.value > negative_infinity()) {
            own = better(own, {found.value, found.index});
        }
    }
    const uint32_t first = num_tiles * BEST_TILE;
    for (uint32_t id = first + thread_index(); id < vocab; id += num_threads()) {
        if (scores[id] > negative_infinity()) {
            own = better(own, {scores[id], id});
        }
    }
    scratch.largest[thread_index()] = static_cast<float>(own.score);
    return block_best(scratch.block, own);
}

// Adds to the list what the lanes of a warp hold of two tokens each.
DEVICE void append(uint32_t id, float value, bool is_kept, RowScratch& scratch) {
    const uint32_t kept = ballot(is_kept);
    if (kept == 0) {
        return;
    }
    uint32_t first = 0;
    if (lane_index() == 0) {
        first = atomic_add(&scratch.num_listed, count_ones(kept));
    }
    const uint32_t below = count_ones(kept & ((1u << lane_index()) - 1));
    const uint32_t place = shuffle_from(first, 0) + below;
    if (is_kept && place < MAX_LISTED) {
        scratch.ids[place] = id;
        scratch.values[place] = value;
    }
}

// Lists what is likely enough in the tiles of 32 that are marked in `likely`.
template <class Of>
DEVICE void list_tiles(const Place& place, uint32_t first_tile, uint32_t likely, float floor,
                       const Of& of, RowScratch& scratch) {
    const float* values = place.values();
    while (likely != 0) {
        uint32_t ids[TILES_AT_ONCE];
        Float2 pairs[TILES_AT_ONCE];
        UNROLL
        for (uint32_t idx = 0; idx < TILES_AT_ONCE; idx++) {
            const uint32_t highest = 31 - leading_zeros(likely);
            ids[idx] = likely == 0 ? place.vocab
                                   : (first_tile + highest) * BEST_TILE + 2 * lane_index();
            likely &= likely == 0 ? 0 : ~(1u << highest);
            pairs[idx] = {negative_infinity(), negative_infinity()};
            if (ids[idx] < place.vocab) {
                pairs[idx] = *reinterpret_cast<const Float2*>(values + ids[idx]);
            }
        }
        UNROLL
        for (uint32_t idx = 0; idx < TILES_AT_ONCE; idx++) {
            const float low = of(pairs[idx].x);
            const float high = of(pairs[idx].y);
            append(ids[idx], low, ids[idx] < place.vocab && low >= floor, scratch);
            append(ids[idx] + 1, high, ids[idx] + 1 < place.vocab && high >= floor, scratch);
        }
    }
}

// Lists the tokens of which `of(score)` is at least `floor`, in no particular order; false if they are too many. A
// tile whose best is below `tile_floor` has none.
template <class Of>
DEVICE bool list(const Place& place, float tile_floor, float floor, const Of& of,
                 RowScratch& scratch) {
    if (thread_index() == 0) {
        scratch.num_listed = 0;
    }
    barrier_all();
    const uint32_t num_whole = place.vocab / BEST_TILE;
    const uint32_t num_tiles = divide_up(place.vocab, BEST_TILE);
    const Best* best = place.value_best();
    for (uint32_t first = 32 * warp_index(); first < num_tiles; first += num_threads()) {
        const uint32_t tile = first + lane_index();
        bool is_likely = tile >= num_whole && tile < num_tiles;
        if (tile < num_whole) {
            is_likely = of(best[tile].value) >= tile_floor;
        }
        list_tiles(place, first, ballot(is_likely), floor, of, scratch);
    }
    barrier_all();
    return scratch.num_listed <= MAX_LISTED;
}

// The total of the listed weights. Of multiples of 2^-40 and of 2^-80, so that their order, which is no
// particular one, does not matter.
DEVICE double listed_total(RowScratch& scratch) {
    constexpr double UNIT = 1099511627776.0;
    double high = 0.0;
    double low = 0.0;
    for (uint32_t idx = thread_index(); idx < scratch.num_listed; idx += num_threads()) {
        const double scaled = static_cast<double>(scratch.values[idx]) * UNIT;
        const double whole = static_cast<double>(static_cast<uint64_t>(scaled));
        high += whole;
        low += static_cast<double>(static_cast<uint64_t>((scaled - whole) * UNIT));
    }
    high = block_sum(scratch.block, high);
    low = block_sum(scratch.block, low);
    return (high + low / UNIT) / UNIT;
}

// A value that at least k scores reach, which leaves few to search: the k-th largest of the threads' own
// largest, or else negative infinity.
DEVICE float top_k_floor(uint32_t k, RowScratch& scratch) {
    if (k > num_threads() / 2) {
        return negative_infinity();
    }
    const CountedFloats own = {{scratch.largest, nullptr, negative_infinity()}};
    const uint32_t low = lowest_key(negative_infinity());
    const uint32_t high = highest_key(-negative_infinity());
    return ordered_float(reach(own, num_threads(), k, low, high, scratch.select).key);
}

// Where top-k cuts the scores that are at least `floor`.
DEVICE Cut top_k(const Candidates& of, uint32_t count, uint32_t k, RowScratch& scratch) {
    const uint32_t low = lowest_key(of.floor);
    const uint32_t high = highest_key(-negative_infinity());
    return select(CountedFloats{of}, count, k, low, high, scratch.select);
}

// All tokens below it together weigh less than what top-p may leave out, so none of them is needed. The factor
// covers the rounding of the sums.
DEVICE float top_p_floor(double total, double goal, uint32_t num_tokens) {
    return static_cast<float>(0.99 * (total - goal) / static_cast<double>(num_tokens));
}

// Where top-p cuts weights of this total: after the shortest prefix that reaches `goal`.
DEVICE Cut top_p(const Candidates& of, uint32_t count, double total, double goal,
                 RowScratch& scratch) {
    // The total is below 2^(exponent + 1), so that no sum reaches 2^63.
    const uint64_t exponent = (double_bits(total) >> 52) - 1023;
    const double scale = bits_double((1023 + 61 - exponent) << 52);
    const double scaled = goal * scale;
    const uint64_t whole = static_cast<uint64_t>(scaled);
    const uint64_t fixed = whole + (static_cast<double>(whole) < scaled ? 1 : 0);
    const uint32_t low = float_bits(of.floor);
    const uint32_t high = float_bits(1.0f);
    return select(FixedWeights{of, scale}, count, fixed, low, high, scratch.select);
}

// Drops listed weights that `cut` does not keep or that are below `least`; returns the new total.
DEVICE double narrow_listed(const Cut& cut, float least, RowScratch& scratch) {
    for (uint32_t idx = thread_index(); idx < scratch.num_listed; idx += num_threads()) {
        const float weight = scratch.values[idx];
        if (weight < least || !cut.keeps(float_bits(weight), scratch.ids[idx])) {
            scratch.values[idx] = 0.0f;
        }
    }
    return listed_total(scratch);
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

// Lists what top-k keeps, by weight; false if too many are likely.
DEVICE bool list_top_k(const Place& place, const Weigh& weigh, RowScratch& scratch) {
    const uint32_t k = place.context.sequence->top_k;
    const float floor = top_k_floor(k, scratch);
    if (!list(place, floor, floor, Plain{}, scratch)) {
        return false;
    }
    const Candidates likely = {scratch.values, scratch.ids, floor};
    const Cut cut = top_k(likely, scratch.num_listed, k, scratch);
    for (uint32_t idx = thread_index(); idx < scratch.num_listed; idx += num_threads()) {
        const float score = scratch.values[idx];
        const bool is_kept = cut.keeps(ordered_key(score), scratch.ids[idx]);
        scratch.values[idx] = is_kept ? weigh(score) : 0.0f;
    }
    return true;
}

DEVICE bool has_top_k(const StepSequence& s, uint32_t vocab) {
    return s.top_k > 0 && s.top_k < vocab;
}

DEVICE bool truncates(const StepSequence& s, uint32_t vocab) {
    return has_top_k(s, vocab) || s.top_p != 1.0f || s.min_p != 0.0f;
}

// Lists what truncation keeps; false if too many are likely. `total` is that of all weights, for which only top-p
// without top-k asks, and then of those that are left.
DEVICE bool truncate_listed(const Place& place, const Weigh& weigh, double& total,
                            RowScratch& scratch) {
    const StepSequence& s = *place.context.sequence;
    uint32_t num_tokens = place.vocab;
    if (has_top_k(s, place.vocab)) {
        if (!list_top_k(place, weigh, scratch)) {
            return false;
        }
        num_tokens = s.top_k;
        total = listed_total(scratch);
    }
    const double goal = total * static_cast<double>(s.top_p);
    const bool has_top_p = s.top_p < 1.0f;
    const float floor = has_top_p ? top_p_floor(total, goal, num_tokens) : s.min_p;
    if (!has_top_k(s, place.vocab) && !list(place, TILE_SLACK * floor, floor, weigh, scratch)) {
        return false;
    }
    Cut cut = KEEP_ALL;
    if (has_top_p) {
        const Candidates likely = {scratch.values, scratch.ids, floor};
        cut = top_p(likely, scratch.num_listed, total, goal, scratch);
    }
    total = narrow_listed(cut, maximum(floor, s.min_p), scratch);
    return true;
}

// Writes the weight of each token that `cut` keeps, else 0; returns their total.
DEVICE double weigh_all(const Place& place, const Cut& cut, const Weigh& weigh,
                        BlockScratch& scratch) {
    const float* scores = place.values();
    double total = 0.0;
    for (uint32_t id = thread_index(); id < place.vocab; id += num_threads()) {
        const bool is_kept = cut.keeps(ordered_key(scores[id]), id);
        const float weight = is_kept ? weigh(scores[id]) : 0.0f;
        place.weights[id] = weight;
        total += static_cast<double>(weight);
    }
    return block_sum(scratch, total);
}

// Drops weights that `cut` does not keep or that are below `least`; returns the new total.
DEVICE double narrow_all(const Place& place, const Cut& cut, float least, BlockScratch& scratch) {
    double total = 0.0;
    for (uint32_t id = thread_index(); id < place.vocab; id += num_threads()) {
        float weight = place.weights[id];
        if (weight < least || !cut.keeps(float_bits(weight), id)) {
            weight = 0.0f;
            place.weights[id] = weight;
        }
        total += static_cast<double>(weight);
    }
    return block_sum(scratch, total);
}

// The same in the row of weights, however many they are. Returns the total of what is left.
DEVICE double truncate_all(const Place& place, const Weigh& weigh, RowScratch& scratch) {
    const StepSequence& s = *place.context.sequence;
    Cut cut = KEEP_ALL;
    uint32_t num_tokens = place.vocab;
    if (has_top_k(s, place.vocab)) {
        const Candidates all = {place.values(), nullptr, negative_infinity()};
        cut = top_k(all, place.vocab, s.top_k, scratch);
        num_tokens = s.top_k;
    }
    const double total = weigh_all(place, cut, weigh, scratch.block);
    cut = KEEP_ALL;
    float least = s.min_p;
    if (s.top_p < 1.0f) {
        const double goal = total * static_cast<double>(s.top_p);
        const float floor = top_p_floor(total, goal, num_tokens);
        cut = top_p({place.weights, nullptr, floor}, place.vocab, total, goal, scratch);
        least = maximum(least, floor);
    }
    return narrow_all(place, cut, least, scratch.block);
}
