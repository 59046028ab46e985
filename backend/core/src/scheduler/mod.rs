//! Who takes part in the next step, with how many tokens and drafts. Requests take turns within a priority; sequences
//! that decode go before chunks of prompts; pages are lent before a step starts, so that none fails for memory half
//! way. Pure: it knows neither device nor clock.

mod coming;
mod commit;
mod lookahead;
mod order;
mod plan;
mod reuse;
mod usage;

pub use usage::Usage;

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;

use order::Key;
use reuse::NamedPrompt;

use crate::batch::{Emitted, Entry, LongPrompts, PromptBlocks};
use crate::draft_len::Tuner;
use crate::draft_source::{Branching, DraftLens};
use crate::pages::{PagePool, pages_for};
use crate::sequence::{Counters, Sequence, SequenceId};
use crate::{Error, Result};
use std::collections::{BTreeMap, HashMap};

/// When a request leaves the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdmissionPolicy {
    /// Once there are pages for all that it and the running ones may generate: none ever loses its
    /// pages to another.
    #[default]
    GuaranteedNoEvict,
    /// Once there are pages for its prompt: more run at a time, and the newest lose their pages when
    /// these run out.
    MaxUtilization,
}

/// What an engine allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SchedulerConfig {
    /// Sequences in a step.
    pub max_batch_size: usize,
    /// Rows of any forward pass in a step. The target's pass counts chunks and drafts, the drafter's
    /// first pass counts chunks and what it has to catch up.
    pub max_num_tokens: usize,
    /// Prompt and generated tokens of a sequence.
    pub max_seq_len: usize,
    /// Draft tokens of a sequence in a step, one behind the other.
    pub max_draft_len: usize,
    /// Draft tokens of a position, in all branches, where a model drafts and there are rows and pages to spare.
    pub draft_width: usize,
    /// Draft tokens of a sequence in a step at most, in all branches, where they branch.
    pub max_tree_tokens: usize,
    /// Whether branches are whole drafts, which have nothing in common.
    pub whole_branches: bool,
    /// Pages that target and drafter have in common.
    pub num_pages: usize,
    /// Requests that wait; preempted ones are not counted against it.
    pub max_queue: usize,
    pub admission: AdmissionPolicy,
    /// Whether the drafter has a half of every page. Otherwise there is nothing that could lag behind.
    pub drafter_caches: bool,
    /// Rows of the drafter's first pass, at most, in a step that only drafts.
    pub usual_draft_rows: usize,
    /// Positions beyond those of a step for which sequences have pages too while there are pages to spare: see
    /// [`Executor::lookahead`](crate::batch::Executor::lookahead).
    pub lookahead: usize,
    /// How long prompts leave room to others.
    pub long_prompts: LongPrompts,
    /// What of a prompt is computed in blocks, if anything.
    pub prompt_blocks: Option<PromptBlocks>,
}

/// One sequence's part in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scheduled {
    pub id: SequenceId,
    /// Known tokens to run through the target.
    pub chunk: usize,
    /// Draft tokens that a drafter proposes at most, one behind the other,
    pub draft_lens: DraftLens,
    /// of each position, if a model does,
    pub draft_width: usize,
    /// and in all, where these branch.
    pub max_tree_tokens: usize,
    /// Draft tokens that came with the request. Then no drafter proposes any.
    pub num_given: usize,
    /// Rows of the drafter's first pass: the chunk and what it lags behind; 0 where it does not run.
    pub draft_rows: usize,
    /// Rows of the chunk whose logits tell of tokens of the prompt.
    pub prompt_rows: usize,
    key: Key,
}

impl Scheduled {
    /// Draft tokens to verify at most.
    pub(crate) fn draft_len(&self) -> usize {
        let DraftLens { lookup, model } = self.draft_lens;
        self.num_given.max(lookup).max((self.draft_width * model).min(self.max_tree_tokens))
    }
}

/// A step to run. Its pages are lent until it is committed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Schedule {
    /// Who takes part. Empty only when there is nothing to do.
    pub parts: Vec<Scheduled>,
    /// Sequences that leave the queue for the first time with this step.
    pub started: Vec<SequenceId>,
    /// Sequences that have left or lost their pages: the executor forgets them before the step.
    pub forgotten: Vec<SequenceId>,
    /// Whether it only computes parts of long prompts, which nobody hears of for a while, and who comes could start at once.
    pub gives_way: bool,
}

/// What a step brought to a sequence. Of every sequence that ends in a step there is exactly one event
/// with `finished`, its last; there is none of those that the caller ended itself.
#[derive(Clone, Debug)]
pub struct Event {
    /// Whose event it is.
    pub id: SequenceId,
    /// Tokens of the prompt, where the request wants to hear how likely they are: the next ones in order, the first
    /// of all left out.
    pub prompt: Vec<Emitted>,
    /// New tokens; an end token is the last of them. None if the step failed, or told of the prompt alone.
    pub emitted: Vec<Emitted>,
    /// What it has counted so far.
    pub counters: Counters,
    /// The whole sequence, once it has ended; `finish` says why.
    pub finished: Option<Box<Sequence>>,
}

/// What was counted since the start.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    iterations: u64,
    preemptions: u64,
    reused_pages: u64,
    /// Of the last step.
    context_tokens: usize,
}

/// Waiting and running sequences, and the pages.
#[derive(Debug)]
pub(crate) struct Scheduler {
    config: SchedulerConfig,
    tuner: Tuner,
    pool: PagePool,
    waiting: BTreeMap<Key, Sequence>,
    running: BTreeMap<Key, Sequence>,
    /// Of all that wait or run.
    keys: HashMap<SequenceId, Key>,
    /// How many of those that wait were preempted.
    num_paused: usize,
    num_arrived: u64,
    num_requests: u64,
    /// The prompt that came last, and what its pages are named.
    last_named: NamedPrompt,
    /// To be told with the next schedule.
    forgotten: Vec<SequenceId>,
    tally: Tally,
}

impl Scheduler {
    pub(crate) fn new(config: SchedulerConfig, tuner: Tuner) -> Self {
        let SchedulerConfig { max_batch_size, max_num_tokens, max_queue, .. } = config;
        assert!(
            max_batch_size > 0 && max_num_tokens > 0 && max_queue > 0,
            "a limit of 0: {config:?}"
        );
        Self {
            pool: PagePool::new(config.num_pages),
            config,
            tuner,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            keys: HashMap::new(),
            num_paused: 0,
            num_arrived: 0,
            num_requests: 0,
            last_named: NamedPrompt::default(),
            forgotten: Vec::new(),
            tally: Tally::default(),
        }
    }

    /// Takes a request into the queue, if it can ever be served.
    pub(crate) fn add(&mut self, mut sequence: Sequence) -> Result<()> {
        self.check(&sequence)?;
        if !self.has_room() {
            let (waiting, max_queue) = (self.num_waiting(), self.config.max_queue);
            return Err(Error::Capacity(format!(
                "{waiting} requests wait and max_queue is {max_queue}"
            )));
        }
        self.last_named.name(&mut sequence, self.config.prompt_blocks);
        let key = self.next_key(&sequence);
        let before = self.keys.insert(sequence.id, key);
        assert!(before.is_none(), "sequence {} is added twice", sequence.id);
        self.waiting.insert(key, sequence);
        Ok(())
    }

    fn check(&self, sequence: &Sequence) -> Result<()> {
        let SchedulerConfig { max_seq_len, max_draft_len, num_pages, .. } = self.config;
        let (prompt_len, limits) = (sequence.prompt_len, &sequence.limits);
        if prompt_len == 0 {
            return Err(Error::bad_request("prompt", "0 tokens, at least 1 is needed"));
        }
        if limits.max_tokens == 0 {
            return Err(Error::bad_request("max_tokens", "0, at least 1 is needed"));
        }
        if limits.draft_len > max_draft_len {
            let message = format!("{} exceeds max_draft_len {max_draft_len}", limits.draft_len);
            return Err(Error::bad_request("draft_len", message));
        }
        if prompt_len >= max_seq_len {
            let message = format!("{prompt_len} tokens, max_seq_len is {max_seq_len}");
            return Err(Error::bad_request("prompt", message));
        }
        let total = prompt_len.saturating_add(limits.max_tokens);
        let needs = format!("{} after a prompt of {prompt_len} needs", limits.max_tokens);
        if total > max_seq_len {
            let message = format!("{needs} {total} positions, max_seq_len is {max_seq_len}");
            return Err(Error::bad_request("max_tokens", message));
        }
        let pages = pages_for(total);
        if pages > num_pages {
            let message = format!("{needs} {pages} KV pages, the engine has {num_pages}");
            return Err(Error::bad_request("max_tokens", message));
        }
        Ok(())
    }

    /// The next step, its pages lent. It must be committed, given up or have failed before the next call.
    pub(crate) fn schedule(&mut self) -> Schedule {
        let (parts, started) = self.plan();
        self.count_rows(&parts);
        let has_place = self.waiting.is_empty() && self.running.len() < self.config.max_batch_size;
        let gives_way = has_place && parts.iter().all(|part| self.is_part_of_long(part));
        Schedule { parts, started, forgotten: std::mem::take(&mut self.forgotten), gives_way }
    }

    /// The step as an executor takes it. Nothing may be removed between `schedule` and this.
    pub(crate) fn entries(&self, schedule: &Schedule) -> Vec<Entry<'_>> {
        let entry = |part: &Scheduled| {
            let sequence = &self.running[&part.key];
            Entry {
                id: part.id,
                tokens: &sequence.tokens,
                prompt_len: sequence.prompt_len,
                max_len: sequence.max_len(),
                computed: sequence.computed,
                chunk: part.chunk,
                draft_computed: sequence.draft_computed,
                is_read: sequence.is_read,
                speculates: part.draft_rows > 0,
                draft_lens: part.draft_lens,
                branching: Branching {
                    width: part.draft_width,
                    max_tokens: part.max_tree_tokens,
                    min_likelihood: match sequence.limits.is_fixed {
                        true => 0.0,
                        false => self.tuner.min_likelihood(),
                    },
                },
                given: &sequence.given[..part.num_given],
                min_confidence: match sequence.limits.is_fixed {
                    true => 0.0,
                    false => self.tuner.min_confidence(),
                },
                pages: &sequence.pages,
                prompt_rows: part.prompt_rows,
                shares: sequence.shares,
                sampler: &sequence.sampler,
            }
        };
        schedule.parts.iter().map(entry).collect()
    }

    /// Whether the queue takes one more request.
    pub(crate) fn has_room(&self) -> bool {
        self.num_waiting() < self.config.max_queue
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Sequences that wait for their first turn.
    pub(crate) fn num_waiting(&self) -> usize {
        self.waiting.len() - self.num_paused
    }
}
