//! The memory of speculative steps: what is uploaded, what the kernels tell each other, what comes back.

use super::branches::step_limits;
use super::params::{
    ANSWERS, Choice, Distribution, Drafting, MAX_FED, SAMPLE_PARTS_BYTES, StepResult, StepSequence,
    scores_len, weights_len,
};
use crate::Result;
use crate::engine::Manifest;
use crate::exec::cuda::device::arrays;
use crate::exec::cuda::device::{Address, Device, Shared};
use crate::exec::cuda::model::ResidualRows;
use crate::pages::pages_for;

/// Words for histories, biases and bad words of all sequences of a step; those that do not fit are decided about on
/// the host.
pub(super) const MAX_WORDS: usize = 1 << 20;

/// How large a step may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepCapacity {
    pub(super) sequences: usize,
    /// Of sequences, and of branches of their drafts: more than those where the branches of few are more.
    pub(super) places: usize,
    /// Drafts of a sequence.
    pub(super) drafts: usize,
    /// Width of the page table.
    pub(super) max_pages: usize,
    /// Outputs of the target's head.
    pub(super) vocab_size: usize,
    /// Tokens that both models have.
    pub(super) draft_vocab: usize,
    /// Width of the target's residual stream.
    pub(super) hidden_size: usize,
}

impl StepCapacity {
    /// What the target's steps need; `draft_vocab` is 0 where no model drafts on the device. Drafts have up to `branches`.
    pub(super) fn of(target: &Manifest, draft_vocab: usize, branches: usize) -> Self {
        let limits = &target.limits;
        Self {
            sequences: limits.max_batch_size,
            places: step_limits(limits, branches).max_batch_size,
            drafts: limits.max_draft_len,
            max_pages: pages_for(limits.max_seq_len),
            vocab_size: target.model.vocab_size,
            draft_vocab,
            hidden_size: target.model.hidden_size,
        }
    }

    /// Places of the smallest recorded step that has so many: no more than the sequences of a pass, as long as these fit.
    pub(super) fn places_for(&self, count: usize) -> usize {
        let most = if count <= self.sequences { self.sequences } else { self.places };
        count.next_power_of_two().min(most)
    }

    /// Known tokens of a sequence that a drafter may have to run in a step: all that the step before has brought, or
    /// [`MAX_FED`].
    pub(super) fn last_len(&self) -> usize {
        MAX_FED.max(self.drafts + 1)
    }
}

/// Arrays on the device. The host uploads the first eight.
#[derive(Clone)]
pub(super) struct StepBuffers {
    /// [`StepSequence`] a place.
    pub(super) sequences: Address,
    /// u32 `[sequences][last_len]`.
    pub(super) last_tokens: Address,
    /// [`Drafting`] a place.
    pub(super) drafting: Address,
    /// u32 `[sequences][drafts]`.
    pub(super) drafts: Address,
    /// [`Distribution`] `[sequences][drafts]`.
    pub(super) draft_distributions: Address,
    /// u32: the number of the step.
    pub(super) step: Address,
    /// u32.
    pub(super) words: Address,
    /// u32 `[sequences][max_pages]`.
    pub(super) pages: Address,
    /// f32 `[rows][scores_len(vocab)]`.
    pub(super) scores: Address,
    /// f32 `[rows][weights_len(vocab)]`.
    pub(super) target_weights: Address,
    /// f32 `[sequences][drafts][weights_len(draft_vocab)]`.
    pub(super) draft_weights: Address,
    /// [`Choice`] `[sequences][drafts + 1]`.
    pub(super) choices: Address,
    /// What the blocks of each row tell each other.
    pub(super) parts: Address,
    /// A place each: its last known row, where that has run ahead of the graph.
    pub(super) last_rows: ResidualRows,
    /// [`ANSWERS`] times results, tokens and the step's number, seen by the host.
    pub(super) answers: Shared,
    /// Where those stand.
    pub(super) answer: Answer,
}

/// Arrays that are uploaded, the first ones.
const UPLOADED: usize = 8;

impl StepBuffers {
    /// Bytes on the device.
    pub(super) fn bytes(capacity: &StepCapacity) -> usize {
        arrays::total(&sizes(capacity))
    }

    pub(super) fn uploaded_bytes(capacity: &StepCapacity) -> usize {
        arrays::total(&sizes(capacity)[..UPLOADED])
    }

    pub(super) fn uploaded_len(&self) -> usize {
        (self.scores - self.sequences) as usize
    }

    pub(super) fn alloc(capacity: &StepCapacity, device: &mut dyn Device) -> Result<Self> {
        let [
            sequences,
            last_tokens,
            drafting,
            drafts,
            draft_distributions,
            step,
            words,
            pages,
            scores,
            target_weights,
            draft_weights,
            choices,
            parts,
            last_values,
            last_squares,
        ] = arrays::alloc(sizes(capacity), device)?;
        let answer = Answer::of(capacity);
        let answers = device.alloc_shared(ANSWERS * answer.bytes)?;
        let last_rows = ResidualRows {
            values: last_values,
            squares: last_squares,
            hidden: capacity.hidden_size,
        };
        Ok(Self {
            sequences,
            last_tokens,
            drafting,
            drafts,
            draft_distributions,
            step,
            words,
            pages,
            scores,
            target_weights,
            draft_weights,
            choices,
            parts,
            last_rows,
            answers,
            answer,
        })
    }
}

/// Bytes of the arrays on the device, in the order of the fields.
fn sizes(capacity: &StepCapacity) -> [usize; 15] {
    let StepCapacity { places: sequences, drafts, max_pages, vocab_size, draft_vocab, .. } =
        *capacity;
    let [last_values, last_squares] = ResidualRows::bytes(sequences, capacity.hidden_size);
    let rows = sequences * (drafts + 1);
    [
        sequences * size_of::<StepSequence>(),
        sequences * capacity.last_len() * size_of::<u32>(),
        sequences * size_of::<Drafting>(),
        sequences * drafts * size_of::<u32>(),
        sequences * drafts * size_of::<Distribution>(),
        size_of::<u32>(),
        MAX_WORDS * size_of::<u32>(),
        sequences * max_pages * size_of::<u32>(),
        rows * scores_len(vocab_size) * size_of::<f32>(),
        rows * weights_len(vocab_size) * size_of::<f32>(),
        sequences * drafts * weights_len(draft_vocab) * size_of::<f32>(),
        rows * size_of::<Choice>(),
        rows * SAMPLE_PARTS_BYTES,
        last_values,
        last_squares,
    ]
}

/// What comes back of a step: [`StepResult`]s from its beginning on, then tokens, then the step's number.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// Of all of it.
    pub(super) bytes: usize,
    /// u32 `[sequences][drafts + 1]`.
    pub(super) tokens: usize,
    /// u32.
    pub(super) done: usize,
}

impl Answer {
    fn of(capacity: &StepCapacity) -> Self {
        let StepCapacity { places: sequences, drafts, .. } = *capacity;
        let tokens = sequences * size_of::<StepResult>();
        let done = tokens + sequences * (drafts + 1) * size_of::<u32>();
        Self { bytes: arrays::aligned(done + size_of::<u32>()), tokens, done }
    }
}
