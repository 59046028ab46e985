// What the blocks of a row do side by side: copy and edit its logits, weigh all tokens, remember those that
// can win the race. Only rows that need one of these have more than one block at work.
#pragma once
#include "sample/noise.cuh"
#include "sample/truncate.cuh"

// What is to be done for a row, as all of its blocks see it.
struct Task {
    bool weighs;         // all tokens count: no top-k, no min-p without top-p
    bool keeps_weights;  // they are drawn from as they are: there is no top-p either
    bool clears;         // the row of weights, for the few that are put there in the end
    bool doubts;         // drafting goes on only if the model is sure enough

    DEVICE bool is_shared(const Place& place) const {
        return place.is_changed || weighs || clears || doubts;
    }
};

DEVICE Task task_of(const SampleParams& params, const Place& place) {
    const StepSequence& s = *place.context.sequence;
    const bool drafts = params.pass != VERIFY;
    const bool is_drawn = s.temperature != 0.0f;
    const bool has_cut = truncates(s, place.vocab);
    const bool has_floor = s.min_p != 0.0f && s.top_p == 1.0f;
    const uint32_t draft_len = minimum(s.draft_len, params.max_drafts);
    return {is_drawn && !has_top_k(s, place.vocab) && !has_floor,
            is_drawn && !has_cut,
            is_drawn && has_cut && drafts,
            drafts && s.min_confidence > 0.0f && place.idx + 1 < draft_len};
}

// Copies a range of the logits to where they are edited.
DEVICE void copy_logits(const Place& place, const Range& range) {
    for (uint32_t first = range.first + thread_index(); first < range.end;
         first += 4 * num_threads()) {
        float own[4];
        UNROLL
        for (uint32_t idx = 0; idx < 4; idx++) {
            const uint32_t id = first + idx * num_threads();
            own[idx] = id < range.end ? place.logits[id] : 0.0f;
        }
        UNROLL
        for (uint32_t idx = 0; idx < 4; idx++) {
            const uint32_t id = first + idx * num_threads();
            if (id < range.end) {
                place.scores[id] = own[idx];
            }
        }
    }
    barrier_all();
}

DEVICE Scored better_of_four(Scored best, uint32_t id, const Float4& four) {
    const float values[4] = {four.x, four.y, four.z, four.w};
    UNROLL
    for (uint32_t idx = 0; idx < 4; idx++) {
        if (values[idx] > negative_infinity()) {
            best = better(best, {values[idx], id + idx});
        }
    }
    return best;
}

// Finds the bests of the whole tiles of a range, eight lanes a tile.
DEVICE void find_bests(const Place& place, const Range& range) {
    const uint32_t end = range.end / BEST_TILE;
    const uint32_t stride = num_threads() / 8;
    for (uint32_t first = range.first / BEST_TILE + 4 * warp_index(); first < end; first += stride) {
        const uint32_t tile = first + lane_index() / 8;
        Scored best = {negative_infinity(), NO_TOKEN};
        if (tile < end) {
            const uint32_t id = tile * BEST_TILE + 4 * (lane_index() % 8);
            const Float4* fours = reinterpret_cast<const Float4*>(place.scores + id);
            const Float4 low = fours[0];
            const Float4 high = fours[8];
            best = better_of_four(better_of_four(best, id, low), id + 32, high);
        }
        UNROLL
        for (uint32_t mask = 4; mask > 0; mask /= 2) {
            best = better(best, {shuffle_xor(best.score, mask), shuffle_xor(best.id, mask)});
        }
        if (tile < end && lane_index() % 8 == 0) {
            place.score_best[tile] = {static_cast<float>(best.score), best.id};
        }
    }
}

// The weights are not there yet: their row is where an edit counts.
DEVICE void change(const Place& place, const Range& range) {
    copy_logits(place, range);
    edit(place.context, place.scores, reinterpret_cast<uint32_t*>(place.weights), range);
    find_bests(place, range);
}

DEVICE double sum_of(const Float4& four) {
    return (static_cast<double>(four.x) + static_cast<double>(four.y)) +
           (static_cast<double>(four.z) + static_cast<double>(four.w));
}

DEVICE Float4 weigh_four(const Weigh& weigh, const Float4& four) {
    return {weigh(four.x), weigh(four.y), weigh(four.z), weigh(four.w)};
}

// The total of a range's weights, which are written.
DEVICE double write_weights(const Place& place, const Range& range, const Weigh& weigh,
                            RowScratch& scratch) {
    double total = 0.0;
    each_four(place.values(), range, scratch.staging, [&](uint32_t id, const Float4& scores) {
        const Float4 weights = weigh_four(weigh, scores);
        store_four(place.weights, id, weights);
        total += sum_of(weights);
    });
    return block_sum(scratch.block, total);
}

DEVICE float below(float weight, float floor) {
    return weight < floor ? weight : 0.0f;
}

// The total of a range's weights, and of those below each floor.
DEVICE double measure_weights(const Place& place, const Range& range, const Weigh& weigh,
                              SlicePart& part, RowScratch& scratch) {
    double total = 0.0;
    float tails[NUM_FLOORS] = {};
    each_four(place.values(), range, scratch.staging, [&](uint32_t, const Float4& scores) {
        const Float4 weights = weigh_four(weigh, scores);
        total += sum_of(weights);
        UNROLL
        for (uint32_t idx = 0; idx < NUM_FLOORS; idx++) {
            const float floor = floor_of(idx);
            tails[idx] += below(weights.x, floor) + below(weights.y, floor) +
                          below(weights.z, floor) + below(weights.w, floor);
        }
    });
    UNROLL
    for (uint32_t idx = 0; idx < NUM_FLOORS; idx++) {
        const double tail = block_sum(scratch.block, static_cast<double>(tails[idx]));
        if (thread_index() == 0) {
            part.tails[idx] = static_cast<float>(tail);
        }
    }
    return block_sum(scratch.block, total);
}

// What the logits of a range weigh as they came.
DEVICE double weigh_raw(const Place& place, const Range& range, float largest,
                        RowScratch& scratch) {
    double total = 0.0;
    if (place.is_changed) {
        for (uint32_t id = range.first + thread_index(); id < range.end; id += num_threads()) {
            total += static_cast<double>(exp_weight(place.logits[id] - largest));
        }
    } else {
        each_four(place.logits, range, scratch.staging, [&](uint32_t, const Float4& four) {
            const Float4 weights = {exp_weight(four.x - largest), exp_weight(four.y - largest),
                                    exp_weight(four.z - largest), exp_weight(four.w - largest)};
            total += sum_of(weights);
        });
    }
    return block_sum(scratch.block, total);
}

// Remembers the tokens of a range that can win: so little noise has hardly any other.
DEVICE void remember(const Place& place, const Range& range, double total, const Noise& noise,
                     SlicePart& part, RowScratch& scratch) {
    if (thread_index() == 0) {
        scratch.num_listed = 0;
    }
    barrier_all();
    const float bar = PROMISING * 16777216.0f / static_cast<float>(total);
    each_four(place.weights, range, scratch.staging, [&](uint32_t id, const Float4& four) {
        // As what is beyond the range weighs less than nothing.
        const float weights[4] = {four.x, four.y, four.z, four.w};
        const float most = maximum(maximum(four.x, four.y), maximum(four.z, four.w));
        // Noise is expensive.
        if (most <= 0.0f) {
            return;
        }
        const Words words = leading_words(noise, id / 4);
        UNROLL
        for (uint32_t idx = 0; idx < 4; idx++) {
            const uint32_t word = words.at(idx);
            if (weights[idx] > 0.0f && static_cast<float>(word >> 8) <= bar * weights[idx]) {
                const uint32_t listed = atomic_add(&scratch.num_listed, 1);
                if (listed < MAX_PROMISING) {
                    part.listed[listed] = {id + idx, weights[idx]};
                }
            }
        }
    });
    barrier_all();
    if (thread_index() == 0) {
        const bool is_complete = scratch.num_listed <= MAX_PROMISING;
        part.num_listed = minimum(scratch.num_listed, MAX_PROMISING);
        part.bar = is_complete ? bar : 0.0f;
    }
}

// Weighs a slice and prepares the race of all its tokens.
DEVICE void weigh_slice(const Place& place, const Task& task, uint32_t slice, float largest,
                        const Noise& noise, RowScratch& scratch) {
    const Range range = slice_of(place.vocab, slice);
    const Weigh weigh = weigh_of(*place.context.sequence, largest);
    SlicePart& part = place.parts->slices[slice];
    double total;
    if (task.keeps_weights) {
        total = write_weights(place, range, weigh, scratch);
        remember(place, range, total, noise, part, scratch);
    } else {
        total = measure_weights(place, range, weigh, part, scratch);
    }
    if (thread_index() == 0) {
        part.total = total;
    }
}

DEVICE void clear(float* weights, const Range& range) {
    for (uint32_t id = range.first + 4 * thread_index(); id < range.end; id += 4 * num_threads()) {
        store_four(weights, id, {0.0f, 0.0f, 0.0f, 0.0f});
    }
}

// Everything of a slice but its weights.
DEVICE void prepare_slice(const Place& place, const Task& task, uint32_t slice,
                          RowScratch& scratch) {
    const Range range = slice_of(place.vocab, slice);
    if (task.doubts) {
        const Scored best = likeliest(place.logits, place.best, place.vocab, scratch);
        const float largest = static_cast<float>(best.score);
        const double total = weigh_raw(place, range, largest, scratch);
        if (thread_index() == 0) {
            place.parts->slices[slice].raw_total = total;
        }
    }
    if (place.is_changed) {
        change(place, range);
    }
    if (task.clears) {
        clear(place.weights, range);
    }
}
