// Which tokens of a row are likely: the likeliest, and all that reach a floor, which are listed in shared
// memory. Hardly any does, and the best of a tile tells whether one of it can.
#pragma once
#include "sample/place.cuh"
#include "sample/select.cuh"

// Tests ask for fewer, so that they do not suffice.
#ifndef SAMPLE_LISTED
#define SAMPLE_LISTED 4096
#endif

// Tokens that are listed at most.
constexpr uint32_t MAX_LISTED = SAMPLE_LISTED;
static_assert(SLICES * MAX_PROMISING <= MAX_LISTED, "what slices remember is listed");

// Branches of a draft, at most: how many drafts of a position are drawn.
constexpr uint32_t MAX_BRANCHES = 16;

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
    uint32_t drawn[MAX_BRANCHES];
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

DEVICE Scored better_behind(const Scored& last, const Scored& best, float score, uint32_t id) {
    const bool is_behind = score < last.score || (score == last.score && id > last.id);
    return is_behind && score > negative_infinity() ? better(best, {score, id}) : best;
}

// The likeliest token but `last` and those before it; NO_TOKEN if there is none. A tile whose best is behind has nothing
// better.
DEVICE Scored next_likeliest(const float* scores, const Best* best, uint32_t vocab,
                             const Scored& last, RowScratch& scratch) {
    const uint32_t num_tiles = vocab / BEST_TILE;
    Scored own = {negative_infinity(), NO_TOKEN};
    for (uint32_t tile = thread_index(); tile < num_tiles; tile += num_threads()) {
        const Scored found = better_behind(last, {negative_infinity(), NO_TOKEN}, best[tile].value,
                                           best[tile].index);
        if (found.id != NO_TOKEN) {
            own = better(own, found);
            continue;
        }
        for (uint32_t id = tile * BEST_TILE; id < (tile + 1) * BEST_TILE; id++) {
            own = better_behind(last, own, scores[id], id);
        }
    }
    for (uint32_t id = num_tiles * BEST_TILE + thread_index(); id < vocab; id += num_threads()) {
        own = better_behind(last, own, scores[id], id);
    }
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
