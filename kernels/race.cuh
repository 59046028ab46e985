// Gumbel argmax over weights, as a race: the token with the largest ln(weight) - ln(exponential noise),
// the lowest on ties. Its winner is distributed as the weights.
//
// The noise of a token is at least its leading bits, so that a division in f32 bounds how well the token can
// do. Each thread scores only its most promising token exactly; the best of these is a bar that hardly any
// other token can still reach, and only threads which hold such a token look again.
#pragma once
#include "block.cuh"
#include "noise.cuh"

// Covers the rounding of the bounds, which are in f32.
constexpr double RACE_SLACK = 1.0001;

// A thread's token that can do best of those it has not scored yet.
struct Promise {
    float least;      // noise a weight at least, times 2^24
    uint32_t id;      // or NO_TOKEN
    uint32_t word;
    float weight;
    float second;     // `least` of the next one
};

DEVICE double race_score(const Noise& noise, const Promise& promise) {
    const double time = exponential(noise, promise.id, promise.word);
    return log(static_cast<double>(promise.weight)) - log(time);
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

// The winner among the tokens below `count` of which `weights(id)` is positive, or NO_TOKEN.
template <class Weights>
DEVICE uint32_t race(const Weights& weights, uint32_t count, const Noise& noise,
                     BlockScratch& scratch) {
    Scored best = {negative_infinity(), NO_TOKEN};
    Promise promise = {-1.0f, 0, 0, 0.0f, 0.0f};
    float bar = -negative_infinity();
    for (bool is_first = true; is_first || promise.second <= bar; is_first = false) {
        promise = next_promise(weights, count, noise, promise);
        if (promise.id != NO_TOKEN) {
            best = better(best, {race_score(noise, promise), promise.id});
        }
        if (is_first) {
            const double score = block_best(scratch, best).score;
            bar = static_cast<float>(exp(-score) * 16777216.0 * RACE_SLACK);
        } else if (promise.id == NO_TOKEN) {
            break;
        }
    }
    return block_best(scratch, best).id;
}
