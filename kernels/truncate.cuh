// From scores to weights: temperature, then top-k, top-p and min-p, each on what the one before has left,
// as the host's `sampling::truncate` has them. Hardly any token is left, and the best of a tile tells
// whether one of it can be: the few are listed in shared memory. Where too many are likely, all weights of
// the row are worked on where they are.
#pragma once
#include "place.cuh"
#include "select.cuh"

// Tests ask for fewer, so that they do not suffice.
#ifndef SAMPLE_LISTED
#define SAMPLE_LISTED 4096
#endif

// Tokens that are listed at most.
constexpr uint32_t MAX_LISTED = SAMPLE_LISTED;
static_assert(SLICES * MAX_PROMISING <= MAX_LISTED, "what slices remember is listed");

// Bests that a thread reads at once.
constexpr uint32_t BESTS_AT_ONCE = 8;

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
    union {
        Staging staging;  // before anything is listed
        struct {
            uint32_t ids[MAX_LISTED];
            float values[MAX_LISTED];  // scores, then weights
        };
    };
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

// The likeliest of this thread's tiles.
DEVICE Scored likeliest_tile(const Best* best, uint32_t num_tiles) {
    float value = negative_infinity();
    uint32_t id = NO_TOKEN;
    const uint32_t stride = BESTS_AT_ONCE * num_threads();
    for (uint32_t first = thread_index(); first < num_tiles; first += stride) {
        Float2 found[BESTS_AT_ONCE];
        UNROLL
        for (uint32_t idx = 0; idx < BESTS_AT_ONCE; idx++) {
            const uint32_t tile = first + idx * num_threads();
            found[idx] = {negative_infinity(), 0.0f};
            if (tile < num_tiles) {
                found[idx] = reinterpret_cast<const Float2*>(best)[tile];
            }
        }
        // Later tiles hold later tokens.
        UNROLL
        for (uint32_t idx = 0; idx < BESTS_AT_ONCE; idx++) {
            if (found[idx].x > value) {
                value = found[idx].x;
                id = float_bits(found[idx].y);
            }
        }
    }
    return {value, id};
}

// The likeliest token, NO_TOKEN if there are none but NaN and negative infinity; leaves each thread's largest
// score behind. Of a tile that is only partly of the vocabulary what is held to be its best does not count.
DEVICE Scored likeliest(const float* scores, const Best* best, uint32_t vocab,
                        RowScratch& scratch) {
    const uint32_t num_tiles = vocab / BEST_TILE;
    Scored own = likeliest_tile(best, num_tiles);
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

// Which tokens are listed: those of at least `floor`, by score or by weight.
struct Filter {
    Weigh weigh;
    bool is_of_scores;
    float floor;
    float tile_floor;  // a tile whose best is below has none

    DEVICE float value(float score) const {
        return is_of_scores ? score : weigh(score);
    }
};

// Lists what is likely enough in the tiles of 32 that are marked in `likely`.
DEVICE void list_tiles(const Place& place, uint32_t first_tile, uint32_t likely,
                       const Filter& filter, RowScratch& scratch) {
    const float* scores = place.values();
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
                pairs[idx] = *reinterpret_cast<const Float2*>(scores + ids[idx]);
            }
        }
        UNROLL
        for (uint32_t idx = 0; idx < TILES_AT_ONCE; idx++) {
            const float low = filter.value(pairs[idx].x);
            const float high = filter.value(pairs[idx].y);
            const uint32_t id = ids[idx];
            append(id, low, id < place.vocab && low >= filter.floor, scratch);
            append(id + 1, high, id + 1 < place.vocab && high >= filter.floor, scratch);
        }
    }
}

// Lists tokens, in no particular order; false if they are too many.
DEVICE bool list(const Place& place, const Filter& filter, RowScratch& scratch) {
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
            is_likely = filter.value(best[tile].value) >= filter.tile_floor;
        }
        list_tiles(place, first, ballot(is_likely), filter, scratch);
    }
    barrier_all();
    return scratch.num_listed <= MAX_LISTED;
}

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
        const double scaled = static_cast<double>(pool.weights[idx]) * UNIT;
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
        const double goal = total * static_cast<double>(s.top_p);
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
