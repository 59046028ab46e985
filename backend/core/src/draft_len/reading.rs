//! Whether a model that drafts is to read a sequence at all. It has to read the whole prompt before its first draft: that
//! pays where what its drafts save over an answer is more than what reading takes. It is settled when a sequence starts;
//! of the others a few are read all the same, to see whether that has changed.

use super::allocate::Batch;
use super::outlook::{Outlook, Record};
use super::{DraftPolicy, Tuner};

/// Tokens of an answer, before any has ended.
const ASSUMED_ANSWER: f64 = 128.0;

/// Weight of one more answer in what is usual.
const ANSWER_WEIGHT: f64 = 1.0 / 16.0;

/// Weight of one more token in the share of those that no prompt is computed beside.
const TOKEN_WEIGHT: f64 = 1.0 / 256.0;

/// Share of the time that goes into reading prompts of which nothing is to be gained as far as is known.
const TRIAL_SHARE: f64 = 0.005;

/// Plain steps whose time is saved up for that at most: prompts of up to some thousand tokens take as many.
const MAX_SAVED_STEPS: f64 = 64.0;

/// What a model has to read to draft for a sequence that starts, and what for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// Known tokens that the model would have to read.
    pub num_unread: usize,
    /// Known tokens that the target would compute again for its sake: they are in pages without the model's half.
    pub num_again: usize,
    /// Whether its drafts are as long as allowed, whatever that is worth.
    pub is_fixed: bool,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Sequences of a step, with this one.
    pub batch_size: usize,
}

/// What is known about readings and answers.
#[derive(Clone, Debug)]
pub(super) struct Readings {
    /// Tokens of a usual answer.
    answer_tokens: f64,
    /// The share of all tokens that come with steps without prompts. Where a prompt fills a step, a draft that is right
    /// saves a row of a later one, and hardly any time.
    decoding_share: f64,
    /// Milliseconds that may be spent on trials now.
    saved_ms: f64,
}

impl Default for Readings {
    fn default() -> Self {
        Self { answer_tokens: ASSUMED_ANSWER, decoding_share: 1.0, saved_ms: 0.0 }
    }
}

impl Readings {
    fn count_answer(&mut self, num_generated: usize) {
        self.answer_tokens += ANSWER_WEIGHT * (num_generated as f64 - self.answer_tokens);
    }

    fn count_tokens(&mut self, num_tokens: usize, beside_prompts: bool) {
        let share = if beside_prompts { 0.0 } else { 1.0 };
        let kept = (1.0 - TOKEN_WEIGHT).powi(num_tokens as i32);
        self.decoding_share = share + kept * (self.decoding_share - share);
    }
}

impl Tuner {
    /// Whether the model is to read a sequence that starts. Without a model, or where lengths are fixed, that is not a
    /// question: then it costs nothing, or is what was asked for.
    pub(crate) fn reads(&self, reading: &Reading) -> bool {
        if self.reads_all() || reading.is_fixed {
            return true;
        }
        let cost = self.reading_ms(reading);
        cost <= self.readings.saved_ms || cost < self.saving_ms(reading)
    }

    /// Whether every sequence is read.
    pub(crate) fn reads_all(&self) -> bool {
        !self.has_to_read || self.policy == DraftPolicy::Fixed || self.max_lens.model == 0
    }

    /// The sequence has started, and the model reads it.
    pub(crate) fn count_reading(&mut self, reading: &Reading) {
        let is_chosen = !self.reads_all() && !reading.is_fixed;
        if is_chosen && self.saving_ms(reading) <= self.reading_ms(reading) {
            self.readings.saved_ms -= self.reading_ms(reading);
        }
    }

    /// A text has come to its end with so many tokens.
    pub(crate) fn count_answer(&mut self, num_generated: usize) {
        self.readings.count_answer(num_generated);
    }

    /// A step took so many milliseconds, of which a share may go into trials.
    pub(crate) fn save_for_readings(&mut self, took_ms: f64) {
        let most = MAX_SAVED_STEPS * self.costs.target_ms(1);
        let saved_ms = self.readings.saved_ms + TRIAL_SHARE * took_ms / self.costs.pace();
        self.readings.saved_ms = saved_ms.min(most);
    }

    /// So many tokens came with a step, which computed prompts as well or did not.
    pub(crate) fn count_tokens(&mut self, num_tokens: usize, beside_prompts: bool) {
        self.readings.count_tokens(num_tokens, beside_prompts);
    }

    fn reading_ms(&self, reading: &Reading) -> f64 {
        let again =
            if reading.num_again > 0 { self.costs.target_ms(reading.num_again) } else { 0.0 };
        again + self.costs.prompt_ms(reading.num_unread)
    }

    /// Milliseconds that drafts of the model save over a usual answer, in a batch of such sequences: each token of it comes
    /// with a step of them all.
    fn saving_ms(&self, reading: &Reading) -> f64 {
        let (usual, limits) = (self.engine.usual(), self.max_lens);
        let with = Record::of_sequence(limits.longest()).outlook(&usual, limits);
        let mut without = with.clone();
        without.gains.model.clear();
        let saved = self.ms_per_token(without, reading) - self.ms_per_token(with, reading);
        let num_tokens = self.readings.answer_tokens.min(reading.max_tokens as f64);
        saved * num_tokens * self.readings.decoding_share
    }

    fn ms_per_token(&self, outlook: Outlook, reading: &Reading) -> f64 {
        let batch = Batch {
            outlooks: &[outlook],
            positions: &[reading.num_unread],
            num_alike: reading.batch_size,
            base_rows: reading.batch_size,
            max_extra: reading.batch_size * self.max_lens.longest(),
            breadth: self.breadth.rate(),
            max_tree_tokens: self.max_tree_tokens,
            at_once: self.at_once,
        };
        let lens = batch.best(&self.costs);
        reading.batch_size as f64 / batch.throughput(&self.costs, &lens)
    }
}

#[cfg(test)]
mod tests {
    use super::super::PassCost;
    use super::super::tests::{MEMORY_BOUND, Run};
    use super::*;
    use crate::engine::CostTable;

    const PROMPT: Reading =
        Reading { num_unread: 100, num_again: 0, is_fixed: false, max_tokens: 200, batch_size: 1 };

    /// An engine whose model was right so often.
    fn engine(rate: f64) -> Run {
        let mut run = Run::new(MEMORY_BOUND, &[rate]);
        run.steps(600);
        run.tuner.readings.saved_ms = 0.0;
        run
    }

    #[test]
    fn a_prompt_is_read_where_an_answer_makes_up_for_it() {
        let tuner = engine(0.8).tuner;
        assert!(tuner.reads(&PROMPT));
        assert!(!tuner.reads(&Reading { num_unread: 3000, max_tokens: 5, ..PROMPT }));
        assert!(!tuner.reads(&Reading { num_again: 20_000, ..PROMPT }), "pages without its half");
        assert!(!engine(0.0).tuner.reads(&PROMPT));
        assert!(engine(0.0).tuner.reads(&Reading { is_fixed: true, ..PROMPT }));
    }

    #[test]
    fn what_was_measured_of_a_model_settles_whether_it_reads_the_first_prompts() {
        let target =
            CostTable { rows: vec![1, 8], step_ms: vec![10.0, 11.0], ..CostTable::default() };
        let reads = |acceptance: f64, prompt_token_ms| {
            let draft = CostTable {
                rows: vec![1],
                step_ms: vec![1.0],
                prompt_token_ms,
                acceptance: vec![acceptance],
                ..CostTable::default()
            };
            let pass = PassCost::Measured(&draft);
            Tuner::new(DraftPolicy::Adaptive, 4, Some(&target), pass).reads(&PROMPT)
        };
        assert!(reads(0.7, 0.1) && !reads(0.02, 0.1) && !reads(0.7, 100.0));
    }

    #[test]
    fn who_reads_nothing_drafts_for_everyone() {
        let mut tuner = engine(0.0).tuner;
        assert!(!tuner.reads(&PROMPT));
        tuner = tuner.without_reading();
        tuner.readings.saved_ms = 1e9;
        tuner.count_reading(&PROMPT);
        tuner.readings.saved_ms -= 1e9;
        assert!(tuner.reads(&PROMPT) && tuner.readings.saved_ms == 0.0, "at no cost");
    }

    #[test]
    fn nothing_known_is_a_reason_to_read() {
        assert!(Run::new(MEMORY_BOUND, &[0.0]).tuner.reads(&PROMPT));
    }

    #[test]
    fn short_answers_are_not_worth_a_long_prompt() {
        let mut tuner = engine(0.8).tuner;
        let long = Reading { num_unread: 6000, max_tokens: 1000, ..PROMPT };
        (0..100).for_each(|_| tuner.readings.count_answer(900));
        assert!(tuner.reads(&long));
        (0..100).for_each(|_| tuner.readings.count_answer(4));
        assert!(!tuner.reads(&long));
    }

    #[test]
    fn tokens_that_come_beside_prompts_are_not_worth_a_prompt() {
        let mut tuner = engine(0.8).tuner;
        assert!(tuner.reads(&PROMPT));
        tuner.count_tokens(2000, true);
        assert!(!tuner.reads(&PROMPT));
        tuner.count_tokens(2000, false);
        assert!(tuner.reads(&PROMPT));
    }

    #[test]
    fn trials_take_their_share_of_the_time_and_find_out() {
        let mut run = engine(0.0);
        let (mut read_ms, mut total_ms) = (0.0, 0.0);
        for _ in 0..400 {
            if run.tuner.reads(&PROMPT) {
                read_ms += run.tuner.reading_ms(&PROMPT);
                run.tuner.count_reading(&PROMPT);
            }
            run.steps(50);
            total_ms += run.ms;
        }
        assert!(read_ms > 0.5 * TRIAL_SHARE * total_ms, "{read_ms} of {total_ms}");
        assert!(read_ms < 1.1 * TRIAL_SHARE * total_ms, "{read_ms} of {total_ms}");

        // What its drafts are worth is told by the sequences that it reads.
        run.truths[0].accepted.model = 0.9;
        run.steps(600);
        run.tuner.readings.saved_ms = 0.0;
        assert!(run.tuner.reads(&PROMPT));
    }

    #[test]
    fn time_that_is_saved_up_has_a_bound() {
        let mut run = engine(0.0);
        (0..100_000).for_each(|_| run.tuner.save_for_readings(10.0));
        let most = MAX_SAVED_STEPS * run.tuner.costs.target_ms(1);
        assert!((run.tuner.readings.saved_ms / most - 1.0).abs() < 1e-9);
    }
}
