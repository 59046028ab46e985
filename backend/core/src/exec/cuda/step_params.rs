//! The structs of `kernels/step.cuh`, field by field: what a speculative step is told about its sequences, what its
//! kernels tell each other, and what it answers.

use super::device::Address;
use super::params::plain;

/// No such token.
pub const NO_TOKEN: u32 = u32::MAX;

/// The `pass` of the target; those of the drafter count from 0.
pub const VERIFY: u32 = u32::MAX;

/// Drafter and target draw with the same noise.
pub const PATH: u32 = 0;
/// They draw with different noise, and drafts are kept by rejection sampling.
pub const INDEPENDENT: u32 = 1;

/// Known tokens that the drafter can catch up with in a step.
pub const MAX_FED: usize = 2;

plain! {
    Span: 8, StepSequence: 112, Drafting: 16, Distribution: 16, Choice: 8, StepResult: 16,
    RowsParams: 72, SampleParams: 112, AcceptParams: 72,
}

/// Some of the words that are uploaded beside the sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Span {
    /// Index of the first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// One sequence of a step; `len` 0 is an unused place.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct StepSequence {
    /// Of the noise.
    pub key: u64,
    /// Known tokens.
    pub len: u32,
    /// So many of the last known tokens go through the drafter, at most [`MAX_FED`].
    pub num_fed: u32,
    /// The last known tokens, in order.
    pub last: [u32; MAX_FED],
    /// Reported as it is where `num_fed` is 0.
    pub draft_computed: u32,
    /// Drafts at most.
    pub draft_len: u32,
    /// Drafting goes on while the draft is held to be this likely.
    pub min_confidence: f32,
    /// [`PATH`] or [`INDEPENDENT`].
    pub coupling: u32,
    /// Known tokens that are the prompt.
    pub prompt_len: u32,
    /// End tokens are banned before so many were generated.
    pub min_tokens: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// 1 is off.
    pub repetition_penalty: f32,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// Drafts that the host has written; then the drafter proposes none.
    pub num_given: u32,
    /// The newest known tokens.
    pub history: Span,
    /// Pairs of a token and the bits of its bias, sorted by token.
    pub biases: Span,
    /// Where each bad word begins, and where the last one ends.
    pub bad_words: Span,
    /// What `min_tokens` bans.
    pub end_tokens: Span,
}

/// How far a sequence's draft has come.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Drafting {
    /// Drafts so far.
    pub num_drafted: u32,
    /// Whether the next position is drafted.
    pub is_going: u32,
    /// Of the draft so far.
    pub likelihood: f32,
    /// Zero.
    pub unused: u32,
}

/// A distribution beside its row of weights.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Distribution {
    /// Sum of the weights.
    pub total: f64,
    /// The one token that has all probability, or [`NO_TOKEN`].
    pub certain: u32,
    /// Zero.
    pub unused: u32,
}

impl Distribution {
    /// All probability on one token.
    pub fn certain(token: u32) -> Self {
        Self { total: 1.0, certain: token, unused: 0 }
    }
}

/// What the target decides at one row.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Choice {
    /// Its own token.
    pub token: u32,
    /// Whether the draft there is kept.
    pub is_kept: u32,
}

/// What a step did for a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct StepResult {
    /// Accepted drafts and one more; 0 in an unused place.
    pub num_tokens: u32,
    /// Drafts that were verified.
    pub drafted: u32,
    /// Of which so many were kept.
    pub accepted: u32,
    /// Positions whose drafter KV is valid, where the drafter itself drafted.
    pub draft_computed: u32,
}

/// Of `rows.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RowsParams {
    /// [`StepSequence`] a place.
    pub sequences: Address,
    /// [`Drafting`] a place.
    pub drafting: Address,
    /// u32 `[places][max_drafts]`.
    pub drafts: Address,
    /// [`Row`](super::params::Row)s, written.
    pub rows: Address,
    /// [`Tile`](super::params::Tile)s, written.
    pub tiles: Address,
    /// u32: rows that get logits, written.
    pub head_rows: Address,
    /// Pass of the drafter, or [`VERIFY`].
    pub pass: u32,
    /// Places.
    pub num_sequences: u32,
    /// Drafts of a place.
    pub max_drafts: u32,
    /// A token beyond is fed as 0.
    pub vocab: u32,
    /// Most rows of a tile.
    pub tile_rows: u32,
    /// Zero.
    pub unused: u32,
}

/// Of `sample.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct SampleParams {
    /// [`StepSequence`] a place.
    pub sequences: Address,
    /// What the spans point into.
    pub words: Address,
    /// f32 `[rows][logits_stride]`.
    pub logits: Address,
    /// [`Best`](super::params::Best) `[rows][tiles of 64 logits]`.
    pub best: Address,
    /// f32 `[rows][vocab]`, scratch.
    pub scores: Address,
    /// f32 `[places][max_drafts][draft_vocab]`.
    pub draft_weights: Address,
    /// [`Distribution`] `[places][max_drafts]`.
    pub draft_distributions: Address,
    /// f32 `[rows][vocab]`, scratch.
    pub target_weights: Address,
    /// [`Drafting`] a place.
    pub drafting: Address,
    /// u32 `[places][max_drafts]`.
    pub drafts: Address,
    /// [`Choice`] `[places][max_drafts + 1]`.
    pub choices: Address,
    /// Pass of the drafter, or [`VERIFY`].
    pub pass: u32,
    /// Drafts of a place.
    pub max_drafts: u32,
    /// Tokens of this pass's distributions.
    pub vocab: u32,
    /// Tokens that both models have.
    pub draft_vocab: u32,
    /// Outputs of the head.
    pub logits_stride: u32,
    /// Zero.
    pub unused: u32,
}

/// Of `accept.cu`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AcceptParams {
    /// [`StepSequence`] a place.
    pub sequences: Address,
    /// [`Drafting`] a place.
    pub drafting: Address,
    /// u32 `[places][max_drafts]`.
    pub drafts: Address,
    /// [`Choice`] `[places][max_drafts + 1]`.
    pub choices: Address,
    /// u32: the number of the step.
    pub step: Address,
    /// [`StepResult`] a place, written.
    pub results: Address,
    /// u32 `[places][max_drafts + 1]`, written.
    pub tokens: Address,
    /// u32: set to the step's number at the end.
    pub done: Address,
    /// Places.
    pub num_sequences: u32,
    /// Drafts of a place.
    pub max_drafts: u32,
}
