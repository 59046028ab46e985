// From logits to decisions, one block a row. Drafting, it draws the next draft and settles whether to go on.
// For the target it decides at all rows at once whether the draft that follows is kept, given that those
// before it are, and what the target's own token is if it is not. All of it is a function of the row's own
// logits, its sequence and its drafts.
#include "prims.cuh"
#include "edit.cuh"
#include "race.cuh"
#include "truncate.cuh"

// Logits that share one Best.
constexpr uint32_t BEST_TILE = 64;

// One row of the pass.
struct Place {
    Context context;
    uint32_t sequence;
    uint32_t idx;  // drafts before it
    const float* logits;
    const Best* best;
    float* scores;
    float* weights;
    uint32_t vocab;
};

// Where the distribution of a sequence's draft is kept.
DEVICE uint64_t draft_place(const SampleParams& params, uint32_t sequence, uint32_t idx) {
    return static_cast<uint64_t>(sequence) * params.max_drafts + idx;
}

DEVICE float* draft_weights(const SampleParams& params, uint32_t sequence, uint32_t idx) {
    return params.draft_weights + draft_place(params, sequence, idx) * params.draft_vocab;
}

DEVICE Place place_of(const SampleParams& params, uint32_t sequence, uint32_t idx) {
    const uint64_t row = block_index();
    const uint32_t* drafts = params.drafts + draft_place(params, sequence, 0);
    float* weights = params.pass == VERIFY ? params.target_weights + row * params.vocab
                                           : draft_weights(params, sequence, idx);
    return {{params.sequences + sequence, params.words, drafts, idx},
            sequence,
            idx,
            params.logits + row * params.logits_stride,
            params.best + row * divide_up(params.logits_stride, BEST_TILE),
            params.scores + row * params.vocab,
            weights,
            params.vocab};
}

// Whether anybody wants to know what follows here.
DEVICE bool is_active(const SampleParams& params, uint32_t sequence, uint32_t idx) {
    const StepSequence& s = params.sequences[sequence];
    if (params.pass == VERIFY) {
        return s.len > 0 && idx <= num_drafted(params.drafting, sequence, params.max_drafts);
    }
    if (params.pass > 0) {
        return params.drafting[sequence].is_going != 0;
    }
    return s.len > 0 && s.num_fed > 0 && minimum(s.draft_len, params.max_drafts) > 0;
}

// The likeliest of tokens `first` to `end`; NO_TOKEN where there are none but NaN and negative infinity.
DEVICE Scored likeliest(const float* scores, uint32_t first, uint32_t end) {
    Scored best = {negative_infinity(), NO_TOKEN};
    for (uint32_t id = first + thread_index(); id < end; id += num_threads()) {
        if (scores[id] > negative_infinity()) {
            best = better(best, {scores[id], id});
        }
    }
    return best;
}

// The likeliest token of the logits as they came. Of a tile that is only partly of the vocabulary what the
// head has found does not count.
DEVICE Scored likeliest_logit(const Place& place, BlockScratch& scratch) {
    const uint32_t num_tiles = place.vocab / BEST_TILE;
    Scored best = likeliest(place.logits, num_tiles * BEST_TILE, place.vocab);
    for (uint32_t tile = thread_index(); tile < num_tiles; tile += num_threads()) {
        if (place.best[tile].value > negative_infinity()) {
            best = better(best, {place.best[tile].value, place.best[tile].index});
        }
    }
    return block_best(scratch, best);
}

// Greedy, or where nothing is left: the likeliest of the edited logits, of the logits as they came, or 0.
DEVICE Distribution certainty(const Place& place, const float* scores, BlockScratch& scratch) {
    Scored best = {negative_infinity(), NO_TOKEN};
    if (scores != place.logits) {
        best = block_best(scratch, likeliest(scores, 0, place.vocab));
    }
    if (best.id == NO_TOKEN) {
        best = likeliest_logit(place, scratch);
    }
    return {1.0, best.id == NO_TOKEN ? 0 : best.id, 0};
}

// The row's distribution; its weights are in place.
DEVICE Distribution distribution(const Place& place, RowScratch& scratch) {
    const StepSequence& s = *place.context.sequence;
    const float* scores = place.logits;
    if (edits(place.context)) {
        uint32_t* counts = reinterpret_cast<uint32_t*>(place.weights);
        edit(place.context, place.logits, place.scores, counts, place.vocab);
        scores = place.scores;
    }
    if (s.temperature == 0.0f) {
        return certainty(place, scores, scratch.block);
    }
    const float largest = largest_score(scores, place.vocab, scratch);
    if (largest == negative_infinity()) {
        return certainty(place, scores, scratch.block);
    }
    return {truncate(s, scores, place.vocab, largest, place.weights, scratch), NO_TOKEN, 0};
}

// The probability of the likeliest token before edits and temperature; 0 if there is none.
DEVICE float confidence(const Place& place, BlockScratch& scratch) {
    const float largest = static_cast<float>(likeliest_logit(place, scratch).score);
    double total = 0.0;
    for (uint32_t id = thread_index(); id < place.vocab; id += num_threads()) {
        total += static_cast<double>(exp_weight(place.logits[id] - largest));
    }
    total = block_sum(scratch, total);
    return total >= 1.0 ? static_cast<float>(1.0 / total) : 0.0f;
}

// A distribution that is read token by token.
struct Probabilities {
    Distribution of;
    const float* weights;
    uint32_t vocab;

    DEVICE double operator()(uint32_t id) const {
        if (of.certain != NO_TOKEN) {
            return id == of.certain ? 1.0 : 0.0;
        }
        return id < vocab ? static_cast<double>(weights[id]) / of.total : 0.0;
    }
};

// What is drawn from: the weights of p, or what p has beyond q, the distribution of a rejected draft.
struct Remainder {
    Probabilities p;
    Probabilities q;
    bool is_less;

    DEVICE float operator()(uint32_t id) const {
        const float weight = p.weights[id];
        if (!is_less || weight == 0.0f) {
            return weight;
        }
        if (q.of.certain != NO_TOKEN) {
            return id == q.of.certain ? 0.0f : weight;
        }
        return static_cast<float>(maximum(p(id) - q(id), 0.0));
    }
};

// Rejection sampling of one draft. Strict, with a coin above 0: a token that the target excludes is never
// kept.
DEVICE bool keeps(const Place& place, const Remainder& left, uint32_t token) {
    const Noise noise = {place.context.sequence->key, place.context.position(), COIN_LANE};
    return log(left.p(token)) > log(uniform(noise, 0)) + log(left.q(token));
}

DEVICE uint32_t draw(const Place& place, Remainder left, uint32_t lane, BlockScratch& scratch) {
    if (left.p.of.certain != NO_TOKEN) {
        return left.p.of.certain;
    }
    const Noise noise = {place.context.sequence->key, place.context.position(), lane};
    uint32_t token = NO_TOKEN;
    for (uint32_t attempt = 0; attempt < 2 && token == NO_TOKEN; attempt++) {
        token = race(left, place.vocab, noise, scratch);
        // Nothing is left only if p = q up to rounding; then p itself is as exact.
        left.is_less = false;
    }
    return token;
}

// Adds a token to the draft. Whether the next position is drafted is settled before its token is drawn, or q
// would be biased.
DEVICE void extend(const SampleParams& params, const Place& place, const Distribution& q,
                   uint32_t token, BlockScratch& scratch) {
    const StepSequence& s = *place.context.sequence;
    Drafting& drafting = params.drafting[place.sequence];
    float likelihood = place.idx == 0 ? 1.0f : drafting.likelihood;
    bool goes_on = place.idx + 1 < minimum(s.draft_len, params.max_drafts);
    if (goes_on && s.min_confidence > 0.0f) {
        likelihood *= confidence(place, scratch);
        goes_on = likelihood >= s.min_confidence;
    }
    // All threads have read the state.
    barrier_all();
    if (thread_index() == 0) {
        const uint64_t idx = draft_place(params, place.sequence, place.idx);
        params.drafts[idx] = token;
        params.draft_distributions[idx] = q;
        drafting = {place.idx + 1, goes_on ? 1u : 0u, likelihood, 0};
    }
}

// The draft that follows a row of the target, or NO_TOKEN.
DEVICE uint32_t next_draft(const SampleParams& params, uint32_t sequence, uint32_t idx) {
    const bool has_one = idx < num_drafted(params.drafting, sequence, params.max_drafts);
    return has_one ? params.drafts[draft_place(params, sequence, idx)] : NO_TOKEN;
}

DEVICE void settle(const SampleParams& params, uint32_t token, bool is_kept) {
    if (thread_index() == 0) {
        params.choices[block_index()] = {token, is_kept ? 1u : 0u};
    }
}

static_assert(sizeof(RowScratch) <= SAMPLE_SHARED_BYTES, "a block's shared memory holds it");

// A block a row.
KERNEL(sample, SampleParams, MAX_THREADS, 1) {
    grid_wait();
    grid_launch_dependents();
    RowScratch& scratch = *reinterpret_cast<RowScratch*>(shared_memory());
    const bool verifies = p.pass == VERIFY;
    const uint32_t rows = verifies ? p.max_drafts + 1 : 1;
    const uint32_t sequence = block_index() / rows;
    const uint32_t idx = verifies ? block_index() % rows : p.pass;
    if (!is_active(p, sequence, idx)) {
        // Later passes go by what the first one says.
        if (p.pass == 0 && thread_index() == 0) {
            p.drafting[sequence] = {p.sequences[sequence].num_given, 0, 0.0f, 0};
        }
        return;
    }
    const Place place = place_of(p, sequence, idx);
    const Distribution dist = distribution(place, scratch);
    const Probabilities own = {dist, place.weights, place.vocab};
    Remainder left = {own, own, false};
    const uint32_t coupling = p.sequences[sequence].coupling;
    const uint32_t draft = verifies ? next_draft(p, sequence, idx) : NO_TOKEN;
    if (draft != NO_TOKEN && coupling == INDEPENDENT) {
        left.q = {p.draft_distributions[draft_place(p, sequence, idx)],
                  draft_weights(p, sequence, idx), p.draft_vocab};
        left.is_less = true;
        if (keeps(place, left, draft)) {
            settle(p, draft, true);
            return;
        }
    }
    const uint32_t lane = verifies || coupling == PATH ? TARGET_LANE : DRAFT_LANE;
    const uint32_t token = draw(place, left, lane, scratch.block);
    if (verifies) {
        settle(p, token, coupling == PATH && token == draft);
    } else {
        extend(p, place, dist, token, scratch.block);
    }
}
