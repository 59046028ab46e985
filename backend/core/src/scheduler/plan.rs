//! The parts of a step. Decoding sequences get a row each and then their drafts; what is left of the
//! budget goes to prompts, of those that run and of those that wait, in turn.
//!
//! When pages run out, the newest give up their drafts; then the newest of the lowest priority is
//! preempted. The first in the order of service is never preempted, and was only accepted because it
//! fits alone, so there is always progress.

use super::coming::Coming;
use super::{AdmissionPolicy, Key, Scheduled, Scheduler, SchedulerConfig};
use crate::batch::LongPrompts;
use crate::draft_len::Candidate;
use crate::draft_source::DraftLens;
use crate::pages::{PAGE_TOKENS, PageId, pages_for};
use crate::sequence::{Sequence, SequenceId};
use std::ops::Bound::{Excluded, Unbounded};

/// A drafter that lags this far behind catches up even if nothing is drafted: what it has to catch
/// up must fit one pass when it drafts again. A quarter of the row budget, if that is less.
const MAX_DRAFT_LAG: usize = 128;

/// Rows of logits in a step that tell of prompts alone: they come to the host, a vocabulary each.
const MAX_PROMPT_ROWS: usize = 64;

/// A prompt of more tokens than so many steps compute, or so many short chunks, is long: beside others it gets few rows of
/// each step, so that steps stay short for them.
const LONG_STEPS: usize = 4;
const LONG_CHUNKS: usize = 32;
/// Share of a step that it gets alone, where a step cannot be given up for who comes.
const PART_OF_LONG: usize = 4;

/// A step in the making.
struct Plan {
    parts: Vec<Scheduled>,
    /// Rows left of the target's pass.
    rows_left: usize,
    /// Rows left of the drafter's first pass.
    draft_rows_left: usize,
    /// Rows left that may tell of prompts.
    prompt_rows_left: usize,
    /// Whether waiting sequences are let in: not behind one that may not start, so that it is not overtaken, and not in
    /// a step that preempted, since it would only bring back what had to go.
    lets_in: bool,
    /// What waiting sequences let others go ahead for.
    coming: Coming,
    /// The last waiting sequence that was held back. A plan walks the queue once, however many it lets in.
    held_back: Option<Key>,
    /// Sequences that are let in for the first time.
    started: Vec<SequenceId>,
}

impl Plan {
    fn push(&mut self, part: Scheduled) {
        self.rows_left -= part.chunk + part.draft_len();
        self.draft_rows_left -= part.draft_rows;
        self.prompt_rows_left -= part.prompt_rows;
        self.parts.push(part);
    }

    fn remove(&mut self, key: Key) {
        if let Some(idx) = self.parts.iter().position(|part| part.key == key) {
            let part = self.parts.remove(idx);
            self.rows_left += part.chunk + part.draft_len();
            self.draft_rows_left += part.draft_rows;
            self.prompt_rows_left += part.prompt_rows;
        }
    }

    fn set_draft(&mut self, idx: usize, draft_lens: DraftLens, draft_rows: usize) {
        self.set_chain(idx);
        let part = &mut self.parts[idx];
        self.rows_left = self.rows_left + part.draft_len() - draft_lens.longest();
        self.draft_rows_left = self.draft_rows_left + part.draft_rows - draft_rows;
        (part.draft_lens, part.draft_rows) = (draft_lens, draft_rows);
    }

    fn set_chain(&mut self, idx: usize) {
        self.set_tree(idx, 1, usize::MAX);
    }

    fn set_tree(&mut self, idx: usize, width: usize, max_tokens: usize) {
        let part = &mut self.parts[idx];
        self.rows_left += part.draft_len();
        (part.draft_width, part.max_tree_tokens) = (width, max_tokens);
        self.rows_left -= part.draft_len();
    }
}

impl Scheduler {
    /// The parts of the next step, and who takes part in one for the first time.
    pub(super) fn plan(&mut self) -> (Vec<Scheduled>, Vec<SequenceId>) {
        let budget = self.config.max_num_tokens;
        let mut plan = Plan {
            parts: Vec::new(),
            rows_left: budget,
            draft_rows_left: budget,
            prompt_rows_left: MAX_PROMPT_ROWS,
            lets_in: true,
            coming: self.coming(),
            held_back: None,
            started: Vec::new(),
        };
        self.plan_decodes(&mut plan);
        self.plan_drafts(&mut plan);
        self.lend_pages(&mut plan);
        self.plan_prompts(&mut plan);
        self.lend_lookahead(&plan.parts);
        (plan.parts, plan.started)
    }

    /// One row for every sequence whose last token alone is to be computed, without a given draft.
    fn plan_decodes(&self, plan: &mut Plan) {
        let decodes =
            |sequence: &Sequence| sequence.pending() == 1 && self.given_len(sequence) == 0;
        let decoding = self.running.iter().filter(|(_, sequence)| decodes(sequence));
        for (&key, sequence) in decoding.take(plan.rows_left) {
            let id = sequence.id;
            let prompt_rows = sequence.prompt_rows(1);
            plan.push(Scheduled {
                id,
                chunk: 1,
                draft_lens: DraftLens::default(),
                draft_width: 1,
                max_tree_tokens: usize::MAX,
                num_given: 0,
                draft_rows: 0,
                prompt_rows,
                key,
            });
        }
    }

    fn given_len(&self, sequence: &Sequence) -> usize {
        sequence.useful_given_len(self.config.max_seq_len)
    }

    /// Drafts, as long as the tuner finds worth while and both passes have rows left. While there
    /// are prompts to compute, half of the rows left are theirs.
    fn plan_drafts(&mut self, plan: &mut Plan) {
        let candidate = |part: &Scheduled| Candidate {
            id: part.id,
            limit: self.draft_limit(part.key),
            is_fixed: self.running[&part.key].limits.is_fixed,
            is_read: self.running[&part.key].is_read,
            positions: self.running[&part.key].computed,
        };
        let candidates: Vec<Candidate> = plan.parts.iter().map(candidate).collect();
        let backlog = self.backlog(plan);
        let max_extra = plan.rows_left - backlog.min(plan.rows_left.div_ceil(2));
        let base_rows = plan.parts.len() + backlog.min(plan.rows_left);
        let lens = self.tuner.choose(&candidates, base_rows, max_extra);
        let max_lag = self.max_draft_lag();
        for (idx, (candidate, &lens)) in candidates.iter().zip(&lens).enumerate() {
            let lag = self.running[&plan.parts[idx].key].draft_lag();
            let falls_behind = candidate.is_read && candidate.limit > 0 && lag >= max_lag;
            let wants_model = lens.model > 0 || falls_behind;
            // Without room for the whole catch-up the model does not draft: rows that it has not seen
            // cannot be skipped. A look-up goes on without it.
            let rows = lag + self.tuner.rows_of_pass(lens.model);
            match wants_model && rows <= plan.draft_rows_left {
                // A look-up that finds something would have the model wait once more.
                true if falls_behind => plan.set_draft(idx, DraftLens { lookup: 0, ..lens }, rows),
                true => plan.set_draft(idx, lens, rows),
                false => plan.set_draft(idx, DraftLens { model: 0, ..lens }, 0),
            }
        }
        self.plan_branches(plan, backlog);
    }

    /// Positions that a drafter's cache may be behind the target's before it has to catch up.
    pub(super) fn max_draft_lag(&self) -> usize {
        MAX_DRAFT_LAG.min(self.config.max_num_tokens / 4).max(1)
    }

    /// Lets drafts of a model branch, the first ones first, as far as the rows allow that prompts leave over, and the pages
    /// that each sequence will have in the end: others' are not lent for it.
    fn plan_branches(&self, plan: &mut Plan, backlog: usize) {
        for idx in 0..plan.parts.len() {
            let (sequence, part) = (&self.running[&plan.parts[idx].key], &plan.parts[idx]);
            let own_pages = pages_for(sequence.max_len());
            let room = own_pages * PAGE_TOKENS - sequence.tokens.len();
            let spare = plan.rows_left.saturating_sub(backlog);
            let most = room.min(part.draft_len() + spare).min(self.config.max_tree_tokens);
            let len = part.draft_lens.model;
            let most = match self.config.whole_branches {
                true => most - most.checked_rem(len).unwrap_or(0),
                false => most,
            };
            if len > 0 && len < most {
                plan.set_tree(idx, self.config.draft_width, most);
            }
        }
    }

    fn draft_limit(&self, key: Key) -> usize {
        self.running[&key].useful_draft_len(self.config.max_seq_len)
    }

    /// Tokens of prompts that could be computed in this step: at least as many as rows are left, where there are more.
    fn backlog(&self, plan: &mut Plan) -> usize {
        let pending = |sequence: &Sequence| Some(sequence.pending()).filter(|&num| num > 1);
        let running: usize = self.running.values().filter_map(pending).sum();
        if running >= plan.rows_left {
            return running;
        }
        let next = self.next_waiting(plan, None).map(|key| &self.waiting[&key]);
        let next = next.filter(|sequence| self.admits(sequence));
        let unknown =
            |next| Sequence::pending(next) - self.beginning(next).pages.len() * PAGE_TOKENS;
        running + next.map_or(0, unknown)
    }

    /// Lends every decoding sequence the pages of its row and its drafts.
    fn lend_pages(&mut self, plan: &mut Plan) {
        while self.missing_pages(plan) > self.pool.free_pages() {
            if self.take_back_lookahead(&plan.parts) {
                continue;
            }
            let needs_more = |idx: &usize| {
                let part = &plan.parts[*idx];
                self.page_need(part, part.draft_len()) > self.page_need(part, 0)
            };
            let mut drafts = (0..plan.parts.len()).rev().filter(needs_more);
            let branching = drafts.clone().find(|&idx| plan.parts[idx].draft_width > 1);
            match (branching, drafts.next()) {
                (Some(idx), _) => plan.set_chain(idx),
                (None, Some(idx)) => plan.set_draft(idx, DraftLens::default(), 0),
                (None, None) => self.preempt_last(plan),
            }
        }
        plan.parts.iter().for_each(|part| self.lend(part));
    }

    fn missing_pages(&self, plan: &Plan) -> usize {
        plan.parts.iter().map(|part| self.page_need(part, part.draft_len())).sum()
    }

    /// Pages that a part needs beyond what its sequence has, were it to draft so many tokens.
    fn page_need(&self, part: &Scheduled, draft_len: usize) -> usize {
        let sequence = &self.running[&part.key];
        pages_for(sequence.computed + part.chunk + draft_len).saturating_sub(sequence.pages.len())
    }

    fn lend(&mut self, part: &Scheduled) {
        if let Some(sequence) = self.running.get_mut(&part.key) {
            let positions = sequence.computed + part.chunk + part.draft_len();
            let held = sequence.pages.len();
            self.pool.grow(&mut sequence.pages, pages_for(positions));
            sequence.counters.new_pages += (sequence.pages.len() - held) as u64;
        }
    }

    fn preempt_last(&mut self, plan: &mut Plan) {
        if let Some((&key, _)) = self.running.last_key_value() {
            plan.remove(key);
            plan.lets_in = false;
            self.preempt_key(key);
        }
    }

    /// Chunks of prompts, in turn: of running sequences that have no part yet, and of waiting ones that are let in.
    fn plan_prompts(&mut self, plan: &mut Plan) {
        let planned = |key: &Key| plan.parts.iter().any(|part| part.key == *key);
        let running = self.running.iter().filter(|(key, _)| !planned(key));
        let mut running: Vec<(Key, Key)> =
            running.map(|(&key, sequence)| (self.prompt_key(key, sequence), key)).collect();
        running.sort_unstable();
        let mut running = running.into_iter().peekable();
        while plan.rows_left > 0 {
            let turn = running.peek().map(|&(turn, _)| turn);
            if let Some(key) = self.next_waiting(plan, turn) {
                self.let_in(plan, key);
            } else if let Some((_, key)) = running.next() {
                self.plan_chunk(plan, key);
            } else {
                return;
            }
        }
    }

    /// The waiting sequence whose turn it is, if that is before the given one and there is a place. One whose first page
    /// is about to be computed by another lets the next go first.
    fn next_waiting(&self, plan: &mut Plan, before: Option<Key>) -> Option<Key> {
        let has_place = self.running.len() < self.config.max_batch_size;
        if !plan.lets_in || !has_place {
            return None;
        }
        let behind = plan.held_back.map_or(Unbounded, Excluded);
        for (&key, sequence) in self.waiting.range((behind, Unbounded)) {
            if before.is_some_and(|before| before < key) {
                return None;
            }
            if !self.is_held_back(&plan.coming, key, sequence) {
                return Some(key);
            }
            plan.held_back = Some(key);
        }
        None
    }

    /// As many of the sequence's next tokens as rows and pages allow, and at the end of the prompt as
    /// many given drafts. Sequences that come after it give up their pages rather than have it wait.
    fn plan_chunk(&mut self, plan: &mut Plan, key: Key) {
        let Some(sequence) = self.running.get(&key) else { return };
        let (id, held, computed) = (sequence.id, sequence.pages.len(), sequence.computed);
        let (pending, given_len) = (sequence.pending(), self.given_len(sequence));
        let lag = sequence.draft_lag();
        // A lag that this step cannot make up would keep the sequence waiting, for ever beside others that draft: a head reads
        // a prompt a step later than its target, and catches up by itself.
        let speculates = sequence.is_read && (lag == 0 || lag < plan.draft_rows_left);
        let most = self.most_of_prompt(plan, sequence);
        let mut chunk = pending.min(plan.rows_left).min(most);
        if sequence.prompt_rows(chunk) > plan.prompt_rows_left {
            chunk = sequence.num_told_rows() + plan.prompt_rows_left;
        }
        if speculates {
            chunk = chunk.min(plan.draft_rows_left.saturating_sub(lag));
        }
        if chunk == 0 {
            return;
        }
        let room = |free_pages: usize| (held + free_pages) * PAGE_TOKENS - computed;
        if room(self.pool.free_pages()) < chunk + given_len {
            self.take_back_lookahead(&plan.parts);
        }
        while room(self.pool.free_pages()) == 0 {
            if self.running.last_key_value().is_none_or(|(&last, _)| last == key) {
                return;
            }
            self.preempt_last(plan);
        }
        let room = room(self.pool.free_pages());
        let Some(sequence) = self.running.get(&key) else { return };
        chunk = self.in_whole_blocks(plan, sequence, computed, chunk.min(room));
        if chunk == 0 {
            return;
        }
        let num_given = match chunk == pending {
            true => given_len.min(plan.rows_left - chunk).min(room - chunk),
            false => 0,
        };
        let draft_rows = if speculates { lag + chunk } else { 0 };
        let prompt_rows = self.running.get(&key).map_or(0, |sequence| sequence.prompt_rows(chunk));
        let part = Scheduled {
            id,
            chunk,
            draft_lens: DraftLens::default(),
            draft_width: 1,
            max_tree_tokens: usize::MAX,
            num_given,
            draft_rows,
            prompt_rows,
            key,
        };
        self.lend(&part);
        plan.push(part);
    }

    /// Of the rows of a prompt from `first` on those that end a block of it, where blocks are computed. Without such rows
    /// it waits if the step has another prompt to compute; else it goes on with part of a block.
    fn in_whole_blocks(
        &self,
        plan: &Plan,
        sequence: &Sequence,
        first: usize,
        chunk: usize,
    ) -> usize {
        let Some(blocks) = self.config.prompt_blocks else { return chunk };
        let whole = blocks.whole(first, chunk, sequence.prompt_len);
        // One that tells of its prompt gets fewer rows than a block has.
        let can_wait = !sequence.tells_of_prompt() && plan.parts.iter().any(|part| part.chunk > 1);
        if whole > 0 || can_wait { whole } else { chunk }
    }

    /// Whether a waiting sequence would get rows of the step.
    fn gets_rows(&self, plan: &Plan, next: &Sequence) -> bool {
        let speculates = next.limits.draft_len > 0;
        let is_heard = plan.prompt_rows_left > 0 || !next.tells_of_prompt();
        let rows = match speculates {
            true => plan.rows_left.min(plan.draft_rows_left),
            false => plan.rows_left,
        };
        if !is_heard || rows == 0 {
            return false;
        }
        let Some(_) = self.config.prompt_blocks else { return true };
        let first = self.beginning(next).pages.len() * PAGE_TOKENS;
        self.in_whole_blocks(plan, next, first, rows.min(next.tokens.len() - first)) > 0
    }

    /// Rows of a step that a running sequence's prompt gets at most.
    fn most_of_prompt(&self, plan: &mut Plan, sequence: &Sequence) -> usize {
        let budget = self.config.max_num_tokens;
        let LongPrompts { rows_beside_others, give_way } = self.config.long_prompts;
        let most = if !self.is_long(sequence) {
            budget
        } else if self.has_short(plan) {
            rows_beside_others.min(budget.div_ceil(PART_OF_LONG))
        } else if give_way {
            budget
        } else {
            budget.div_ceil(PART_OF_LONG)
        };
        // With fewer rows than a block has a step is not shorter.
        most.max(self.config.prompt_blocks.map_or(0, |blocks| blocks.len))
    }

    /// Whether there are others than long prompts that take part in this step or could.
    fn has_short(&self, plan: &mut Plan) -> bool {
        let computes_long = |sequence: &Sequence| sequence.pending() > 1 && self.is_long(sequence);
        let next = |plan: &mut Plan| self.next_waiting(plan, None).map(|key| &self.waiting[&key]);
        self.running.values().any(|sequence| !computes_long(sequence))
            || next(plan).is_some_and(|next| !self.is_long(next) && self.admits(next))
    }

    fn is_long(&self, sequence: &Sequence) -> bool {
        let SchedulerConfig { max_num_tokens, long_prompts, .. } = self.config;
        let chunks = LONG_CHUNKS * long_prompts.rows_beside_others;
        sequence.tokens.len() > chunks.min(LONG_STEPS * max_num_tokens)
    }

    pub(super) fn is_part_of_long(&self, part: &Scheduled) -> bool {
        part.chunk > 1 && self.is_long(&self.running[&part.key])
    }

    /// Lets a waiting sequence in, if it may start; else those behind it wait as well.
    fn let_in(&mut self, plan: &mut Plan, key: Key) {
        let has_rows = self.gets_rows(plan, &self.waiting[&key]);
        let fits = |scheduler: &Self| scheduler.admits(&scheduler.waiting[&key]);
        let may_start =
            has_rows && (fits(self) || (self.take_back_lookahead(&plan.parts) && fits(self)));
        let Some(mut sequence) = may_start.then(|| self.leave_queue(key)).flatten() else {
            plan.lets_in = false;
            return;
        };
        if !sequence.is_paused() {
            plan.started.push(sequence.id);
        }
        self.take_beginning(&mut sequence);
        self.expect(&mut plan.coming, key, &sequence);
        self.running.insert(key, sequence);
        self.plan_chunk(plan, key);
    }

    /// Whether a waiting sequence may start where there is a place: what the policy wants it and the running ones to have
    /// room for must fit. It needs no page for what it shares with them.
    fn admits(&self, sequence: &Sequence) -> bool {
        if self.running.is_empty() {
            return true;
        }
        // Under `MaxUtilization` those that run have a page more each to grow into.
        let (whole, growth) = match self.config.admission {
            AdmissionPolicy::GuaranteedNoEvict => (true, 0),
            AdmissionPolicy::MaxUtilization => (false, 1),
        };
        let missing = |sequence: &Sequence| {
            let len = if whole { sequence.max_len() } else { sequence.tokens.len() };
            pages_for(len).saturating_sub(sequence.pages.len())
        };
        let reserved: usize = self.running.values().map(|running| missing(running) + growth).sum();
        let is_held = |page: &&PageId| self.pool.holders(**page) > 0;
        let shared = self.beginning(sequence).pages.iter().filter(is_held).count();
        missing(sequence) - shared + reserved <= self.pool.free_pages()
    }
}
