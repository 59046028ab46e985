// Gumbel argmax over weights, as a race: the token with the largest ln(weight) - ln(exponential noise),
// the lowest on ties. Its winner is distributed as the weights.
//
// The noise of a token is at least its leading bits, so that a division in f32 bounds how well the token can
// do. Hardly any token does well, and only those few are scored exactly.
#pragma once
#include "sample/slice.cuh"

// Covers the rounding of the bounds, which are in f32.
constexpr double RACE_SLACK = 1.0001;

// Noise is compared as multiples of 2^-24.
constexpr double RACE_UNIT = 16777216.0;

// A thread's token that can do best of those it has not scored yet.
struct Promise {
    float least;      // noise a weight at least, times 2^24
    uint32_t id;      // or NO_TOKEN
    uint32_t word;
    float weight;
    float second;     // `least` of the next one
};

DEVICE double race_score(const Noise& noise, uint32_t id, uint32_t word, float weight) {
    return log(static_cast<double>(weight)) - log(exponential(noise, id, word));
}

// Whether whoever has more than `bar` of noise a weight, times 2^24, does worse than the best.
DEVICE bool is_won(const Scored& best, double bar) {
    return best.id != NO_TOKEN && best.score > log(RACE_UNIT * RACE_SLACK / bar);
}

// The best of the listed tokens, of which `weights(id, weight)` is what is left; NO_TOKEN if nothing is.
// What is left adds up to `most` at most.
template <class Weights>
DEVICE Scored race_listed(const Weights& weights, double most, const Noise& noise,
                          RowScratch& scratch) {
    // One each is no reason to leave anybody out.
    const bool are_few = scratch.num_listed <= num_threads();
    const float infinity = -negative_infinity();
    const float first_bar = static_cast<float>(PROMISING * RACE_UNIT / most);
    for (float bar = are_few ? infinity : first_bar;; bar = infinity) {
        Scored best = {negative_infinity(), NO_TOKEN};
        for (uint32_t idx = thread_index(); idx < scratch.num_listed; idx += num_threads()) {
            const uint32_t id = scratch.ids[idx];
            const float weight = weights(id, scratch.values[idx]);
            if (weight > 0.0f) {
                const uint32_t word = leading_words(noise, id / 4).at(id % 4);
                if (static_cast<float>(word >> 8) <= bar * weight) {
                    best = better(best, {race_score(noise, id, word, weight), id});
                }
            }
        }
        best = block_best(scratch.block, best);
        if (bar == infinity || is_won(best, static_cast<double>(bar))) {
            return best;
        }
    }
}

// Lists what the slices of a row remember. Everything is read at once.
DEVICE void recall(const RowParts& parts, RowScratch& scratch) {
    uint32_t num_listed[SLICES];
    UNROLL
    for (uint32_t slice = 0; slice < SLICES; slice++) {
        num_listed[slice] = parts.slices[slice].num_listed;
    }
    for (uint32_t idx = thread_index(); idx < MAX_PROMISING; idx += num_threads()) {
        Promising listed[SLICES] = {};
        UNROLL
        for (uint32_t slice = 0; slice < SLICES; slice++) {
            if (idx < num_listed[slice]) {
                listed[slice] = parts.slices[slice].listed[idx];
            }
        }
        uint32_t place = idx;
        UNROLL
        for (uint32_t slice = 0; slice < SLICES; slice++) {
            if (idx < num_listed[slice]) {
                scratch.ids[place] = listed[slice].id;
                scratch.values[place] = listed[slice].weight;
            }
            place += num_listed[slice];
        }
    }
    if (thread_index() == 0) {
        uint32_t total = 0;
        UNROLL
        for (uint32_t slice = 0; slice < SLICES; slice++) {
            total += num_listed[slice];
        }
        scratch.num_listed = total;
    }
    barrier_all();
}

// The most promising of this thread's tokens below `count` that come after `last`: by `least`, then by id.
template <class Weights>
DEVICE Promise next_promise(const Weights& weights, uint32_t count, const Noise& noise,
                            const Promise& last) {
    const float infinity = -negative_infinity();
    Promise next = {infinity, NO_TOKEN, 0, 0.0f, infinity};
    for (uint32_t block = thread_index(); block < divide_up(count, 4u); block += num_threads()) {
        float own[4];
        bool any = false;
        UNROLL
        for (uint32_t idx = 0; idx < 4; idx++) {
            own[idx] = 4 * block + idx < count ? weights(4 * block + idx) : 0.0f;
            any |= own[idx] > 0.0f;
        }
        // Truncation leaves few tokens, and noise is expensive.
        if (!any) {
            continue;
        }
        const Words words = leading_words(noise, block);
        UNROLL
        for (uint32_t idx = 0; idx < 4; idx++) {
            const uint32_t id = 4 * block + idx;
            const uint32_t word = words.at(idx);
            const float least = static_cast<float>(word >> 8) / own[idx];
            const bool is_new = least > last.least || (least == last.least && id > last.id);
            if (own[idx] > 0.0f && is_new) {
                const bool is_first = next.id == NO_TOKEN || least < next.least;
                const float second = is_first ? next.least : minimum(next.second, least);
                next = is_first ? Promise{least, id, word, own[idx], second} : next;
                next.second = second;
            }
        }
    }
    return next;
}

// The winner among the tokens below `count` of which `weights(id)` is positive, or NO_TOKEN: for when the
// winner is not one of those that are remembered. Each thread scores only its most promising token; the
// best of these is a bar that hardly any other token can still reach, and only threads which hold such a
// token look again.
template <class Weights>
DEVICE uint32_t race_all(const Weights& weights, uint32_t count, const Noise& noise,
                         BlockScratch& scratch) {
    Scored best = {negative_infinity(), NO_TOKEN};
    Promise promise = {-1.0f, 0, 0, 0.0f, 0.0f};
    float bar = -negative_infinity();
    for (bool is_first = true; is_first || promise.second <= bar; is_first = false) {
        promise = next_promise(weights, count, noise, promise);
        if (promise.id != NO_TOKEN) {
            const double score = race_score(noise, promise.id, promise.word, promise.weight);
            best = better(best, {score, promise.id});
        }
        if (is_first) {
            const double score = block_best(scratch, best).score;
            bar = static_cast<float>(exp(-score) * RACE_UNIT * RACE_SLACK);
        } else if (promise.id == NO_TOKEN) {
            break;
        }
    }
    return block_best(scratch, best).id;
}
