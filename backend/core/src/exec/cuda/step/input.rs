//! What the host uploads for one step: the sequences, and the words that do not fit into them.

use super::forks::Fork;
use super::params::{INDEPENDENT, PATH, Span, StepSequence};
use crate::batch::Entry;
use crate::sampling::{Coupling, SamplingParams};

/// The input of one step, place by place.
#[derive(Clone, Debug)]
pub struct StepInput {
    /// One a place of the batch.
    pub sequences: Vec<StepSequence>,
    /// `[place][last_len]`: the last known tokens, the very last one behind all others.
    pub last_tokens: Vec<u32>,
    /// Tokens of a place there.
    last_len: usize,
    /// What their spans point into.
    pub words: Vec<u32>,
}

/// What a sequence is to do in a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Planned {
    /// So many of its last tokens go through the drafter.
    pub num_fed: usize,
    /// Positions that the drafter knows before that.
    pub draft_computed: usize,
    /// It proposes up to so many tokens;
    pub draft_len: usize,
    /// or so many were written beside the sequence.
    pub num_given: usize,
    /// Which of the branches of a draft it is.
    pub branch: Branched,
    /// Its last known token has run: the target's head alone is wanted, and nothing is drafted.
    pub has_run: bool,
}

/// A place among the branches of a draft.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Branched {
    /// There is no other.
    #[default]
    Alone,
    /// It drafts the drafter's best choices.
    First,
    /// It parts from the first one.
    From(Fork),
}

/// Whether the logits of a sequence are edited by its newest tokens.
pub(crate) fn looks_back(entry: &Entry<'_>) -> bool {
    history_len(entry.sampler.params(), entry.tokens.len()) > 0
}

impl StepInput {
    /// Of no sequence, with so many of the last known tokens of each.
    pub fn new(last_len: usize) -> Self {
        Self { sequences: Vec::new(), last_tokens: Vec::new(), last_len, words: Vec::new() }
    }

    /// Adds a sequence.
    pub fn push(&mut self, entry: &Entry<'_>, plan: Planned) {
        let Planned { num_fed, draft_computed, draft_len, num_given, branch, has_run } = plan;
        let params = entry.sampler.params();
        let (coupling, key) = match entry.sampler.coupling() {
            Coupling::Path(key) => (PATH, key),
            // Of branches one at most is right if drafts are drawn as the target draws. What it draws by itself is distributed
            // the same, and no position's noise decides about two tokens.
            Coupling::Independent(key) if branch == Branched::Alone => (INDEPENDENT, key),
            Coupling::Independent(key) => (PATH, key),
        };
        let fork = match branch {
            Branched::From(fork) => fork,
            Branched::Alone | Branched::First => Fork { depth: 0, rank: 0 },
        };
        let len = entry.tokens.len();
        let sequence = StepSequence {
            key,
            len: word(len),
            num_fed: word(num_fed),
            draft_computed: word(draft_computed),
            draft_len: word(draft_len),
            min_confidence: entry.min_confidence,
            coupling,
            prompt_len: word(entry.prompt_len),
            min_tokens: word(params.min_tokens),
            temperature: params.temperature,
            top_k: word(params.top_k),
            top_p: params.top_p,
            min_p: params.min_p,
            repetition_penalty: params.repetition_penalty,
            presence_penalty: params.presence_penalty,
            frequency_penalty: params.frequency_penalty,
            num_given: word(num_given),
            history: self.put_history(entry),
            biases: self.put_biases(params),
            bad_words: self.put_bad_words(params),
            end_tokens: self.put_end_tokens(entry),
            max_len: word(entry.max_len),
            fork_depth: word(fork.depth),
            fork_rank: word(fork.rank),
            has_run: has_run.into(),
        };
        self.sequences.push(sequence);
        let last = &entry.tokens[len.saturating_sub(self.last_len)..];
        self.last_tokens.extend(std::iter::repeat_n(0, self.last_len - last.len()));
        self.last_tokens.extend(last);
    }

    /// Adds unused places up to `num_places`.
    pub fn pad(&mut self, num_places: usize) {
        self.sequences.resize(num_places, StepSequence::default());
        self.last_tokens.resize(num_places * self.last_len, 0);
    }

    /// Words that a sequence takes at most.
    pub(crate) fn num_words(entry: &Entry<'_>) -> usize {
        let params = entry.sampler.params();
        let bad: usize = params.bad_words.iter().map(|word| word.len() + 1).sum();
        let history = history_len(params, entry.tokens.len());
        history + 2 * params.logit_bias.len() + bad + 1 + entry.sampler.end_tokens().len()
    }

    fn put(&mut self, words: impl IntoIterator<Item = u32>) -> Span {
        let first = self.words.len();
        self.words.extend(words);
        Span { first: word(first), count: word(self.words.len() - first) }
    }

    fn put_history(&mut self, entry: &Entry<'_>) -> Span {
        let num_needed = history_len(entry.sampler.params(), entry.tokens.len());
        self.put(entry.tokens[entry.tokens.len() - num_needed..].iter().copied())
    }

    fn put_biases(&mut self, params: &SamplingParams) -> Span {
        let mut biases = params.logit_bias.to_vec();
        // Stably: biases of one token add up in their order.
        biases.sort_by_key(|&(token, _)| token);
        let span = self.put(biases.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]));
        Span { count: word(biases.len()), ..span }
    }

    fn put_bad_words(&mut self, params: &SamplingParams) -> Span {
        let entries = &params.bad_words;
        let table = self.put(vec![0; entries.len() + 1]);
        let first = table.first as usize;
        for (idx, entry) in entries.iter().enumerate() {
            self.words[first + idx] = word(self.words.len());
            self.words.extend(entry);
        }
        self.words[first + entries.len()] = word(self.words.len());
        Span { count: word(entries.len()), ..table }
    }

    fn put_end_tokens(&mut self, entry: &Entry<'_>) -> Span {
        let generated = entry.tokens.len() - entry.prompt_len;
        let are_held_back = generated < entry.sampler.params().min_tokens;
        let tokens = if are_held_back { entry.sampler.end_tokens() } else { &[] };
        self.put(tokens.iter().copied())
    }
}

/// Newest tokens that edits look at: all for a penalty, for bad words as many as the longest has before its last.
fn history_len(params: &SamplingParams, len: usize) -> usize {
    let longest = params.bad_words.iter().map(Vec::len).max().unwrap_or(0);
    if params.penalises() { len } else { longest.saturating_sub(1).min(len) }
}

/// What does not fit is as good as endless: lengths are below 2^32, limits may be any number.
fn word(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft_source::{Branching, DraftLens};
    use crate::sampling::Sampler;

    const NONE: [u32; 0] = [];

    const TOKENS: [u32; 5] = [7, 8, 9, 10, 11];

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(params, Coupling::Independent(3), vec![2, 4])
    }

    fn entry(sampler: &Sampler) -> Entry<'_> {
        Entry {
            id: 1,
            tokens: &TOKENS,
            prompt_len: 2,
            max_len: 64,
            computed: 4,
            chunk: 1,
            draft_computed: 3,
            is_read: true,
            speculates: true,
            draft_lens: DraftLens::both(4),
            branching: Branching::CHAIN,
            given: &[],
            min_confidence: 0.0,
            pages: &[],
            prompt_rows: 0,
            shares: crate::sequence::Shares::All,
            sampler,
        }
    }

    /// The words that one sequence's span points at.
    fn told(params: SamplingParams, span: fn(&StepSequence) -> Span, words_each: u32) -> Vec<u32> {
        let sampler = sampler(params);
        let mut input = StepInput { words: vec![99], ..StepInput::new(2) };
        input.push(&entry(&sampler), Planned { num_fed: 2, draft_len: 4, ..Planned::default() });
        let Span { first, count } = span(&input.sequences[0]);
        input.words[first as usize..(first + count * words_each) as usize].to_vec()
    }

    #[test]
    fn history_is_told_as_far_as_it_is_needed() {
        let history = |params: SamplingParams| told(params, |s| s.history, 1);
        let none = SamplingParams::default();
        assert_eq!(history(none.clone()), NONE);
        assert_eq!(history(SamplingParams { bad_words: [vec![1]].into(), ..none.clone() }), NONE);
        let bad_words = [vec![1], vec![1, 2, 3]].into();
        assert_eq!(history(SamplingParams { bad_words, ..none.clone() }), [10, 11]);
        assert_eq!(
            history(SamplingParams { bad_words: [vec![1; 60]].into(), ..none.clone() }),
            TOKENS
        );
        assert_eq!(history(SamplingParams { presence_penalty: 0.1, ..none }), TOKENS);
    }

    #[test]
    fn biases_are_sorted_by_token_and_keep_their_order() {
        let logit_bias = [(5, 1.0), (3, 2.0), (5, 0.5), (3, 0.25)].into();
        let params = SamplingParams { logit_bias, ..Default::default() };
        let expected = [(3, 2.0f32), (3, 0.25), (5, 1.0), (5, 0.5)];
        let expected: Vec<u32> =
            expected.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]).collect();
        assert_eq!(told(params, |s| s.biases, 2), expected);
    }

    #[test]
    fn end_tokens_are_told_while_they_are_held_back() {
        let ends = |min_tokens| {
            told(SamplingParams { min_tokens, ..Default::default() }, |s| s.end_tokens, 1)
        };
        assert_eq!(ends(4), [2, 4]);
        // Three were generated, and drafts only add to them.
        assert_eq!(ends(3), NONE);
    }

    #[test]
    fn branches_draw_as_the_target_draws() {
        let sampler = sampler(SamplingParams::default());
        let told = |branch| {
            let mut input = StepInput::new(2);
            input.push(&entry(&sampler), Planned { branch, ..Planned::default() });
            let StepSequence { coupling, fork_depth, fork_rank, key, .. } = input.sequences[0];
            (coupling, fork_depth, fork_rank, key)
        };
        assert_eq!(told(Branched::Alone), (INDEPENDENT, 0, 0, 3));
        assert_eq!(told(Branched::First), (PATH, 0, 0, 3));
        assert_eq!(told(Branched::From(Fork { depth: 1, rank: 2 })), (PATH, 1, 2, 3));
    }

    #[test]
    fn places_beyond_the_sequences_are_unused() {
        let sampler = sampler(SamplingParams::default());
        let mut input = StepInput::new(7);
        input.push(&entry(&sampler), Planned { num_fed: 2, draft_len: 4, ..Planned::default() });
        input.pad(3);
        let lens: Vec<_> = input.sequences.iter().map(|sequence| sequence.len).collect();
        assert_eq!(lens, [5, 0, 0]);
        assert_eq!(input.last_tokens[..7], [0, 0, 7, 8, 9, 10, 11], "the last one stands last");
        assert_eq!(input.last_tokens[7..], [0; 14]);
    }
}
