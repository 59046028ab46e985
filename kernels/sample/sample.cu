// From logits to decisions, a few blocks a row, of which the last one decides. Drafting, it draws the next
// draft and settles whether to go on. For the target it decides at all rows at once whether the draft that
// follows is kept, given that those before it are, and what the target's own token is if it is not. All of
// it is a function of the row's own logits, its sequence and its drafts.
#include "common/prims.cuh"
#include "sample/race.cuh"

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

// Greedy, or where nothing is left: the likeliest of the edited logits, of the logits as they came, or 0.
DEVICE Distribution certainty(const Place& place, Scored best, RowScratch& scratch) {
    if (best.id == NO_TOKEN && place.is_changed) {
        best = likeliest(place.logits, place.best, place.vocab, scratch);
    }
    return {1.0, best.id == NO_TOKEN ? 0 : best.id, 0};
}

// Where the weights of a row are.
enum class Held {
    REMEMBERED,  // in their row, and those that can win the race with its slices
    LISTED,      // in shared memory
    WRITTEN,     // in their row
};

// A row's own distribution.
struct Own {
    Distribution of;
    Held held;
};

// Of a row whose slices are done; `best` is what is likeliest of what it is sampled from.
DEVICE Own own_distribution(const Place& place, const Task& task, const Scored& best,
                            RowScratch& scratch) {
    const StepSequence& s = *place.context.sequence;
    if (s.temperature == 0.0f || best.id == NO_TOKEN) {
        return {certainty(place, best, scratch), Held::WRITTEN};
    }
    const double total = task.weighs ? total_of(*place.parts, &SlicePart::total) : 0.0;
    if (task.keeps_weights) {
        recall(*place.parts, scratch);
        return {{total, NO_TOKEN, 0}, Held::REMEMBERED};
    }
    const Weigh weigh = weigh_of(s, static_cast<float>(best.score));
    const Truncated left = truncate(place, weigh, total, scratch);
    return {{left.total, NO_TOKEN, 0}, left.is_listed ? Held::LISTED : Held::WRITTEN};
}

// The probability of the likeliest token before edits and temperature; 0 if there is none.
DEVICE float confidence(const Place& place) {
    const double total = total_of(*place.parts, &SlicePart::raw_total);
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
    double total;  // of p's weights
    Probabilities q;
    bool is_less;
    // Not drawn again.
    const uint32_t* drawn;
    uint32_t num_drawn;

    DEVICE float operator()(uint32_t id, float weight) const {
        KEEP_LOOP
        for (uint32_t idx = 0; idx < num_drawn; idx++) {
            if (drawn[idx] == id) {
                return 0.0f;
            }
        }
        if (!is_less || weight == 0.0f) {
            return weight;
        }
        if (q.of.certain != NO_TOKEN) {
            return id == q.of.certain ? 0.0f : weight;
        }
        const double beyond = static_cast<double>(weight) / total - q(id);
        return static_cast<float>(maximum(beyond, 0.0));
    }

    // Whether it is of probabilities, not of weights.
    DEVICE bool is_normal() const {
        return is_less && q.of.certain == NO_TOKEN;
    }
};

DEVICE double probability(const Place& place, const Own& own, uint32_t token,
                          RowScratch& scratch) {
    if (own.held == Held::LISTED) {
        return static_cast<double>(listed_weight(token, scratch)) / own.of.total;
    }
    return Probabilities{own.of, place.weights, place.vocab}(token);
}

// Rejection sampling of one draft. Strict, with a coin above 0: a token that the target excludes is never
// kept.
DEVICE bool keeps(const Place& place, const Own& own, const Probabilities& q, uint32_t token,
                  RowScratch& scratch) {
    const Noise noise = {place.context.sequence->key, place.context.position(), COIN_LANE};
    const double p = probability(place, own, token, scratch);
    return log(p) > log(uniform(noise, 0)) + log(q(token));
}

DEVICE uint32_t race(const Place& place, const Own& own, const Remainder& left, const Noise& noise,
                     RowScratch& scratch) {
    if (own.held != Held::WRITTEN) {
        const Scored best = race_listed(left, left.is_normal() ? 1.0 : left.total, noise, scratch);
        const double bar = static_cast<double>(bar_of(*place.parts));
        if (own.held == Held::LISTED || is_won(best, left.is_normal() ? bar * left.total : bar)) {
            return best.id;
        }
    }
    const auto all = [&](uint32_t id) {
        return left(id, place.weights[id]);
    };
    return race_all(all, place.vocab, noise, scratch.block);
}

DEVICE uint32_t draw(const Place& place, const Own& own, Remainder left, const Noise& noise,
                     RowScratch& scratch) {
    if (own.of.certain != NO_TOKEN) {
        return own.of.certain;
    }
    uint32_t token = NO_TOKEN;
    for (uint32_t attempt = 0; attempt < 2 && token == NO_TOKEN; attempt++) {
        token = race(place, own, left, noise, scratch);
        // Nothing is left only if p = q up to rounding; then p itself is as exact.
        left.is_less = false;
    }
    return token;
}

// The token that `rank` others are better than: by the race, or where nothing is drawn by their logits.
DEVICE uint32_t draw_behind(const Place& place, const Own& own, uint32_t rank, const Noise& noise,
                            RowScratch& scratch) {
    if (own.of.certain != NO_TOKEN && rank > 0) {
        // What has all probability leaves nothing to draw.
        const bool is_greedy = place.context.sequence->temperature == 0.0f;
        Scored last = likeliest(place.values(), place.value_best(), place.vocab, scratch);
        KEEP_LOOP
        for (uint32_t idx = 0; idx < rank && last.id != NO_TOKEN; idx++) {
            last = next_likeliest(place.values(), place.value_best(), place.vocab, last, scratch);
        }
        return is_greedy ? last.id : NO_TOKEN;
    }
    KEEP_LOOP
    for (uint32_t idx = 0;; idx++) {
        const Remainder left = {own.of.total, {}, false, scratch.drawn, idx};
        const uint32_t token = draw(place, own, left, noise, scratch);
        if (idx == rank || token == NO_TOKEN) {
            return token;
        }
        if (thread_index() == 0) {
            scratch.drawn[idx] = token;
        }
        barrier_all();
    }
}

// Puts the listed weights where the target's pass will look for them. The rest of their row is clear.
DEVICE void scatter(const Place& place, const RowScratch& scratch) {
    for (uint32_t idx = thread_index(); idx < scratch.num_listed; idx += num_threads()) {
        if (scratch.values[idx] > 0.0f) {
            place.weights[scratch.ids[idx]] = scratch.values[idx];
        }
    }
}

// Adds a token to the draft. Whether the next position is drafted is settled before its token is drawn, or q
// would be biased.
DEVICE void extend(const SampleParams& params, const Place& place, const Distribution& q,
                   uint32_t token) {
    const StepSequence& s = *place.context.sequence;
    Drafting& drafting = params.drafting[place.sequence];
    float likelihood = place.idx == 0 ? 1.0f : drafting.likelihood;
    bool goes_on = place.idx + 1 < minimum(s.draft_len, params.max_drafts);
    if (goes_on && s.min_confidence > 0.0f) {
        likelihood *= confidence(place);
        goes_on = likelihood >= s.min_confidence;
    }
    // All threads have read the state.
    barrier_all();
    if (thread_index() == 0 && token == NO_TOKEN) {
        // There are not so many.
        drafting = {place.idx, 0, 0.0f, 0};
    } else if (thread_index() == 0) {
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

DEVICE void settle(const SampleParams& params, uint64_t row, uint32_t token, bool is_kept) {
    if (thread_index() == 0) {
        params.choices[row] = {token, is_kept ? 1u : 0u};
    }
}

// Of a row of the target.
DEVICE void choose(const SampleParams& params, uint64_t row, const Place& place, const Own& own,
                   const Noise& noise, RowScratch& scratch) {
    const bool is_path = place.context.sequence->coupling == PATH;
    const uint32_t draft = next_draft(params, place.sequence, place.idx);
    Remainder left = {own.of.total, {own.of, nullptr, 0}, false, nullptr, 0};
    if (draft != NO_TOKEN && !is_path) {
        left.q = {params.draft_distributions[draft_place(params, place.sequence, place.idx)],
                  draft_weights(params, place.sequence, place.idx), params.draft_vocab};
        left.is_less = true;
        if (keeps(place, own, left.q, draft, scratch)) {
            settle(params, row, draft, true);
            return;
        }
    }
    const uint32_t token = draw(place, own, left, noise, scratch);
    settle(params, row, token, is_path && token == draft);
}

// Weighs this block's slice, where that is asked for. True in the block that decides, with the likeliest of
// what the row is sampled from.
DEVICE bool finish_row(const Place& place, const Task& task, uint32_t slice, const Noise& noise,
                       Scored& best, RowScratch& scratch) {
    best = likeliest(place.logits, place.best, place.vocab, scratch);
    uint32_t first = slice;
    uint32_t end = slice + 1;
    KEEP_LOOP
    for (bool is_guess = true;; is_guess = false) {
        for (uint32_t each = first; task.weighs && best.id != NO_TOKEN && each < end; each++) {
            weigh_slice(place, task, each, static_cast<float>(best.score), noise, scratch);
        }
        if (!is_guess) {
            barrier_all();
            return true;
        }
        if (task.is_shared(place) && !is_last(*place.parts, &scratch.is_last)) {
            return false;
        }
        // That the largest logit is still the largest score is a guess until all slices are edited.
        const double guess = best.score;
        if (place.is_changed) {
            best = likeliest(place.scores, place.score_best, place.vocab, scratch);
        }
        if (best.score == guess) {
            return true;
        }
        first = 0;
        end = SLICES;
    }
}

static_assert(sizeof(RowScratch) <= SAMPLE_SHARED_BYTES, "a block's shared memory holds it");

// SLICES blocks a row.
KERNEL(sample, SampleParams, MAX_THREADS, 1) {
    grid_wait();
    grid_launch_dependents();
    RowScratch& scratch = *reinterpret_cast<RowScratch*>(shared_memory());
    const bool verifies = p.pass == VERIFY;
    const uint32_t rows = verifies ? p.max_drafts + 1 : 1;
    const uint32_t row = block_index() / SLICES;
    const uint32_t slice = block_index() % SLICES;
    const uint32_t sequence = row / rows;
    const uint32_t idx = verifies ? row % rows : p.pass;
    const Place place = place_of(p, row, sequence, idx);
    const Task task = task_of(p, place);
    const bool is_shared = task.is_shared(place);
    // Before it reads what the first block writes.
    if (slice != 0 && !is_shared) {
        return;
    }
    if (!is_active(p, sequence, idx)) {
        // Later passes go by what the first one says.
        if (p.pass == 0 && slice == 0 && thread_index() == 0) {
            p.drafting[sequence] = {p.sequences[sequence].num_given, 0, 0.0f, 0};
        }
        return;
    }
    const bool is_path = p.sequences[sequence].coupling == PATH;
    const uint32_t lane =
        verifies || is_path ? TARGET_LANE : DRAFT_LANE | idx << LANE_BITS;
    const Noise noise = {p.sequences[sequence].key, place.context.position(), lane};
    if (is_shared) {
        prepare_slice(place, task, slice, scratch);
    }
    Scored best;
    if (!finish_row(place, task, slice, noise, best, scratch)) {
        return;
    }
    const Own own = own_distribution(place, task, best, scratch);
    if (verifies) {
        choose(p, row, place, own, noise, scratch);
        return;
    }
    const StepSequence& s = p.sequences[sequence];
    const uint32_t rank = idx == s.fork_depth ? s.fork_rank : 0;
    const uint32_t token = draw_behind(place, own, rank, noise, scratch);
    if (own.held == Held::LISTED) {
        scatter(place, scratch);
    }
    extend(p, place, own.of, token);
}
