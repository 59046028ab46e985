//! The memory of speculative steps: what is uploaded, what the kernels tell each other, what comes back.

use super::device::{Address, Device, Shared};
use super::step_params::{
    Choice, Distribution, Drafting, SAMPLE_PARTS_BYTES, StepResult, StepSequence, scores_len,
    weights_len,
};
use crate::Result;
use crate::engine::{Limits, Manifest};
use crate::pages::pages_for;

/// Words for histories, biases and bad words of all sequences of a step; those that do not fit are decided about on
/// the host.
pub(super) const MAX_WORDS: usize = 1 << 20;

/// How large a step may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepCapacity {
    /// Sequences.
    pub(super) sequences: usize,
    /// Drafts of a sequence.
    pub(super) drafts: usize,
    /// Width of the page table.
    pub(super) max_pages: usize,
    /// Outputs of the target's head.
    pub(super) vocab_size: usize,
    /// Tokens that both models have.
    pub(super) draft_vocab: usize,
}

impl StepCapacity {
    /// What the target's steps need; `draft_vocab` is 0 where no model drafts on the device.
    pub(super) fn of(target: &Manifest, draft_vocab: usize) -> Self {
        let Limits { max_batch_size, max_draft_len, max_seq_len, .. } = target.limits;
        Self {
            sequences: max_batch_size,
            drafts: max_draft_len,
            max_pages: pages_for(max_seq_len),
            vocab_size: target.model.vocab_size,
            draft_vocab,
        }
    }
}

/// Arrays on the device; the host writes the first six and `step`.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepBuffers {
    /// [`StepSequence`] a place.
    pub(super) sequences: Address,
    /// u32.
    pub(super) words: Address,
    /// [`Drafting`] a place.
    pub(super) drafting: Address,
    /// u32 `[sequences][drafts]`.
    pub(super) drafts: Address,
    /// [`Distribution`] `[sequences][drafts]`.
    pub(super) draft_distributions: Address,
    /// u32 `[sequences][max_pages]`.
    pub(super) pages: Address,
    /// u32: the number of the step.
    pub(super) step: Address,
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
    /// Results, tokens and the step's number, seen by the host.
    pub(super) answer: Shared,
    capacity: StepCapacity,
}

impl StepBuffers {
    /// Bytes on the device.
    pub(super) fn bytes(capacity: &StepCapacity) -> usize {
        sizes(capacity).into_iter().map(aligned).sum()
    }

    /// Allocates all of it.
    pub(super) fn alloc(capacity: StepCapacity, device: &mut dyn Device) -> Result<Self> {
        let mut next = device.alloc(Self::bytes(&capacity))?;
        let mut places = sizes(&capacity).into_iter().map(|bytes| {
            let address = next;
            next += aligned(bytes) as Address;
            address
        });
        let mut place = || places.next().expect("a size for each field");
        let answer = device.alloc_shared(Answer::bytes(&capacity))?;
        // In the order of the sizes.
        Ok(Self {
            sequences: place(),
            words: place(),
            drafting: place(),
            drafts: place(),
            draft_distributions: place(),
            pages: place(),
            step: place(),
            scores: place(),
            target_weights: place(),
            draft_weights: place(),
            choices: place(),
            parts: place(),
            answer,
            capacity,
        })
    }

    /// Where the kernels put what comes back.
    pub(super) fn answer(&self) -> Answer {
        let Shared { device, .. } = self.answer;
        let StepCapacity { sequences, drafts, .. } = self.capacity;
        let tokens = device + (sequences * size_of::<StepResult>()) as Address;
        let done = tokens + (sequences * (drafts + 1) * size_of::<u32>()) as Address;
        Answer { results: device, tokens, done }
    }
}

/// Bytes of the arrays on the device, in the order of the fields.
fn sizes(capacity: &StepCapacity) -> [usize; 12] {
    let StepCapacity { sequences, drafts, max_pages, vocab_size, draft_vocab } = *capacity;
    let rows = sequences * (drafts + 1);
    [
        sequences * size_of::<StepSequence>(),
        MAX_WORDS * size_of::<u32>(),
        sequences * size_of::<Drafting>(),
        sequences * drafts * size_of::<u32>(),
        sequences * drafts * size_of::<Distribution>(),
        sequences * max_pages * size_of::<u32>(),
        size_of::<u32>(),
        rows * scores_len(vocab_size) * size_of::<f32>(),
        rows * weights_len(vocab_size) * size_of::<f32>(),
        sequences * drafts * weights_len(draft_vocab) * size_of::<f32>(),
        rows * size_of::<Choice>(),
        rows * SAMPLE_PARTS_BYTES,
    ]
}

fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(256)
}

/// Addresses of what comes back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    /// [`StepResult`] a place.
    pub(super) results: Address,
    /// u32 `[sequences][drafts + 1]`.
    pub(super) tokens: Address,
    /// u32.
    pub(super) done: Address,
}

impl Answer {
    /// Where the tokens stand in the memory that the host sees.
    pub(super) fn tokens_offset(&self) -> usize {
        (self.tokens - self.results) as usize
    }

    fn bytes(capacity: &StepCapacity) -> usize {
        let StepCapacity { sequences, drafts, .. } = *capacity;
        sequences * (size_of::<StepResult>() + (drafts + 1) * size_of::<u32>()) + size_of::<u32>()
    }
}
