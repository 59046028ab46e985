//! How a step ends: its tokens taken in, or its sequences given up; and how a sequence ends or loses
//! its pages between steps.

use super::{Event, Key, Schedule, Scheduled, Scheduler, lookahead};
use crate::batch::{Drafted, Outcome, Stepped};
use crate::draft_len::{StepShape, StepTime};
use crate::draft_source::DraftSource;
use crate::sequence::{FinishReason, Sequence, SequenceId};

impl Scheduler {
    /// What a step computed. None where the drafter computed more than it does to draft: such steps say nothing about
    /// what drafts cost.
    fn shape(&self, schedule: &Schedule, outcomes: &[Outcome]) -> Option<StepShape> {
        let drafts_only = |(part, outcome): (&Scheduled, &Outcome)| {
            let usual = self.config.usual_draft_rows;
            // A model does not run, nor catch up, where a look-up has found something before it.
            let is_found = draft(part, outcome).is_some_and(|d| d.source == DraftSource::Lookup);
            let runs = part.draft_rows > 0 && !is_found;
            !runs || (part.draft_rows <= usual && part.draft_lens.model > 0)
        };
        if !schedule.parts.iter().zip(outcomes).all(drafts_only) {
            return None;
        }
        let mut shape = StepShape::default();
        for (part, outcome) in schedule.parts.iter().zip(outcomes) {
            let positions = self.running.get(&part.key).map_or(0, |sequence| sequence.computed);
            let rows = part.chunk + outcome.drafted;
            shape.rows += rows;
            shape.positions += rows * positions;
            if outcome.draft_passes > 0 {
                // Of one that drafts in one pass as many as it was asked for, however many became of them.
                shape.drafting += self.tuner.rows_of_pass(part.draft_lens.model);
                shape.draft_positions += positions;
                shape.draft_passes = shape.draft_passes.max(outcome.draft_passes);
            }
        }
        Some(shape)
    }

    /// Takes in what the step did, one outcome a part. Sequences removed since are passed over. Gives what steps of its
    /// shape take, where it says that.
    pub(crate) fn commit(
        &mut self,
        schedule: &Schedule,
        stepped: Stepped,
    ) -> (Vec<Event>, Option<StepTime>) {
        let Stepped { outcomes, cost, drafting: _, as_asked, ahead: _ } = stepped;
        assert_eq!(schedule.parts.len(), outcomes.len(), "one outcome a part");
        let shape = cost.and_then(|_| self.shape(schedule, &outcomes));
        let time = shape.zip(cost).map(|(shape, took)| StepTime { shape, took });
        if let Some(cost) = cost {
            self.tuner.save_for_readings(cost.as_secs_f64() * 1e3);
        }
        if let Some(StepTime { shape, took }) = time {
            self.tuner.observe(shape, took.as_secs_f64() * 1e3);
        }
        if !as_asked {
            self.tuner.ask_again();
        }
        let beside_prompts = schedule.parts.iter().any(|part| part.chunk > 1);
        let decoded = schedule.parts.iter().zip(&outcomes).filter(|(part, _)| part.chunk == 1);
        let num_tokens = decoded.map(|(_, outcome)| outcome.tokens.len()).sum();
        self.tuner.count_tokens(num_tokens, beside_prompts);
        let each = schedule.parts.iter().zip(outcomes);
        (each.filter_map(|(part, outcome)| self.commit_part(part, outcome)).collect(), time)
    }

    fn commit_part(&mut self, part: &Scheduled, mut outcome: Outcome) -> Option<Event> {
        let sequence = self.running.get_mut(&part.key)?;
        let most =
            if self.config.lookahead > 0 { self.config.max_draft_len } else { part.draft_len() };
        assert!(
            outcome.drafted <= part.draft_len().max(most),
            "more drafts verified than asked for"
        );
        let is_fixed = sequence.limits.is_fixed;
        self.tuner.record(part.id, part.draft_lens, draft(part, &outcome), is_fixed);
        let max_seq_len = self.config.max_seq_len;
        let prompt = std::mem::take(&mut outcome.prompt);
        sequence.tell(part.chunk, prompt.len());
        let emitted = sequence.apply(part.chunk, part.draft_rows > 0, outcome, max_seq_len);
        if !self.config.drafter_caches {
            // Nothing could fall behind.
            sequence.draft_computed = sequence.computed;
        }
        let (finish, counters) = (sequence.finish, sequence.counters.clone());
        self.give_back(part.key);
        let finished = match finish {
            Some(reason) => self.finish(part.id, reason).map(Box::new),
            None => None,
        };
        self.keep_computed(part.key);
        let is_news = !emitted.is_empty() || !prompt.is_empty();
        is_news.then_some(Event { id: part.id, prompt, emitted, counters, finished })
    }

    /// What the next plain step needs stays, and what the executor looks ahead: the pages of rejected rows go back.
    fn give_back(&mut self, key: Key) {
        let Some(sequence) = self.running.get(&key) else { return };
        let num_pages = self.num_kept_pages(sequence);
        if let Some(sequence) = self.running.get_mut(&key) {
            lookahead::trim(&mut self.pool, sequence, num_pages);
        }
    }

    /// In place of `commit`, for a step that was not run to its end: its sequences are as they were before it.
    pub(crate) fn give_up(&mut self, schedule: &Schedule) {
        schedule.parts.iter().for_each(|part| self.give_back(part.key));
    }

    /// Ends the sequences of a step that failed, in place of `commit`: what it left in their pages is
    /// not known. All others are as they were before it.
    pub(crate) fn fail(&mut self, schedule: &Schedule) -> Vec<Event> {
        let fail = |part: &Scheduled| {
            let sequence = self.finish(part.id, FinishReason::Failed)?;
            let (prompt, emitted) = (Vec::new(), Vec::new());
            let counters = sequence.counters.clone();
            Some(Event {
                id: part.id,
                prompt,
                emitted,
                counters,
                finished: Some(Box::new(sequence)),
            })
        };
        schedule.parts.iter().filter_map(fail).collect()
    }

    /// Ends a sequence, waiting or running, for a reason that the caller found. Its pages are free at
    /// once. Gives the sequence; there is no event of it any more.
    pub(crate) fn finish(&mut self, id: SequenceId, reason: FinishReason) -> Option<Sequence> {
        let key = self.keys.remove(&id)?;
        let mut sequence = match self.running.remove(&key) {
            Some(sequence) => sequence,
            None => self.leave_queue(key)?,
        };
        match reason {
            // What a failed step did to its pages is not known.
            FinishReason::Failed => self.pool.trim(&mut sequence.pages, 0),
            _ => self.release(&mut sequence),
        }
        self.tuner.forget(id);
        // What was given up says nothing of how long answers are.
        if let FinishReason::Stop(_) | FinishReason::StopWord | FinishReason::Length = reason {
            self.tuner.count_answer(sequence.generated().len());
        }
        self.forgotten.push(id);
        sequence.finish = Some(reason);
        Some(sequence)
    }

    /// Takes a running sequence's pages away; it is computed again when its turn comes. Its tokens
    /// stay as they are. Returns whether it was running.
    pub(crate) fn preempt(&mut self, id: SequenceId) -> bool {
        let running = |key: &&Key| self.running.contains_key(*key);
        match self.keys.get(&id).filter(running).copied() {
            Some(key) => self.preempt_key(key),
            None => return false,
        }
        true
    }

    pub(super) fn preempt_key(&mut self, key: Key) {
        let Some(mut sequence) = self.running.remove(&key) else { return };
        self.release(&mut sequence);
        sequence.computed = 0;
        sequence.draft_computed = 0;
        sequence.counters.preemptions += 1;
        self.tally.preemptions += 1;
        self.num_paused += 1;
        self.forgotten.push(sequence.id);
        // Its key puts it before all that came later.
        self.waiting.insert(key, sequence);
    }

    /// Takes a sequence out of the queue.
    pub(super) fn leave_queue(&mut self, key: Key) -> Option<Sequence> {
        let sequence = self.waiting.remove(&key)?;
        self.num_paused -= usize::from(sequence.is_paused());
        Some(sequence)
    }
}

/// What became of a part's draft, if a drafter made it.
fn draft(part: &Scheduled, outcome: &Outcome) -> Option<Drafted> {
    outcome.draft().filter(|_| part.num_given == 0)
}
