// What a speculative step is told about its sequences, what its kernels tell each other, and what it
// answers. The host has the same structs, field by field: the executor's `step_params.rs`.
// The host uploads it anew, or has the next step go on from where `accept` has left it.
#pragma once
#include "common/types.cuh"

// No such token.
constexpr uint32_t NO_TOKEN = 0xffffffffu;

// The `pass` of the target; the passes of the drafter count from 0.
constexpr uint32_t VERIFY = 0xffffffffu;

// How the randomness of a sequence is keyed.
constexpr uint32_t PATH = 0;         // drafter and target draw with the same noise
constexpr uint32_t INDEPENDENT = 1;  // with different noise: drafts are kept by rejection sampling

// Known tokens that a model which drafts a token a pass can catch up with in a step: the last one, and a draft that it has
// not run.
constexpr uint32_t MAX_FED = 2;

// What the drafter's cache is left with behind a step.
constexpr uint32_t CACHE_OF_DRAFTS = 0;  // known tokens and all of its drafts but the last one
constexpr uint32_t CACHE_OF_TARGET = 1;  // it is the target's: all that was kept
constexpr uint32_t CACHE_OF_KNOWN = 2;   // known tokens: drafts come from the rows of masks

// Answers that the host can read while later steps run.
constexpr uint32_t ANSWERS = 2;

// Shared memory of a block of `sample`, and what the blocks of a row tell each other.
constexpr uint32_t SAMPLE_SHARED_BYTES = 40960;
constexpr uint32_t SAMPLE_PARTS_BYTES = 7680;

// Some of the words that are uploaded beside the sequences.
struct Span {
    uint32_t first;
    uint32_t count;
};
static_assert(sizeof(Span) == 8, "as on the host");

// One sequence of a step; `len` 0 is an unused place.
struct StepSequence {
    uint64_t key;  // of the noise
    uint32_t len;  // known tokens: the prompt, then what was generated
    // So many of the last known tokens go through the drafter; 0 if it is not kept in step or does not run at all.
    uint32_t num_fed;
    uint32_t draft_computed;  // reported as it is where num_fed is 0
    uint32_t draft_len;       // drafts at most
    float min_confidence;     // drafting goes on while the draft is held to be so likely; 0 is always
    uint32_t coupling;        // PATH or INDEPENDENT
    uint32_t prompt_len;
    uint32_t min_tokens;  // end tokens are banned before so many were generated
    float temperature;    // 0 is greedy
    uint32_t top_k;       // 0 keeps all
    float top_p;          // 1 keeps all
    float min_p;          // 0 keeps all
    float repetition_penalty;  // 1 is off
    float presence_penalty;
    float frequency_penalty;
    // Drafts that the host has written, with a Drafting that counts them and a certain Distribution each;
    // then draft_len is 0.
    uint32_t num_given;
    // The newest known tokens: all of them for a penalty, for bad words as many as the longest has before
    // its last, else none.
    Span history;
    Span biases;  // token and bits of the bias in turns; `count` pairs, stably sorted by token
    // `count` + 1 indices of words: entry i is the tokens from the i-th index to the next.
    Span bad_words;
    Span end_tokens;  // what min_tokens bans
    uint32_t max_len;  // tokens it has when it ends, at most
    // One of several branches of a draft, whose drafts are drawn as the target draws its tokens: this draft is the
    // drafter's choice that so many are better than.
    uint32_t fork_depth;
    uint32_t fork_rank;
    // 1: its last known token has run already. The target's layers have no row of it, its head finds that row in the
    // residual stream all the same.
    uint32_t has_run;
};
static_assert(sizeof(StepSequence) == 120, "as on the host");

// How far a sequence's draft has come. Written by `sample` in each pass of the drafter, before that by the
// host where drafts are given.
struct Drafting {
    uint32_t num_drafted;
    uint32_t is_going;  // whether the next position is drafted
    float likelihood;
    uint32_t unused;
};
static_assert(sizeof(Drafting) == 16, "as on the host");

// A distribution beside its row of weights: token i has probability weights[i] / total. The row is not
// written where one token has all probability.
struct Distribution {
    double total;
    uint32_t certain;  // that token, or NO_TOKEN
    uint32_t unused;
};
static_assert(sizeof(Distribution) == 16, "as on the host");

// What the target decides at one row.
struct Choice {
    uint32_t token;  // its own; of no meaning where the draft is kept by rejection sampling
    uint32_t is_kept;
};
static_assert(sizeof(Choice) == 8, "as on the host");

// What a step did for a sequence; its new tokens stand beside it.
struct StepResult {
    uint32_t num_tokens;  // accepted drafts and one more; 0 in an unused place
    uint32_t drafted;
    uint32_t accepted;
    uint32_t draft_computed;  // positions whose drafter KV is valid, if it is a model; of a head the host knows
};
static_assert(sizeof(StepResult) == 16, "as on the host");

// Of pass i of the drafter a sequence has most_fed + num_masks rows for i = 0 (the last known tokens, and a mask for each
// draft but the first where all come from that pass; of a head on hidden states the host writes the tables of that pass),
// else 1; of the target's pass max_drafts + 1. Each has as many tiles as its rows fill.
struct RowsParams {
    const StepSequence* sequences;
    const uint32_t* last_tokens;  // [sequence][last_len]: the last known tokens, in order
    const Drafting* drafting;
    const uint32_t* drafts;  // [sequence][max_drafts]
    Row* rows;
    Tile* tiles;
    uint32_t* head_rows;  // rows that get logits: those that drafts come from, all for the target
    uint32_t pass;
    uint32_t num_sequences;
    uint32_t max_drafts;
    uint32_t vocab;      // a token beyond is fed as 0
    uint32_t tile_rows;  // most rows of a tile
    uint32_t window;     // positions that a row of a head on hidden states sees; 0 of a model
    uint32_t last_len;
    uint32_t most_fed;   // places for known tokens
    uint32_t num_masks;
    uint32_t mask_token;
};
static_assert(sizeof(RowsParams) == 96, "as on the host");

// SLICES blocks a row: a sequence each when drafting, max_drafts + 1 each for the target. Rows of
// floats that are not the head's are padded to whole fours, as are the tiles of `scores`.
struct SampleParams {
    const StepSequence* sequences;
    const uint32_t* words;  // what the Spans point into
    const float* logits;    // [row * row_step][logits_stride]
    const Best* best;       // [row * row_step][tiles of 64 logits]
    float* scores;          // [row][vocab, then a Best a tile], scratch
    // [sequence][max_drafts][draft_vocab] and [sequence][max_drafts]: from the drafter's passes to VERIFY.
    float* draft_weights;
    Distribution* draft_distributions;
    float* target_weights;  // [row][vocab], scratch of VERIFY
    Drafting* drafting;
    uint32_t* drafts;  // [sequence][max_drafts]
    Choice* choices;   // [sequence][max_drafts + 1], written by VERIFY
    void* parts;       // [row][SAMPLE_PARTS_BYTES], zeroed once
    uint32_t pass;
    uint32_t max_drafts;
    uint32_t vocab;        // tokens of this pass's distributions: draft_vocab when drafting
    uint32_t draft_vocab;  // tokens that both models have
    uint32_t logits_stride;  // outputs of the head
    uint32_t row_step;       // rows of logits from one row to the next: more than 1 where a pass has those of several drafts
};
static_assert(sizeof(SampleParams) == 120, "as on the host");

struct AcceptParams {
    StepSequence* sequences;
    uint32_t* last_tokens;    // [sequence][last_len]
    const Drafting* drafting;
    const uint32_t* drafts;   // [sequence][max_drafts]
    const Choice* choices;    // [sequence][max_drafts + 1]
    uint32_t* step;           // this step's number; left one higher
    // [ANSWERS], the step's number says which: StepResult [sequence], then
    uint8_t* answers;
    uint32_t answer_bytes;
    uint32_t tokens_offset;   // u32 [sequence][max_drafts + 1], then
    uint32_t done_offset;     // u32, set to the step's number when everything else is written
    uint32_t num_sequences;
    uint32_t max_drafts;
    uint32_t last_len;
    uint32_t most_fed;     // known tokens that the next step may run: the drafter's places, 1 at least for the target
    uint32_t draft_cache;  // one of CACHE_OF_...
};
static_assert(sizeof(AcceptParams) == 88, "as on the host");

// Drafts that the target verifies.
DEVICE uint32_t num_drafted(const Drafting* drafting, uint32_t sequence, uint32_t max_drafts) {
    // Without passes of the drafter nobody has written its state.
    return max_drafts == 0 ? 0 : minimum(drafting[sequence].num_drafted, max_drafts);
}
