//! What a step's kernels are told about its sequences, packed for the upload.

use super::step_params::{INDEPENDENT, MAX_FED, PATH, Span, StepSequence};
use crate::batch::Entry;
use crate::sampling::{Coupling, SamplingParams};

/// Sequences and the words that they point into.
#[derive(Debug, Default)]
pub(super) struct StepInput {
    /// One a place.
    pub(super) sequences: Vec<StepSequence>,
    /// Tokens, biases and indices.
    pub(super) words: Vec<u32>,
}

impl StepInput {
    /// Adds a sequence of which `num_fed` tokens go through the drafter, that drafts up to `draft_len` or was
    /// given `num_given`.
    pub(super) fn push(
        &mut self,
        entry: &Entry<'_>,
        num_fed: usize,
        draft_len: usize,
        num_given: usize,
    ) {
        let params = entry.sampler.params();
        let (coupling, key) = match entry.sampler.coupling() {
            Coupling::Path(key) => (PATH, key),
            Coupling::Independent(key) => (INDEPENDENT, key),
        };
        let len = entry.tokens.len();
        let mut last = [0; MAX_FED];
        let known = len.min(MAX_FED);
        last[MAX_FED - known..].copy_from_slice(&entry.tokens[len - known..]);
        let held_back = if params.min_tokens > 0 { entry.sampler.end_tokens() } else { &[] };
        let sequence = StepSequence {
            key,
            len: len as u32,
            num_fed: num_fed as u32,
            last,
            draft_computed: entry.draft_computed as u32,
            draft_len: draft_len as u32,
            min_confidence: entry.min_confidence,
            coupling,
            prompt_len: entry.prompt_len as u32,
            min_tokens: params.min_tokens as u32,
            temperature: params.temperature,
            top_k: params.top_k as u32,
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            num_given: num_given as u32,
            history: self.span(&entry.tokens[len - history_len(params, len)..]),
            biases: self.biases(params),
            bad_words: self.bad_words(params),
            end_tokens: self.span(held_back),
        };
        self.sequences.push(sequence);
    }

    fn span(&mut self, words: &[u32]) -> Span {
        let first = self.words.len() as u32;
        self.words.extend_from_slice(words);
        Span { first, count: words.len() as u32 }
    }

    /// Pairs of a token and the bits of its bias; entries of one token stay in order, as they add up in it.
    fn biases(&mut self, params: &SamplingParams) -> Span {
        let mut biases = params.logit_bias.clone();
        biases.sort_by_key(|&(token, _)| token);
        let first = self.words.len() as u32;
        self.words.extend(biases.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]));
        Span { first, count: biases.len() as u32 }
    }

    /// Where each word begins, and where the last one ends; the words stand behind.
    fn bad_words(&mut self, params: &SamplingParams) -> Span {
        let words = &params.bad_words;
        if words.is_empty() {
            return Span::default();
        }
        let first = self.words.len() as u32;
        let mut begin = first + words.len() as u32 + 1;
        self.words.push(begin);
        for word in words {
            begin += word.len() as u32;
            self.words.push(begin);
        }
        words.iter().for_each(|word| self.words.extend_from_slice(word));
        Span { first, count: words.len() as u32 }
    }
}

/// Words that a sequence takes.
pub(super) fn num_words(entry: &Entry<'_>) -> usize {
    let params = entry.sampler.params();
    let bad: usize = params.bad_words.iter().map(|word| word.len() + 1).sum();
    let history = history_len(params, entry.tokens.len());
    history + 2 * params.logit_bias.len() + bad + 1 + entry.sampler.end_tokens().len()
}

/// Newest tokens that edits look at: all for a penalty, for bad words as many as the longest has before its last.
fn history_len(params: &SamplingParams, len: usize) -> usize {
    let penalises = params.repetition_penalty != 1.0
        || params.presence_penalty != 0.0
        || params.frequency_penalty != 0.0;
    let longest = params.bad_words.iter().map(Vec::len).max().unwrap_or(0);
    if penalises { len } else { longest.saturating_sub(1).min(len) }
}
