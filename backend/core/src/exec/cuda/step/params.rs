//! The structs of `kernels/step/step.cuh`, field by field: what a speculative step is told
//! about its sequences, what its kernels tell each other, and what it answers. Addresses are the device's.
#![allow(unsafe_code)]

use crate::exec::cuda::device::pod::device_structs;
pub use crate::exec::cuda::model::params::{Best, NO_SEQUENCE, Row, Tile};

/// No such token.
pub const NO_TOKEN: u32 = u32::MAX;

/// The `pass` of the target; the passes of the drafter count from 0.
pub const VERIFY: u32 = u32::MAX;

/// Drafter and target draw with the same noise.
pub const PATH: u32 = 0;

/// They draw with different noise, and drafts are kept by rejection sampling.
pub const INDEPENDENT: u32 = 1;

/// Known tokens that a model which drafts a token a pass can catch up with in a step: the last one, and a draft that it has not
/// run.
pub const MAX_FED: usize = 2;

/// The drafter's cache is left with known tokens and all of its drafts but the last one.
pub const CACHE_OF_DRAFTS: u32 = 0;

/// It is the target's.
pub const CACHE_OF_TARGET: u32 = 1;

/// It is left with known tokens: drafts come from the rows of masks.
pub const CACHE_OF_KNOWN: u32 = 2;

/// Answers that the host can read while later steps run.
pub const ANSWERS: usize = 2;

/// Threads of a block of `rows`, which has any number of blocks, and of the one block of `accept`.
pub const ROWS_THREADS: u32 = 128;

/// Threads of a block of `sample`.
pub const SAMPLE_THREADS: u32 = 512;

/// Blocks of `sample` a row of logits.
pub const SAMPLE_SLICES: u32 = 8;

/// Shared memory of a block of `sample`.
pub const SAMPLE_SHARED_BYTES: u32 = 40_960;

/// What the blocks of a row of `sample` tell each other.
pub const SAMPLE_PARTS_BYTES: usize = 7_680;

/// Logits that share one [`Best`].
pub const BEST_TILE: usize = 64;

device_structs! {
    /// Some of the words that are uploaded beside the sequences.
    Span is 8 bytes {
        /// Index of the first one.
        first: u32,
        /// How many; the field says of what.
        count: u32,
    }

    /// One sequence of a step. The default is an unused place.
    StepSequence is 120 bytes {
        /// Of the noise.
        key: u64,
        /// Known tokens: the prompt, then what was generated; 0 is an unused place.
        len: u32,
        /// So many of the last known tokens go through the drafter; 0 if it is not kept in step or does not run at all.
        num_fed: u32,
        /// Reported as it is where `num_fed` is 0.
        draft_computed: u32,
        /// Drafts at most.
        draft_len: u32,
        /// Drafting goes on while the draft is held to be this likely; 0 is always.
        min_confidence: f32,
        /// `PATH` or `INDEPENDENT`.
        coupling: u32,
        /// How many of the known tokens are the prompt.
        prompt_len: u32,
        /// End tokens are banned before so many were generated.
        min_tokens: u32,
        /// 0 is greedy.
        temperature: f32,
        /// 0 keeps all.
        top_k: u32,
        /// 1 keeps all.
        top_p: f32,
        /// 0 keeps all.
        min_p: f32,
        /// 1 is off.
        repetition_penalty: f32,
        /// 0 is off.
        presence_penalty: f32,
        /// 0 is off.
        frequency_penalty: f32,
        /// Drafts that the host has written beside it; then the drafter proposes none.
        num_given: u32,
        /// The newest known tokens: all of them for a penalty, for bad words as many as the longest has before
        /// its last, else none.
        history: Span,
        /// Token and bits of the bias in turns; `count` pairs, stably sorted by token.
        biases: Span,
        /// `count` + 1 indices of words: entry i is the tokens from the i-th index to the next.
        bad_words: Span,
        /// What `min_tokens` bans.
        end_tokens: Span,
        /// Tokens that it has when it ends, at most.
        max_len: u32,
        /// The draft at which it parts from the others, where it is one of several branches:
        fork_depth: u32,
        /// there it takes the drafter's choice that so many are better than.
        fork_rank: u32,
        /// 1: its last known token has run already. The target's layers have no row of it, its head finds that row in the
        /// residual stream all the same.
        has_run: u32,
    }

    /// How far a sequence's draft has come; the kernels' own.
    Drafting is 16 bytes {
        /// Tokens.
        num_drafted: u32,
        /// Whether the next position is drafted.
        is_going: u32,
        /// Of the draft so far, as the drafter holds it.
        likelihood: f32,
        /// Undefined.
        unused: u32,
    }

    /// A distribution beside its row of weights; the kernels' own.
    Distribution is 16 bytes {
        /// Of the weights.
        total: f64,
        /// The token that has all probability, or `NO_TOKEN`.
        certain: u32,
        /// Undefined.
        unused: u32,
    }

    /// What the target decides at one row; the kernels' own.
    Choice is 8 bytes {
        /// Its own token.
        token: u32,
        /// Whether the draft at this position is kept.
        is_kept: u32,
    }

    /// What a step did for a sequence; its new tokens stand beside it.
    StepResult is 16 bytes {
        /// Accepted drafts and one more; 0 in an unused place.
        num_tokens: u32,
        /// Drafts that were verified.
        drafted: u32,
        /// How many of them were accepted.
        accepted: u32,
        /// Positions whose drafter KV is valid now, if it is a model; of a head the host knows.
        draft_computed: u32,
    }

    /// Arguments of `rows`. Of pass i of the drafter a sequence has `most_fed` + `num_masks` rows for i = 0 (the last known
    /// tokens, and a mask for each draft but the first where all come from that pass; of a head on hidden states the host writes
    /// the tables of that pass), else 1; of the target's pass `max_drafts` + 1. Each has as many tiles as its rows fill.
    RowsParams is 96 bytes {
        /// [`StepSequence`] each.
        sequences: u64,
        /// `[sequence][last_len]`: the last known tokens, in order.
        last_tokens: u64,
        /// [`Drafting`] each.
        drafting: u64,
        /// `[sequence][max_drafts]`.
        drafts: u64,
        /// [`Row`]s to write.
        rows: u64,
        /// [`Tile`]s to write.
        tiles: u64,
        /// Indices of the rows that get logits, to write: those that drafts come from, all for the target.
        head_rows: u64,
        /// Of the drafter, or `VERIFY`.
        pass: u32,
        /// Places of the batch.
        num_sequences: u32,
        /// Drafts at most, of any sequence.
        max_drafts: u32,
        /// A token beyond is fed as 0.
        vocab: u32,
        /// Most rows of a tile.
        tile_rows: u32,
        /// Positions that a row of a head on hidden states sees; 0 of a model.
        window: u32,
        /// Tokens of a sequence in `last_tokens`.
        last_len: u32,
        /// Places for known tokens.
        most_fed: u32,
        /// Rows behind them.
        num_masks: u32,
        /// What stands there.
        mask_token: u32,
    }

    /// Arguments of `sample`: `SAMPLE_SLICES` blocks a row, which is a sequence each when drafting and
    /// `max_drafts` + 1 each for the target. Rows of its own have places for [`weights_len`] floats.
    SampleParams is 120 bytes {
        /// [`StepSequence`] each.
        sequences: u64,
        /// What the spans point into.
        words: u64,
        /// `[row * row_step][logits_stride]`, f32.
        logits: u64,
        /// `[row * row_step][tiles of 64 logits]`, [`Best`].
        best: u64,
        /// `[row][scores_len(vocab)]`, f32: scratch.
        scores: u64,
        /// `[sequence][max_drafts][draft_vocab]`, f32: from the drafter's passes to `VERIFY`.
        draft_weights: u64,
        /// `[sequence][max_drafts]`, [`Distribution`]: likewise.
        draft_distributions: u64,
        /// `[row][vocab]`, f32: scratch of `VERIFY`.
        target_weights: u64,
        /// [`Drafting`] each.
        drafting: u64,
        /// `[sequence][max_drafts]`.
        drafts: u64,
        /// `[sequence][max_drafts + 1]`, [`Choice`]: written by `VERIFY`.
        choices: u64,
        /// `[row][SAMPLE_PARTS_BYTES]`: scratch, zeroed once.
        parts: u64,
        /// Of the drafter, or `VERIFY`.
        pass: u32,
        /// Drafts at most, of any sequence.
        max_drafts: u32,
        /// Tokens of this pass's distributions: `draft_vocab` when drafting.
        vocab: u32,
        /// Tokens that both models have.
        draft_vocab: u32,
        /// Outputs of the head.
        logits_stride: u32,
        /// Rows of logits from one row to the next: more than 1 where a pass has those of several drafts.
        row_step: u32,
    }

    /// Arguments of `accept`: one block.
    AcceptParams is 88 bytes {
        /// [`StepSequence`] each.
        sequences: u64,
        /// `[sequence][last_len]`: the last known tokens, in order.
        last_tokens: u64,
        /// [`Drafting`] each.
        drafting: u64,
        /// `[sequence][max_drafts]`.
        drafts: u64,
        /// `[sequence][max_drafts + 1]`, [`Choice`].
        choices: u64,
        /// This step's number, u32; left one higher.
        step: u64,
        /// [`ANSWERS`] of them, to write one; the step's number says which. [`StepResult`] each, then
        answers: u64,
        /// Of one of them.
        answer_bytes: u32,
        /// u32 `[sequence][max_drafts + 1]`, then
        tokens_offset: u32,
        /// u32, set to the step's number when everything else is written.
        done_offset: u32,
        /// Places of the batch.
        num_sequences: u32,
        /// Drafts at most, of any sequence.
        max_drafts: u32,
        /// Tokens of a sequence in `last_tokens`.
        last_len: u32,
        /// Known tokens that the next step may run: as many as the drafter has room for, the last one at least.
        most_fed: u32,
        /// One of `CACHE_OF_...`.
        draft_cache: u32,
    }
}

/// Places of a row of weights of `vocab` tokens: whole vectors.
pub fn weights_len(vocab: usize) -> usize {
    vocab.next_multiple_of(4)
}

/// Places of a row of edited logits, which the best of each tile follows.
pub fn scores_len(vocab: usize) -> usize {
    weights_len(vocab) + (2 * vocab.div_ceil(BEST_TILE)).next_multiple_of(4)
}

impl Distribution {
    /// All probability on one token.
    pub fn certain(token: u32) -> Self {
        Self { total: 1.0, certain: token, unused: 0 }
    }
}
