// A row of the pass: where it stands, what is sampled from, and how that is read: in fours, and by tiles
// whose best is known. A row is cut into slices of whole tiles, a block each, in the same way whatever runs
// beside it.
#pragma once
#include "sample/edit.cuh"
#include "sample/parts.cuh"

// Logits that share one Best.
constexpr uint32_t BEST_TILE = 64;

// Vectors that a thread has on their way at once.
constexpr uint32_t IN_FLIGHT = 4;

// One row of the pass.
struct Place {
    Context context;
    uint32_t sequence;
    uint32_t idx;         // drafts before it
    uint32_t vocab;
    const float* logits;  // as they came
    const Best* best;     // of each tile of them
    bool is_changed;      // what is sampled from is not the logits but a copy of them
    float* scores;        // that copy: edited, or to be aligned
    Best* score_best;
    float* weights;
    RowParts* parts;

    DEVICE const float* values() const {
        return is_changed ? scores : logits;
    }

    DEVICE const Best* value_best() const {
        return is_changed ? score_best : best;
    }
};

// Vectors are aligned in each of several rows.
DEVICE uint32_t whole_fours(uint32_t count) {
    return divide_up(count, 4u) * 4;
}

// Where the distribution of a sequence's draft is kept.
DEVICE uint64_t draft_place(const SampleParams& params, uint32_t sequence, uint32_t idx) {
    return static_cast<uint64_t>(sequence) * params.max_drafts + idx;
}

DEVICE float* draft_weights(const SampleParams& params, uint32_t sequence, uint32_t idx) {
    return params.draft_weights +
           draft_place(params, sequence, idx) * whole_fours(params.draft_vocab);
}

DEVICE Place place_of(const SampleParams& params, uint64_t row, uint32_t sequence, uint32_t idx) {
    const uint32_t* drafts = params.drafts + draft_place(params, sequence, 0);
    const Context context = {params.sequences + sequence, params.words, drafts, idx};
    const uint32_t scores_len = whole_fours(params.vocab);
    const uint32_t stride = scores_len + whole_fours(2 * divide_up(params.vocab, BEST_TILE));
    float* scores = params.scores + row * stride;
    float* weights = params.pass == VERIFY ? params.target_weights + row * scores_len
                                           : draft_weights(params, sequence, idx);
    const uint64_t logits_row = row * params.row_step;
    return {context,
            sequence,
            idx,
            params.vocab,
            params.logits + logits_row * params.logits_stride,
            params.best + logits_row * divide_up(params.logits_stride, BEST_TILE),
            edits(context) || params.logits_stride % 4 != 0,
            scores,
            reinterpret_cast<Best*>(scores + scores_len),
            weights,
            parts_of(params, row)};
}

// The tokens of a slice: all begin with a tile, and end with one, or with the vocabulary. The last may be
// empty.
DEVICE Range slice_of(uint32_t vocab, uint32_t slice) {
    const uint32_t each = divide_up(divide_up(vocab, BEST_TILE), SLICES) * BEST_TILE;
    const uint32_t first = slice * each;
    return first < vocab ? Range{first, minimum(first + each, vocab)} : Range{0, 0};
}

// Where each thread keeps the vectors that it has loaded.
using Staging = Float4[IN_FLIGHT][MAX_THREADS];

// Calls each(first id, four values), always from the same thread. What lies beyond the range is negative
// infinity. By way of shared memory, so that much is on its way though `each` is there but once: code that
// is run for the first time is slow to come, too.
template <class Each>
DEVICE void each_four(const float* values, const Range& range, Staging& staging, const Each& each) {
    const uint32_t end = divide_up(range.end, 4u);
    const uint32_t stride = IN_FLIGHT * num_threads();
    const uint32_t thread = thread_index();
    KEEP_LOOP
    for (uint32_t first = range.first / 4 + thread; first < end; first += stride) {
        Float4 fours[IN_FLIGHT] = {};
        UNROLL
        for (uint32_t idx = 0; idx < IN_FLIGHT; idx++) {
            const uint32_t four = first + idx * num_threads();
            if (four < end) {
                fours[idx] = reinterpret_cast<const Float4*>(values)[four];
            }
        }
        UNROLL
        for (uint32_t idx = 0; idx < IN_FLIGHT; idx++) {
            staging[idx][thread] = fours[idx];
        }
        KEEP_LOOP
        for (uint32_t idx = 0; idx < IN_FLIGHT; idx++) {
            const uint32_t id = 4 * (first + idx * num_threads());
            if (id >= range.end) {
                break;
            }
            Float4 four = staging[idx][thread];
            four.y = id + 1 < range.end ? four.y : negative_infinity();
            four.z = id + 2 < range.end ? four.z : negative_infinity();
            four.w = id + 3 < range.end ? four.w : negative_infinity();
            each(id, four);
        }
    }
}

DEVICE void store_four(float* values, uint32_t id, const Float4& four) {
    *reinterpret_cast<Float4*>(values + id) = four;
}
