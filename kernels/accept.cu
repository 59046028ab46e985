// Ends a step: follows each sequence's kept drafts to the target's own token and tells the host.
#include "prims.cuh"
#include "step.cuh"

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
// given drafts the drafter has seen nothing.
DEVICE uint32_t draft_computed(const StepSequence& s, uint32_t drafted, uint32_t accepted) {
    if (s.num_fed == 0) {
        return s.draft_computed;
    }
    const uint32_t fed = drafted == 0 || s.num_given > 0 ? 0 : drafted - 1;
    return s.len + minimum(fed, accepted);
}

DEVICE void settle(const AcceptParams& params, uint32_t sequence) {
    const StepSequence& s = params.sequences[sequence];
    if (s.len == 0) {
        params.results[sequence] = {0, 0, 0, 0};
        return;
    }
    const uint32_t drafted = num_drafted(params.drafting, sequence, params.max_drafts);
    const uint32_t first_row = sequence * (params.max_drafts + 1);
    const Choice* choices = params.choices + first_row;
    const uint32_t accepted = num_accepted(choices, drafted);
    uint32_t* tokens = params.tokens + first_row;
    for (uint32_t idx = 0; idx < accepted; idx++) {
        tokens[idx] = params.drafts[sequence * params.max_drafts + idx];
    }
    tokens[accepted] = choices[accepted].token;
    params.results[sequence] = {accepted + 1, drafted, accepted,
                                draft_computed(s, drafted, accepted)};
}

// One block.
KERNEL(accept, AcceptParams, ACCEPT_THREADS, 1) {
    grid_wait();
    grid_launch_dependents();
    for (uint32_t sequence = thread_index(); sequence < p.num_sequences;
         sequence += num_threads()) {
        settle(p, sequence);
    }
    barrier_all();
    if (thread_index() == 0) {
        store_release_system(p.done, *p.step);
    }
}
