//! Two models that are functions of the tokens before, and sequences to be continued with them.

use spec_core::sampling::SamplingParams;
use spec_core::testing::Shares;
use spec_core::testing::batch::{Branching, DraftLens, Entry};
use spec_core::testing::cuda::step::{Branched, params::MAX_FED};
use spec_core::testing::sampling::{Coupling, Sampler};
use std::sync::Arc;

/// The logits of a sequence (by its place) after some tokens.
pub(crate) type Model = Arc<dyn Fn(usize, &[u32]) -> Vec<f32> + Send + Sync>;

/// A target, a drafter, and how many drafts a step has room for.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) target: Model,
    pub(crate) target_vocab: usize,
    pub(crate) drafter: Model,
    pub(crate) drafter_vocab: usize,
    pub(crate) max_drafts: usize,
    /// Whether the drafter's passes are part of the step.
    pub(crate) drafting: bool,
    /// Whether the drafter is a part of the target, on its cache.
    pub(crate) on_targets_cache: bool,
    /// The token behind which all drafts but the first come from the pass of the first, if they do.
    pub(crate) mask: Option<u32>,
    /// Whether the models look at nothing but the number of tokens: then no kernel waits for them.
    pub(crate) blind: bool,
}

impl World {
    /// Tokens that both models have.
    pub(crate) fn shared_vocab(&self) -> usize {
        self.target_vocab.min(self.drafter_vocab)
    }

    /// Known tokens that the drafter has room for in a step.
    pub(crate) fn most_fed(&self) -> usize {
        if self.mask.is_some() { self.max_drafts + 1 } else { MAX_FED }
    }
}

/// Tokens that a sequence may still get: some steps end it.
const MAX_NEW: usize = 5;

/// A sequence in the middle of its generation.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    pub(crate) draft_computed: usize,
    pub(crate) speculates: bool,
    pub(crate) draft_len: usize,
    /// Drafts that came with the request.
    pub(crate) given: Vec<u32>,
    pub(crate) min_confidence: f32,
    pub(crate) sampler: Sampler,
    /// Which branch of a draft it is.
    pub(crate) branch: Branched,
    /// Whether its last known token has run ahead of the step.
    pub(crate) has_run: bool,
}

impl Sequence {
    /// One generated token less than the drafter knows of, `draft_len` drafts wanted.
    pub(crate) fn new(tokens: &[u32], params: &SamplingParams, coupling: Coupling) -> Self {
        Self {
            tokens: tokens.to_vec(),
            prompt_len: 1,
            draft_computed: tokens.len() - 1,
            speculates: true,
            draft_len: 0,
            given: Vec::new(),
            min_confidence: 0.0,
            sampler: Sampler::new(params.clone(), coupling, Vec::new()),
            branch: Branched::Alone,
            has_run: false,
        }
    }

    pub(crate) fn entry(&self, id: usize) -> Entry<'_> {
        Entry {
            id: id as u64,
            tokens: &self.tokens,
            prompt_len: self.prompt_len,
            max_len: self.tokens.len() + MAX_NEW,
            computed: self.tokens.len() - 1,
            chunk: 1,
            draft_computed: self.draft_computed,
            is_read: true,
            speculates: self.speculates,
            draft_lens: DraftLens::both(self.draft_len),
            branching: Branching::CHAIN,
            given: &self.given,
            min_confidence: self.min_confidence,
            pages: &[],
            prompt_rows: 0,
            shares: Shares::All,
            sampler: &self.sampler,
        }
    }
}

/// SplitMix64: test inputs from a seed.
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In 0 to `end`, without it.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Uniform.
    pub(crate) fn within(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    pub(crate) fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}
