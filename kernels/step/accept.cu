// Ends a step: follows each sequence's kept drafts to the target's own token, tells the host, and leaves
// the sequences as the next step finds them, if the host has it go on from here.
#include "common/prims.cuh"
#include "step/step.cuh"

constexpr uint32_t ACCEPT_THREADS = 128;

// Drafts that were kept, each after all before it.
DEVICE uint32_t num_accepted(const Choice* choices, uint32_t drafted) {
    uint32_t accepted = 0;
    while (accepted < drafted && choices[accepted].is_kept) {
        accepted++;
    }
    return accepted;
}

// Positions whose drafter KV is valid: the last draft was never fed, what follows a rejected one is stale. Of
// given drafts the drafter has seen nothing, of its own neither where they come from masks. On the target's cache all that
// was kept is valid, and must not be written by a drafter again.
DEVICE uint32_t draft_computed(const AcceptParams& params, const StepSequence& s, uint32_t drafted, uint32_t accepted) {
    if (params.draft_cache == CACHE_OF_TARGET) {
        return s.len + accepted;
    }
    if (s.num_fed == 0) {
        return s.draft_computed;
    }
    const bool has_run_drafts = params.draft_cache == CACHE_OF_DRAFTS && s.num_given == 0 && drafted > 0;
    const uint32_t fed = has_run_drafts ? drafted - 1 : 0;
    return s.len + minimum(fed, accepted);
}

// Where this step's answer stands.
struct Answer {
    StepResult* results;
    uint32_t* tokens;
    uint32_t* done;
};

DEVICE Answer answer_of(const AcceptParams& params) {
    uint8_t* answer = params.answers + *params.step % ANSWERS * params.answer_bytes;
    return {reinterpret_cast<StepResult*>(answer),
            reinterpret_cast<uint32_t*>(answer + params.tokens_offset),
            reinterpret_cast<uint32_t*>(answer + params.done_offset)};
}

// Puts the kept drafts and the target's token behind the last known ones, as many as the next step may run. What was written
// for the host is far away.
DEVICE void append(const AcceptParams& params, uint32_t sequence, const uint32_t* drafts, uint32_t accepted,
                   uint32_t token) {
    uint32_t* last = params.last_tokens + sequence * params.last_len;
    for (uint32_t idx = params.last_len - params.most_fed; idx < params.last_len; idx++) {
        const uint32_t from = idx + accepted + 1;
        const uint32_t draft = from - params.last_len;
        last[idx] = from < params.last_len ? last[from] : draft < accepted ? drafts[draft] : token;
    }
}

// The sequence after `result`. What it was given to edit logits with stays, so
// the host has no sequence go on whose edits look at its newest tokens.
DEVICE void advance(const AcceptParams& params, StepSequence& s, const StepResult& result) {
    s.len += result.num_tokens;
    s.num_given = 0;
    s.has_run = 0;
    s.draft_computed = result.draft_computed;
    if (s.len >= s.max_len) {
        s.len = 0;
        return;
    }
    // The target adds a token to the drafts.
    s.draft_len = minimum(s.draft_len, s.max_len - s.len - 1);
    // What the drafter has not seen: the last token at least.
    s.num_fed = s.draft_len == 0 ? 0 : minimum(s.len - s.draft_computed, params.most_fed);
}

DEVICE void settle(const AcceptParams& params, const Answer& answer, uint32_t sequence) {
    StepSequence& s = params.sequences[sequence];
    if (s.len == 0) {
        answer.results[sequence] = {0, 0, 0, 0};
        return;
    }
    const uint32_t drafted = num_drafted(params.drafting, sequence, params.max_drafts);
    const uint32_t first_row = sequence * (params.max_drafts + 1);
    const Choice* choices = params.choices + first_row;
    const uint32_t accepted = num_accepted(choices, drafted);
    uint32_t* tokens = answer.tokens + first_row;
    const uint32_t* drafts = params.drafts + sequence * params.max_drafts;
    for (uint32_t idx = 0; idx < accepted; idx++) {
        tokens[idx] = drafts[idx];
    }
    tokens[accepted] = choices[accepted].token;
    const StepResult result = {accepted + 1, drafted, accepted,
                               draft_computed(params, s, drafted, accepted)};
    answer.results[sequence] = result;
    append(params, sequence, drafts, accepted, choices[accepted].token);
    advance(params, s, result);
}

// One block.
KERNEL(accept, AcceptParams, ACCEPT_THREADS, 1) {
    grid_wait();
    grid_launch_dependents();
    const Answer answer = answer_of(p);
    for (uint32_t sequence = thread_index(); sequence < p.num_sequences;
         sequence += num_threads()) {
        settle(p, answer, sequence);
    }
    barrier_all();
    if (thread_index() == 0) {
        const uint32_t step = *p.step;
        store_release_system(answer.done, step);
        *p.step = step + 1;
    }
}
