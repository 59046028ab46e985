// What the tokens before a position change about its logits: bias, then bans, then penalties, as the host's
// `sampling::context` has them. Drafted tokens count like generated ones. Each block edits a range of the
// tokens.
#pragma once
#include "common/exact.cuh"
#include "step/step.cuh"

// Tokens, without the end.
struct Range {
    uint32_t first;
    uint32_t end;

    DEVICE bool has(uint32_t id) const {
        return first <= id && id < end;
    }
};

// What stands before a row.
struct Context {
    const StepSequence* sequence;
    const uint32_t* words;
    const uint32_t* drafts;  // taken as generated here
    uint32_t num_drafts;

    DEVICE uint32_t position() const {
        return sequence->len + num_drafts;
    }

    DEVICE uint32_t num_known() const {
        return sequence->history.count + num_drafts;
    }

    // The idx-th of the tokens that were uploaded and the drafts.
    DEVICE uint32_t token(uint32_t idx) const {
        const Span& history = sequence->history;
        return idx < history.count ? words[history.first + idx] : drafts[idx - history.count];
    }

    DEVICE bool is_prompt(uint32_t idx) const {
        return idx + sequence->len < sequence->prompt_len + sequence->history.count;
    }

    DEVICE bool ends_with(const uint32_t* suffix, uint32_t count) const {
        if (count > num_known()) {
            return false;
        }
        uint32_t same = 0;
        while (same < count && suffix[same] == token(num_known() - count + same)) {
            same++;
        }
        return same == count;
    }
};

DEVICE bool penalises(const StepSequence& s) {
    return s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f ||
           s.frequency_penalty != 0.0f;
}

DEVICE bool bans_ends(const Context& context) {
    const StepSequence& s = *context.sequence;
    return context.position() - s.prompt_len < s.min_tokens;
}

// Whether the row's logits are to be changed at all.
DEVICE bool edits(const Context& context) {
    const StepSequence& s = *context.sequence;
    return s.biases.count > 0 || s.bad_words.count > 0 || bans_ends(context) || penalises(s);
}

DEVICE void add_biases(const Context& context, float* scores, const Range& range) {
    const Span& span = context.sequence->biases;
    const uint32_t* pairs = context.words + span.first;
    for (uint32_t idx = thread_index(); idx < span.count; idx += num_threads()) {
        const uint32_t token = pairs[2 * idx];
        const bool is_first = idx == 0 || pairs[2 * idx - 2] != token;
        // Entries of one token are added by one thread, in their order.
        for (uint32_t same = idx; is_first && range.has(token) && same < span.count; same++) {
            if (pairs[2 * same] != token) {
                break;
            }
            scores[token] += bits_float(pairs[2 * same + 1]);
        }
    }
}

// Several threads may ban the same token. As integers nothing is above negative infinity but negative NaN,
// which counts as negative infinity.
DEVICE void ban(float* scores, const Range& range, uint32_t token) {
    if (range.has(token)) {
        atomic_max(reinterpret_cast<uint32_t*>(scores + token), float_bits(negative_infinity()));
    }
}

DEVICE void ban_all(const Context& context, float* scores, const Range& range) {
    const StepSequence& s = *context.sequence;
    if (bans_ends(context)) {
        for (uint32_t idx = thread_index(); idx < s.end_tokens.count; idx += num_threads()) {
            ban(scores, range, context.words[s.end_tokens.first + idx]);
        }
    }
    const uint32_t* starts = context.words + s.bad_words.first;
    for (uint32_t idx = thread_index(); idx < s.bad_words.count; idx += num_threads()) {
        const uint32_t* word = context.words + starts[idx];
        const uint32_t before = starts[idx + 1] - starts[idx] - 1;
        if (context.ends_with(word, before)) {
            ban(scores, range, word[before]);
        }
    }
}

// In the count of a token: it is in the prompt; somebody has penalised it.
constexpr uint32_t IN_PROMPT = 1u << 31;
constexpr uint32_t PENALISED = 1u << 30;

DEVICE float penalised(const StepSequence& s, float logit, uint32_t count) {
    const float factor = s.repetition_penalty;
    logit = logit > 0.0f ? logit / factor : product(logit, factor);
    logit = sum(logit, -product(s.frequency_penalty, static_cast<float>(count)));
    return sum(logit, count > 0 ? -s.presence_penalty : -0.0f);
}

// `counts` has a place for each token.
DEVICE void penalise(const Context& context, float* scores, uint32_t* counts, const Range& range) {
    const StepSequence& s = *context.sequence;
    for (uint32_t id = range.first + thread_index(); id < range.end; id += num_threads()) {
        counts[id] = 0;
    }
    barrier_all();
    // Only the repetition penalty asks for the prompt.
    for (uint32_t idx = thread_index(); idx < context.num_known(); idx += num_threads()) {
        const uint32_t token = context.token(idx);
        if (range.has(token) && !context.is_prompt(idx)) {
            atomic_add(&counts[token], 1);
        } else if (range.has(token) && s.repetition_penalty != 1.0f) {
            atomic_or(&counts[token], IN_PROMPT);
        }
    }
    barrier_all();
    // Whoever comes first for a token penalises it.
    for (uint32_t idx = thread_index(); idx < context.num_known(); idx += num_threads()) {
        const uint32_t token = context.token(idx);
        if (!range.has(token)) {
            continue;
        }
        const uint32_t count = atomic_or(&counts[token], PENALISED);
        if (count != 0 && (count & PENALISED) == 0) {
            scores[token] = penalised(s, scores[token], count & (PENALISED - 1));
        }
    }
}

// Edits the copy of a range of the logits; all threads see it. `counts` is scratch of the same size.
DEVICE void edit(const Context& context, float* scores, uint32_t* counts, const Range& range) {
    add_biases(context, scores, range);
    barrier_all();
    ban_all(context, scores, range);
    barrier_all();
    if (penalises(*context.sequence)) {
        penalise(context, scores, counts, range);
        barrier_all();
    }
}
