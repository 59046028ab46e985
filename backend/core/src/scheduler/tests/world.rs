//! A scheduler with the fake executor, whose every step is checked.

use super::super::*;
use crate::batch::{Executor, Stepped};
use crate::draft_len::{DraftPolicy, PassCost};
use crate::pages::{PAGE_TOKENS, PageId};
use crate::scheduler::fake::{self, Fake};
use crate::sequence::{Limits, Shares};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// More steps than any of these loads can take: a scheduler that stands still is caught by it.
const MAX_STEPS: u64 = 20_000;

/// A scheduler, its executor and everything they have given so far.
pub(super) struct World {
    pub(super) config: SchedulerConfig,
    pub(super) scheduler: Scheduler,
    pub(super) executor: Fake,
    pub(super) expected: BTreeMap<SequenceId, Vec<u32>>,
    pub(super) texts: BTreeMap<SequenceId, Vec<u32>>,
    /// Tokens of prompts that were told about, with their places.
    pub(super) told: BTreeMap<SequenceId, Vec<(u32, f32)>>,
    pub(super) finished: BTreeMap<SequenceId, Sequence>,
    /// In the order in which they first took part.
    pub(super) started: Vec<SequenceId>,
    /// Whether sequences were preempted out of turn.
    pub(super) forced: bool,
    /// Whether every other step is given up that gives way.
    pub(super) hurried: bool,
    gave_up: bool,
    /// What all steps took.
    pub(super) ms: f64,
}

pub(super) fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_batch_size: 8,
        max_num_tokens: 64,
        max_seq_len: 128,
        max_draft_len: 6,
        draft_width: 1,
        max_tree_tokens: usize::MAX,
        whole_branches: false,
        num_pages: 64,
        max_queue: 100,
        admission: AdmissionPolicy::MaxUtilization,
        drafter_caches: true,
        usual_draft_rows: 2,
        lookahead: 0,
        long_prompts: LongPrompts { rows_beside_others: 4, give_way: true },
        prompt_blocks: None,
    }
}

pub(super) fn prompt(id: u64, len: usize) -> Vec<u32> {
    (0..len as u64).map(|idx| ((id * 31 + idx * 7) % 50) as u32).collect()
}

impl World {
    pub(super) fn new(config: SchedulerConfig, policy: DraftPolicy, percent: u64) -> Self {
        let tuner = Tuner::new(policy, config.max_draft_len, None, PassCost::Unknown);
        Self::with_tuner(config, tuner, percent)
    }

    /// A look-up is asked before the model.
    pub(super) fn combined(config: SchedulerConfig, policy: DraftPolicy, percent: u64) -> Self {
        let tuner = Tuner::new(policy, config.max_draft_len, None, PassCost::Unknown);
        Self::with_tuner(config, tuner.with_lookup(), percent)
    }

    pub(super) fn with_tuner(config: SchedulerConfig, tuner: Tuner, percent: u64) -> Self {
        Self {
            scheduler: Scheduler::new(config.clone(), tuner),
            executor: Fake::new(percent, 7, config.drafter_caches)
                .with_blocks(config.prompt_blocks),
            config,
            expected: BTreeMap::new(),
            texts: BTreeMap::new(),
            told: BTreeMap::new(),
            finished: BTreeMap::new(),
            started: Vec::new(),
            forced: false,
            hurried: false,
            gave_up: false,
            ms: 0.0,
        }
    }

    pub(super) fn fixed(config: SchedulerConfig) -> Self {
        Self::new(config, DraftPolicy::Fixed, 80)
    }

    pub(super) fn add(&mut self, id: SequenceId, prompt_len: usize, limits: Limits) -> Result<()> {
        self.add_prompt(id, prompt(id, prompt_len), limits)
    }

    pub(super) fn add_prompt(
        &mut self,
        id: SequenceId,
        prompt: Vec<u32>,
        limits: Limits,
    ) -> Result<()> {
        self.add_sequence(fake::sequence(id, prompt, limits))
    }

    pub(super) fn add_sequence(&mut self, sequence: Sequence) -> Result<()> {
        let id = sequence.id;
        let twin = sequence.clone();
        self.scheduler.add(sequence)?;
        self.expected.insert(id, fake::expected(&twin, self.config.prompt_blocks));
        Ok(())
    }

    pub(super) fn step(&mut self) -> Schedule {
        let was_idle = self.scheduler.is_idle();
        let schedule = self.scheduler.schedule();
        assert_eq!(
            schedule.parts.is_empty(),
            was_idle,
            "a step is empty iff nothing is to be done"
        );
        self.check(&schedule);
        schedule.forgotten.iter().for_each(|&id| self.executor.forget(id));
        let entries = self.scheduler.entries(&schedule);
        let hurries = self.hurried && schedule.gives_way && !self.gave_up;
        let stepped = self.executor.step(&entries, &|| hurries).unwrap();
        self.gave_up = stepped.is_none();
        let Some(stepped) = stepped else {
            self.scheduler.give_up(&schedule);
            self.check_pages();
            return schedule;
        };
        let rows: usize = schedule.parts.iter().map(|part| part.chunk + part.draft_len()).sum();
        let passes = stepped.outcomes.iter().map(|outcome| outcome.draft_passes).max().unwrap_or(0);
        // Beside drafts, a row of the model is to one of the target as a pass is to a step.
        let read: usize = schedule.parts.iter().map(|part| part.draft_rows).sum();
        let ms = 5.0 + 0.1 * rows as f64 + 4.0 * passes as f64 + 0.08 * read as f64;
        self.ms += ms;
        let cost = Some(Duration::from_secs_f64(1e-3 * ms));
        let (events, _) = self.scheduler.commit(&schedule, Stepped { cost, ..stepped });
        for event in events {
            let text = self.texts.entry(event.id).or_default();
            text.extend(event.emitted.iter().map(|emitted| emitted.token));
            let told = event.prompt.iter().map(|told| (told.token, told.logprob.unwrap()));
            self.told.entry(event.id).or_default().extend(told);
            let generated = self.texts[&event.id].len() as u64;
            assert!(event.emitted.is_empty() || event.counters.steps > 0);
            // Drafts behind an end token are accepted too, and are no text.
            assert!(event.counters.accepted <= generated || event.finished.is_some());
            if let Some(sequence) = event.finished {
                let before = self.finished.insert(event.id, *sequence);
                assert!(before.is_none(), "sequence {} ends twice", event.id);
            }
        }
        self.check_pages();
        self.check_held_back();
        schedule
    }

    fn check(&mut self, schedule: &Schedule) {
        let SchedulerConfig { max_batch_size, max_num_tokens, max_seq_len, .. } = self.config;
        let sum = |rows: fn(&Scheduled) -> usize| schedule.parts.iter().map(rows).sum::<usize>();
        assert!(schedule.parts.len() <= max_batch_size);
        assert!(sum(|part| part.chunk + part.draft_len()) <= max_num_tokens);
        assert!(sum(|part| part.draft_rows) <= max_num_tokens);
        assert!(sum(|part| part.prompt_rows) <= 64);
        for (part, entry) in schedule.parts.iter().zip(self.scheduler.entries(schedule)) {
            let sequence = &self.scheduler.running[&part.key];
            assert!(part.num_given <= sequence.useful_given_len(max_seq_len));
            assert!(part.draft_lens.longest() <= sequence.useful_draft_len(max_seq_len));
            assert!(part.num_given == 0 || part.draft_lens.longest() == 0);
            assert_eq!(entry.speculates, part.draft_rows > 0);
            assert!(!entry.speculates || entry.is_read);
            assert!(!entry.is_read || sequence.limits.draft_len > 0);
            let is_new = schedule.started.contains(&part.id);
            assert_eq!(is_new, !self.started.contains(&part.id), "sequence {}", part.id);
            if is_new {
                self.started.push(part.id);
            }
        }
        let parts: BTreeSet<Key> = schedule.parts.iter().map(|part| part.key).collect();
        assert_eq!(parts.len(), schedule.parts.len(), "one part a sequence");
        let decoding = |key: &Key| {
            let sequence = &self.scheduler.running[key];
            sequence.decodes() && sequence.computed > 0
        };
        if schedule.parts.iter().any(|part| part.chunk > 1) {
            let mut left_out = self.scheduler.running.keys().filter(|key| !parts.contains(key));
            assert!(!left_out.any(decoding), "a prompt was preferred to a sequence that decodes");
        }
        self.check_order(schedule);
        self.check_blocks(schedule);
    }

    /// Blocks are cut only where a step has no other prompt to go on with, or tells of one.
    fn check_blocks(&self, schedule: &Schedule) {
        let Some(blocks) = self.config.prompt_blocks else { return };
        for (idx, part) in schedule.parts.iter().enumerate() {
            let sequence = &self.scheduler.running[&part.key];
            let end = sequence.computed + part.chunk;
            let is_cut = end < blocks.end(sequence.prompt_len) && !end.is_multiple_of(blocks.len);
            if is_cut && !sequence.tells_of_prompt() {
                let before = &schedule.parts[..idx];
                assert!(before.iter().all(|part| part.chunk == 1), "{} is cut", sequence.id);
            }
        }
    }

    /// Nothing that waits has its turn before what is let in, unless what it begins with is being computed.
    fn check_order(&self, schedule: &Schedule) {
        let Scheduler { waiting, .. } = &self.scheduler;
        for &id in schedule.started.iter().filter(|_| !self.forced) {
            let key = self.scheduler.keys[&id];
            let before = waiting.range(..key).filter(|(other, _)| other.priority == key.priority);
            for (&key, sequence) in before {
                assert!(self.prefix_is_coming(key, sequence), "{} is passed over", sequence.id);
            }
        }
    }

    /// Who lets others go ahead is told without a look at each prompt's pages, and must be the same.
    fn check_held_back(&self) {
        let coming = self.scheduler.coming();
        for (&key, sequence) in &self.scheduler.waiting {
            let is_held_back = self.scheduler.is_held_back(&coming, key, sequence);
            assert_eq!(is_held_back, self.prefix_is_coming(key, sequence), "{}", sequence.id);
        }
    }

    /// Whether a running sequence that comes before a waiting one is about to compute the page that this one would
    /// have to compute first.
    fn prefix_is_coming(&self, key: Key, sequence: &Sequence) -> bool {
        let needs_both = self.scheduler.is_read_for_certain(sequence);
        let idx = self.scheduler.prefix(sequence, needs_both).len();
        let end = (idx + 1) * PAGE_TOKENS;
        let computes = |other: &Sequence| {
            let blocks_end = |sequence: &Sequence| {
                self.config
                    .prompt_blocks
                    .map_or(0, |blocks| blocks.end(sequence.prompt_len).min(end))
            };
            let is_same = other.tokens.len() >= end
                && other.tokens[..end] == sequence.tokens[..end]
                && blocks_end(other) == blocks_end(sequence);
            let shares = other.shares == sequence.shares && other.shares != Shares::NoOne;
            // A page of generated tokens has no name before it is kept: nobody waits for one.
            let is_named = idx < other.page_keys.len();
            is_same
                && shares
                && is_named
                && (other.computed < end || self.reads_soon(other))
                && (self.scheduler.has_draft_half(other) || !needs_both)
        };
        let mut before = self.scheduler.running.range(..key);
        !sequence.tells_of_prompt()
            && end < sequence.tokens.len()
            && before.any(|(_, other)| computes(other))
    }

    /// Whether its drafter is too far behind to stay there.
    fn reads_soon(&self, sequence: &Sequence) -> bool {
        let most = 128.min(self.config.max_num_tokens / 4).max(1);
        let is_read = self.config.drafter_caches && sequence.is_read;
        is_read && sequence.computed - sequence.draft_computed >= most
    }

    fn check_pages(&self) {
        let held = || self.scheduler.running.values().flat_map(|sequence| &sequence.pages);
        let unique: BTreeSet<PageId> = held().copied().collect();
        assert_eq!(unique.len() + self.scheduler.pool.free_pages(), self.config.num_pages);
        assert!(self.scheduler.waiting.values().all(|sequence| sequence.pages.is_empty()));
        let paused =
            self.scheduler.waiting.values().filter(|sequence| sequence.is_paused()).count();
        assert_eq!(paused, self.scheduler.num_paused);
        let num_sequences = self.scheduler.waiting.len() + self.scheduler.running.len();
        assert_eq!(self.scheduler.keys.len(), num_sequences);
        for sequence in self.scheduler.running.values() {
            let most = self.scheduler.num_kept_pages(sequence);
            assert!(sequence.pages.len() <= most, "rows left behind");
            self.check_kept(sequence);
        }
    }

    /// Kept pages are no more written, all others have one holder.
    fn check_kept(&self, sequence: &Sequence) {
        let Sequence { pages, kept_pages, page_keys, computed, draft_computed, .. } = sequence;
        let (kept, own) = pages.split_at(*kept_pages);
        let drafts = self.scheduler.has_draft_half(sequence);
        let written_from = if drafts { *draft_computed } else { *computed };
        assert!(kept.len() * PAGE_TOKENS <= written_from);
        let pool = &self.scheduler.pool;
        for (&page, key) in kept.iter().zip(page_keys.iter()) {
            assert_eq!(pool.find(key, drafts), Some(page));
        }
        assert!(own.iter().all(|&page| pool.holders(page) == 1));
        let known: Vec<bool> =
            page_keys.iter().map(|key| pool.find(key, false).is_some()).collect();
        assert!(known.is_sorted_by(|a, b| a >= b), "kept without its beginning: {known:?}");
    }

    /// Every token of a prompt is told of once, in order and in its place, before the text begins.
    pub(super) fn check_told(&self) {
        for (id, sequence) in &self.finished {
            let wants = sequence.sampler.params().prompt_logprobs.is_some();
            let prompt = &sequence.tokens[..sequence.prompt_len];
            let expected =
                prompt.iter().enumerate().map(|(idx, &token)| (token, idx as f32)).skip(1);
            let expected: Vec<_> = expected.filter(|_| wants).collect();
            assert_eq!(self.told[id], expected, "sequence {id}");
        }
    }

    pub(super) fn run(&mut self) {
        while !self.scheduler.is_idle() {
            self.step();
            assert!(self.executor.num_steps < MAX_STEPS, "no progress");
        }
        // Those that ended in the last step are told with the next.
        self.step();
        assert_eq!(self.executor.remembered(), 0);
        assert_eq!(self.scheduler.pool.free_pages(), self.config.num_pages);
    }

    pub(super) fn check_texts(&self, cancelled: &BTreeSet<SequenceId>) {
        for (id, expected) in &self.expected {
            let text = self.texts.get(id).map_or(&[][..], Vec::as_slice);
            if cancelled.contains(id) {
                assert!(expected.starts_with(text), "sequence {id}");
            } else {
                assert_eq!(text, expected, "sequence {id}");
                assert_eq!(self.finished[id].generated(), expected, "sequence {id}");
            }
        }
    }
}
