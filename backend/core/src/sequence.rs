//! A request in the runtime: its tokens, how far the caches are, what it may still generate, and
//! what it has counted. The scheduler alone changes one while it runs.

use crate::batch::{Emitted, Outcome};
use crate::pages::{PageId, PageKey};
use crate::sampling::Sampler;
use std::sync::Arc;

/// Names a sequence for as long as the runtime lives.
pub type SequenceId = u64;

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It drew this end token, which is the last token emitted.
    Stop(u32),
    /// The caller found a stop word in its text.
    StopWord,
    /// It reached `max_tokens`, or the engine's `max_seq_len`.
    Length,
    /// The caller wanted no more of it.
    Cancelled,
    /// The caller's time for it was up.
    Deadline,
    /// The executor failed in a step that it took part in.
    Failed,
}

/// What scheduling needs to know of a request, beside its prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// The model's end tokens.
    pub end_tokens: Vec<u32>,
    /// Whether `end_tokens` are generated past.
    pub ignore_eos: bool,
    /// The request's own end tokens, honoured whatever `ignore_eos` says.
    pub stop_tokens: Vec<u32>,
    /// Draft tokens in a step at most; 0 is plain decoding.
    pub draft_len: usize,
    /// Whether drafts are always that long, as far as there is room; else as long as pays.
    pub is_fixed: bool,
    /// Lower is served first.
    pub priority: u32,
    /// Its index among the rows of one request, which share that request's turn.
    pub row: usize,
}

/// With whom a sequence shares the pages that it begins with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shares {
    /// With no other.
    NoOne,
    /// With all that share so and begin alike.
    #[default]
    All,
    /// With those of them that have the same key in front of their first page.
    Behind(PageKey),
}

/// What a sequence has counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps that verified a draft.
    pub drafts: u64,
    /// Steps that gave tokens.
    pub steps: u64,
    /// Draft tokens verified.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Steps in which the draft token at this position was accepted.
    pub accepted_per_position: Vec<u64>,
    /// Times that it lost its pages and was computed again.
    pub preemptions: u64,
    /// Known tokens that it found computed when it started, or started again.
    pub reused_tokens: u64,
    /// The pages that held them.
    pub reused_pages: u64,
    /// Pages that it took empty, without those of rejected drafts.
    pub new_pages: u64,
}

impl Counters {
    /// Steps that accepted exactly 0, 1, 2, ... draft tokens: all steps that gave tokens, in all.
    pub fn histogram(&self) -> Vec<u64> {
        let reached: Vec<u64> =
            std::iter::once(self.steps).chain(self.accepted_per_position.iter().copied()).collect();
        let further = reached[1..].iter().copied().chain([0]);
        reached.iter().zip(further).map(|(at, next)| at.saturating_sub(next)).collect()
    }

    fn count(&mut self, drafted: usize, accepted: usize) {
        self.steps += 1;
        self.drafts += u64::from(drafted > 0);
        self.drafted += drafted as u64;
        self.accepted += accepted as u64;
        if self.accepted_per_position.len() < accepted {
            self.accepted_per_position.resize(accepted, 0);
        }
        self.accepted_per_position[..accepted].iter_mut().for_each(|count| *count += 1);
    }
}

/// A request in the runtime.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Its name.
    pub id: SequenceId,
    /// The prompt, then what was generated. Sequences of one prompt share it until they generate.
    pub tokens: Arc<Vec<u32>>,
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// Positions whose target KV is valid: fewer than `tokens`, until it ends.
    pub(crate) computed: usize,
    /// Positions whose drafter KV is valid, at most `computed`.
    pub(crate) draft_computed: usize,
    /// Whether a model that drafts reads it; settled when it starts, or starts again.
    pub(crate) is_read: bool,
    /// Positions that it found computed when it started, or started again.
    pub(crate) found: usize,
    /// Its pages, in order.
    pub(crate) pages: Vec<PageId>,
    /// How many of `pages` are kept for others, the first ones: they are not written any more.
    pub(crate) kept_pages: usize,
    /// What its first pages hold, once full; known before they are computed. Shared as `tokens` are.
    pub(crate) page_keys: Arc<Vec<PageKey>>,
    /// With whom it shares the pages that it begins with.
    pub(crate) shares: Shares,
    pub(crate) sampler: Sampler,
    pub(crate) limits: Limits,
    /// Draft tokens that came with the request, for the step that ends the prompt.
    pub(crate) given: Vec<u32>,
    /// Tokens of the prompt that have been told about, where the request wants to hear how likely they are. Of the
    /// first there is nothing to tell.
    pub(crate) told: usize,
    /// What it has counted.
    pub counters: Counters,
    /// Why it ended, once it has.
    pub finish: Option<FinishReason>,
}

impl Sequence {
    /// A request that has not been computed yet.
    pub(crate) fn new(
        id: SequenceId,
        prompt: Arc<Vec<u32>>,
        sampler: Sampler,
        limits: Limits,
    ) -> Self {
        Self {
            id,
            prompt_len: prompt.len(),
            tokens: prompt,
            computed: 0,
            draft_computed: 0,
            is_read: false,
            found: 0,
            pages: Vec::new(),
            kept_pages: 0,
            page_keys: Arc::default(),
            shares: Shares::default(),
            sampler,
            limits,
            given: Vec::new(),
            told: 1,
            counters: Counters::default(),
            finish: None,
        }
    }

    /// What was generated.
    pub fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Whether rows of its prompt have to be computed for what they tell, even if their caches were there.
    pub(crate) fn tells_of_prompt(&self) -> bool {
        self.sampler.params().prompt_logprobs.is_some() && self.told < self.prompt_len
    }

    /// Rows of the next `chunk` that tell of tokens of the prompt: the last ones, but for that of the last known token.
    pub(crate) fn prompt_rows(&self, chunk: usize) -> usize {
        // The row before a token tells of it.
        let end = (self.computed + chunk).min(self.prompt_len - 1);
        let first = self.computed + self.num_told_rows();
        if self.tells_of_prompt() { end.saturating_sub(first) } else { 0 }
    }

    /// Of the next rows the first ones, which have told before: it lost their pages.
    pub(crate) fn num_told_rows(&self) -> usize {
        (self.told - 1).saturating_sub(self.computed)
    }

    /// The next `chunk` has told of so many tokens of the prompt.
    pub(crate) fn tell(&mut self, chunk: usize, num_tokens: usize) {
        assert_eq!(num_tokens, self.prompt_rows(chunk), "each token of a prompt is told of once");
        self.told += num_tokens;
    }

    /// Whether it has run before and lost its pages, as long as it waits to run again.
    pub(crate) fn is_paused(&self) -> bool {
        self.counters.preemptions > 0
    }

    /// Whether all its known tokens but the last are computed, and that one was generated.
    pub(crate) fn decodes(&self) -> bool {
        self.pending() == 1 && !self.generated().is_empty()
    }

    /// Known tokens that the target has not computed.
    pub(crate) fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Positions that the drafter's cache is behind the target's.
    pub(crate) fn draft_lag(&self) -> usize {
        self.computed - self.draft_computed
    }

    /// Tokens it has at most when it ends.
    pub(crate) fn max_len(&self) -> usize {
        self.prompt_len + self.limits.max_tokens
    }

    /// Tokens it may still generate under `max_seq_len`.
    pub(crate) fn remaining(&self, max_seq_len: usize) -> usize {
        let by_request = self.limits.max_tokens.saturating_sub(self.generated().len());
        by_request.min(max_seq_len.saturating_sub(self.tokens.len()))
    }

    /// The most drafts worth verifying in a step: the target adds a token of its own to them, so one
    /// fewer than remain.
    pub(crate) fn useful_draft_len(&self, max_seq_len: usize) -> usize {
        self.limits.draft_len.min(self.remaining(max_seq_len).saturating_sub(1))
    }

    /// How many of the given draft tokens are worth verifying, behind the prompt.
    pub(crate) fn useful_given_len(&self, max_seq_len: usize) -> usize {
        match self.generated() {
            [] => self.given.len().min(self.remaining(max_seq_len).saturating_sub(1)),
            _ => 0,
        }
    }

    /// Takes in what a step did with `chunk` known tokens, and returns the tokens that count: none
    /// after one that ends the sequence.
    pub(crate) fn apply(
        &mut self,
        chunk: usize,
        speculates: bool,
        outcome: Outcome,
        max_seq_len: usize,
    ) -> Vec<Emitted> {
        let samples = chunk == self.pending();
        assert_eq!(
            !outcome.tokens.is_empty(),
            samples,
            "tokens come iff the last one was computed"
        );
        assert!(outcome.accepted <= outcome.drafted, "more drafts accepted than verified");
        self.computed += chunk;
        let mut emitted = outcome.tokens;
        if samples {
            assert_eq!(
                emitted.len(),
                outcome.accepted + 1,
                "the accepted drafts and one token more"
            );
            self.counters.count(outcome.drafted, outcome.accepted);
            self.extend(&mut emitted, max_seq_len);
            // The last token has no KV yet: a step's accepted drafts have, its final token has not.
            self.computed = self.tokens.len() - 1;
        }
        // A drafter that was not asked need not know how far it is; it cannot have lost anything.
        let kept = if speculates { 0 } else { self.draft_computed };
        self.draft_computed = outcome.draft_computed.max(kept).min(self.computed);
        emitted
    }

    fn extend(&mut self, emitted: &mut Vec<Emitted>, max_seq_len: usize) {
        for idx in 0..emitted.len() {
            Arc::make_mut(&mut self.tokens).push(emitted[idx].token);
            self.finish = self.ends_with(emitted[idx].token, max_seq_len);
            if self.finish.is_some() {
                emitted.truncate(idx + 1);
                return;
            }
        }
    }

    fn ends_with(&self, token: u32, max_seq_len: usize) -> Option<FinishReason> {
        let Limits { end_tokens, ignore_eos, stop_tokens, .. } = &self.limits;
        if stop_tokens.contains(&token) || (!ignore_eos && end_tokens.contains(&token)) {
            return Some(FinishReason::Stop(token));
        }
        (self.remaining(max_seq_len) == 0).then_some(FinishReason::Length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::fake;

    const MAX_SEQ_LEN: usize = 64;

    fn decoding(limits: Limits) -> Sequence {
        let mut sequence = fake::sequence(1, vec![7, 8, 9], limits);
        sequence.computed = 2;
        sequence
    }

    fn outcome(tokens: &[u32], drafted: usize) -> Outcome {
        Outcome {
            tokens: tokens.iter().map(|&token| fake::emitted(token)).collect(),
            drafted,
            accepted: tokens.len() - 1,
            draft_computed: 3,
            ..Outcome::default()
        }
    }

    fn ids(emitted: &[Emitted]) -> Vec<u32> {
        emitted.iter().map(|emitted| emitted.token).collect()
    }

    #[test]
    fn accepted_tokens_are_computed_and_the_last_is_not() {
        let mut sequence = decoding(fake::limits(10, 4));
        let emitted = sequence.apply(1, true, outcome(&[1, 2, 3], 4), MAX_SEQ_LEN);
        assert_eq!(ids(&emitted), [1, 2, 3]);
        assert_eq!(*sequence.tokens, [7, 8, 9, 1, 2, 3]);
        assert_eq!((sequence.computed, sequence.draft_computed), (5, 3));
        assert_eq!(sequence.finish, None);
        assert_eq!(sequence.counters.drafted, 4);
        assert_eq!(sequence.counters.accepted_per_position, [1, 1]);
    }

    #[test]
    fn tokens_after_an_end_token_are_dropped() {
        let mut sequence = decoding(Limits { end_tokens: vec![2], ..fake::limits(10, 4) });
        let emitted = sequence.apply(1, true, outcome(&[1, 2, 3], 2), MAX_SEQ_LEN);
        assert_eq!(ids(&emitted), [1, 2]);
        assert_eq!(sequence.finish, Some(FinishReason::Stop(2)));
    }

    #[test]
    fn ignored_end_tokens_do_not_end_but_stop_tokens_do() {
        let mut sequence = decoding(Limits {
            end_tokens: vec![2],
            ignore_eos: true,
            stop_tokens: vec![3],
            ..fake::limits(10, 4)
        });
        let emitted = sequence.apply(1, true, outcome(&[2, 3, 4], 2), MAX_SEQ_LEN);
        assert_eq!(ids(&emitted), [2, 3]);
        assert_eq!(sequence.finish, Some(FinishReason::Stop(3)));
    }

    #[test]
    fn the_length_limit_ends_it_unless_an_end_token_does() {
        let mut sequence = decoding(Limits { end_tokens: vec![5], ..fake::limits(2, 4) });
        let mut twin = sequence.clone();
        sequence.apply(1, true, outcome(&[1, 2], 1), MAX_SEQ_LEN);
        assert_eq!(sequence.finish, Some(FinishReason::Length));
        twin.apply(1, true, outcome(&[1, 5], 1), MAX_SEQ_LEN);
        assert_eq!(twin.finish, Some(FinishReason::Stop(5)));
    }

    #[test]
    fn max_seq_len_ends_it_before_max_tokens() {
        let mut sequence = decoding(fake::limits(10, 4));
        assert_eq!(sequence.remaining(5), 2);
        assert_eq!(sequence.useful_draft_len(5), 1);
        sequence.apply(1, true, outcome(&[1, 2], 1), 5);
        assert_eq!(sequence.finish, Some(FinishReason::Length));
    }

    #[test]
    fn a_drafter_that_was_not_asked_keeps_its_place() {
        let mut sequence = decoding(fake::limits(10, 4));
        sequence.draft_computed = 2;
        let quiet = Outcome { draft_computed: 0, ..outcome(&[1], 0) };
        sequence.apply(1, false, quiet, MAX_SEQ_LEN);
        assert_eq!((sequence.computed, sequence.draft_computed), (3, 2));
    }
}
