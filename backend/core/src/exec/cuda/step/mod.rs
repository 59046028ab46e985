//! Speculative steps on a GPU: one recorded graph drafts, verifies and accepts for all sequences. The host uploads what
//! it knows about them, replays the graph, has the next step begin if that needs nothing of it, and then waits.
//!
//! Nothing but the KV caches and the page table outlives a step on the device, unless the next one goes on from there.
//! Known tokens that come before the last one run as plain passes ahead of the graph, without waiting; the last one of a prompt
//! may too, and the graph has its logits alone. Sequences that want log-probabilities, their prompt's included, or tokens of a
//! list alone, are decided about on the host, and so are trees of drafts.

mod answers;
mod branches;
mod buffers;
mod code;
mod drafter;
mod entry;
pub(crate) mod forks;
mod graph;
mod head;
mod in_flight;
pub(crate) mod input;
mod issue;
mod medusa;
mod outline;
mod page_table;
pub mod params;
mod spread;
mod state_drafter;
mod upload;

use crate::batch::{Entry, Executor, Outcome, PromptBlocks, Stepped, Unwanted, WANTED};
use crate::draft::{Drafter, Proposal, ask_first};
use crate::draft_source::{Branching, DraftLens, DraftSource};
use crate::engine::{Engine, Manifest};
use crate::exec::Host;
use crate::exec::cuda::device::{Gpu, Graph, Mark};
use crate::exec::cuda::model::{Extent, Model};
use crate::pages::PageId;
use crate::sequence::SequenceId;
use crate::{Error, Result};
use answers::{Answers, Settled};
use branches::Branches;
pub(crate) use branches::{branch_pages, step_limits};
use buffers::{MAX_WORDS, StepBuffers, StepCapacity};
use code::StepCode;
pub(crate) use drafter::{DraftModel, GraphDrafter, PartOfTarget};
use entry::StepEntry;
pub(crate) use graph::Shape;
pub(crate) use head::HeadDrafter;
use in_flight::InFlight;
use input::StepInput;
use issue::{Launched, slot};
pub(crate) use medusa::MedusaDrafter;
use params::{ANSWERS, StepResult};
use state_drafter::StateDrafter;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use upload::Uploads;

/// What steps need to be on their GPU.
pub(crate) struct OnGpu {
    /// Where everything is.
    pub gpu: Gpu,
    /// The model whose text is wanted.
    pub target: Arc<Model>,
    /// Asked for drafts first, on the host.
    pub first: Option<Box<dyn Drafter>>,
    /// Asked where that has nothing.
    pub drafter: Option<Box<dyn GraphDrafter>>,
    /// Whether steps may begin before the one before was told.
    pub launch_ahead: bool,
    /// Branches of a draft of `drafter`, at most.
    pub branches: usize,
    /// Pages for them, as many as [`branch_pages`], which no sequence has.
    pub branch_pages: Range<PageId>,
}

/// An executor of whole steps on one GPU.
pub(crate) struct Steps {
    on: OnGpu,
    host: Host,
    code: StepCode,
    buffers: StepBuffers,
    capacity: StepCapacity,
    branches: Branches,
    uploads: Uploads,
    graphs: HashMap<(Shape, Extent), Graph>,
    /// Behind the steps whose answers they are.
    marks: [Mark; ANSWERS],
    /// Of the last step that was issued.
    number: u32,
    /// The step that has begun before it was asked for.
    in_flight: Option<InFlight>,
    /// When the last step was told.
    told_at: Instant,
    /// Whether this call has recorded a graph.
    has_recorded: bool,
}

/// What the device did of a call.
struct Ran {
    outcomes: Vec<Outcome>,
    /// When the work began whose time is that of a step; none where it is not that of one.
    began: Option<Instant>,
    /// Whether all of it had begun before.
    ahead: bool,
}

/// Where the host has drafts of one in so many sequences, steps wait for it to say so. Fewer go on with drafts of the
/// graph: all would have to wait for them.
const FOUND_SHARE: usize = 4;

impl Steps {
    /// `host` decides about what this cannot, with the same models.
    pub(crate) fn new(engine: &Engine, on: OnGpu, host: Host) -> Result<Self> {
        let draft_vocab = on.drafter.as_ref().map_or(0, |drafter| drafter.vocab_size());
        let capacity = StepCapacity::of(engine.manifest(), draft_vocab, on.branches);
        let limits = &engine.manifest().limits;
        let branches = Branches::new(limits, on.branches, on.branch_pages.clone());
        let mut device = on.gpu.lock();
        let code = StepCode::load(engine, &mut **device)?;
        let buffers = StepBuffers::alloc(&capacity, &mut **device)?;
        let uploads = Uploads::alloc(&capacity, &mut **device)?;
        let marks = [device.new_mark()?, device.new_mark()?];
        drop(device);
        let mut steps = Self {
            on,
            host,
            code,
            buffers,
            capacity,
            branches,
            uploads,
            graphs: HashMap::new(),
            marks,
            number: 0,
            in_flight: None,
            told_at: Instant::now(),
            has_recorded: false,
        };
        steps.record_common()?;
        Ok(steps)
    }

    /// Bytes of GPU memory that steps take besides the models.
    pub(crate) fn bytes(target: &Manifest, draft_vocab: usize, branches: usize) -> usize {
        StepBuffers::bytes(&StepCapacity::of(target, draft_vocab, branches))
    }

    /// Whether the device can decide about each of the entries, in order. `found` is the drafts that there are already.
    fn split(&self, entries: &[Entry<'_>], found: &[Option<Proposal>]) -> Vec<bool> {
        let mut words = 0;
        let takes = entries.iter().zip(found).map(|(entry, found)| {
            let more = if entry.samples() { StepInput::num_words(entry) } else { 0 };
            // Without a drafter there is no room for drafts, and requests may bring some.
            let has_room = words + more <= MAX_WORDS && entry.given.len() <= self.capacity.drafts;
            let is_chain = found.as_ref().is_none_or(Proposal::is_chain);
            // Where drafts come from states, prompts do through the host, whose drafter keeps theirs.
            let ends_in_block = self.ends_in_block(entry);
            let is_decoding = entry.samples() && entry.chunk == 1 && !ends_in_block;
            let has_states = self.state_drafter().is_none() || is_decoding;
            // Here drafts are verified beside the last known token, which is in a block then.
            let has_drafts = found.is_some() || !entry.given.is_empty();
            let has_row = !(ends_in_block && has_drafts);
            let is_taken = has_room && is_chain && has_states && has_row && decides_about(entry);
            words += if is_taken { more } else { 0 };
            is_taken
        });
        takes.collect()
    }

    /// Whether the last known token, for whose logits the step is, is in a block of its prompt.
    fn ends_in_block(&self, entry: &Entry<'_>) -> bool {
        let blocks = self.on.target.prompt_blocks();
        let ends = |blocks: PromptBlocks| blocks.end(entry.prompt_len) == entry.tokens.len();
        entry.samples() && blocks.is_some_and(ends)
    }

    /// The step of all entries, on the device or on the host.
    fn step_all(&mut self, entries: &[Entry<'_>]) -> Result<Stepped> {
        let start = Instant::now();
        let found = match self.on.first.as_deref_mut() {
            Some(first) => ask_first(first, entries)?,
            None => vec![None; entries.len()],
        };
        let looking_up = start.elapsed();
        let takes = self.split(entries, &found);
        let mut on_device = Vec::new();
        let mut on_host: Vec<Entry<'_>> = Vec::new();
        for ((entry, found), &takes) in entries.iter().zip(found).zip(&takes) {
            match takes {
                true => on_device.push((entry, found)),
                // There drafters on a GPU draft chains.
                false => on_host.push(Entry { branching: Branching::CHAIN, ..*entry }),
            }
        }
        let drafts_in_graph = self.on.drafter.is_some() && !on_device.is_empty();
        let ran = match on_device.is_empty() {
            // Pages may change hands before somebody asks for a step that is on its way.
            true => {
                self.in_flight = None;
                Ran { outcomes: Vec::new(), began: Some(start), ahead: false }
            }
            false => self.run(on_device, on_host.is_empty(), start)?,
        };
        let mut device = ran.outcomes.into_iter();
        let on_host = self.on_host(&on_host)?;
        let drafting = looking_up + on_host.drafting.unwrap_or_default();
        let mut host = on_host.outcomes.into_iter();
        let next = |takes: &bool| if *takes { device.next() } else { host.next() };
        let outcome = |outcome: Option<Outcome>| outcome.expect("one outcome an entry");
        let outcomes: Vec<Outcome> = takes.iter().map(next).map(outcome).collect();
        Ok(Stepped {
            as_asked: self.lookahead() == 0 || drafted_as_asked(entries, &outcomes),
            outcomes,
            cost: ran.began.map(|began| began.elapsed()),
            drafting: (!drafts_in_graph).then_some(drafting),
            ahead: ran.ahead,
        })
    }

    fn on_host(&mut self, entries: &[Entry<'_>]) -> Result<Stepped> {
        if entries.is_empty() {
            return Ok(Stepped::default());
        }
        let stepped = self.host.step(entries, WANTED)?;
        Ok(stepped.expect("it is wanted"))
    }

    /// After a failure: nothing is on its way, and what the device knows of pages is told anew.
    fn recover(&mut self) {
        self.in_flight = None;
        self.uploads.forget_pages();
        // Whether it can still be waited for or not: the failure is told already.
        let _ = self.on.gpu.lock().wait();
    }

    /// The step of all entries on the device: takes what is on its way already, launches what is missing, launches ahead
    /// what comes next, waits, and tells. `alone` says that the host has no other work for the device.
    fn run(
        &mut self,
        entries: Vec<(&Entry<'_>, Option<Proposal>)>,
        alone: bool,
        start: Instant,
    ) -> Result<Ran> {
        self.has_recorded = false;
        let (entries, found): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
        let entries = &entries[..];
        let num_found = found.iter().flatten().count();
        let may_launch_ahead =
            alone && self.lookahead() > 0 && num_found * FOUND_SHARE < entries.len().max(1);

        let before = self.in_flight.take();
        let places = self.places_of(entries, before.as_ref());
        let launched = self.launch_missing(entries, found, &places)?;
        let newest = match &launched {
            Some(launched) => launched.flight.as_ref(),
            None => before.as_ref(),
        };
        let mut next = match newest.filter(|_| may_launch_ahead) {
            Some(newest) => self.launch_ahead(newest, entries)?,
            None => None,
        };

        let landed = match before.as_ref().filter(|_| places.iter().any(Option::is_some)) {
            Some(before) => Some(self.wait_for(before)?),
            None => None,
        };
        let answers = self.wait_for_launched(launched.as_ref())?;
        let settled = match (&launched, &answers) {
            (Some(launched), Some(answers)) => self.settle(launched, answers)?,
            _ => Vec::new(),
        };
        if let (Some(launched), Some(answers)) = (&launched, &answers) {
            self.take_states(launched, answers, &settled)?;
        }
        if let (Some(next), Some(answers)) = (&mut next, answers.as_ref().or(landed.as_ref())) {
            next.begin_after(&answers.results);
        }
        self.in_flight = next;

        let (ahead, told_before) = (launched.is_none(), self.told_at);
        self.told_at = Instant::now();
        let began = match (ahead, before) {
            _ if self.has_recorded => None,
            (true, _) if alone => Some(told_before),
            // The time of part of a step, or of more than one.
            (true, _) | (false, Some(_)) => None,
            (false, None) => Some(start),
        };
        let mut launched = self.outcomes(launched, answers.as_ref(), &settled).into_iter();
        let outcome = |place: &Option<usize>| match (place, &landed) {
            (Some(place), Some(landed)) => landed.outcome(&landed.settled(*place), 0),
            _ => launched.next().expect("an outcome of each entry that was launched"),
        };
        let outcomes = places.iter().map(outcome).collect();
        Ok(Ran { outcomes, ahead: ahead && began.is_some(), began })
    }

    /// Where the step that is on its way does what each entry asks for.
    fn places_of(
        &self,
        entries: &[&Entry<'_>],
        in_flight: Option<&InFlight>,
    ) -> Vec<Option<usize>> {
        let pages = self.uploads.pages();
        let place = |entry: &&Entry<'_>| in_flight?.place_of(entry, pages);
        entries.iter().map(place).collect()
    }

    /// Issues the step of the entries that have no place in what is on its way; none if all have.
    fn launch_missing<'a>(
        &mut self,
        entries: &[&'a Entry<'a>],
        found: Vec<Option<Proposal>>,
        places: &[Option<usize>],
    ) -> Result<Option<Launched<'a>>> {
        let missing = entries.iter().zip(found).zip(places);
        let missing = missing.filter(|(_, place)| place.is_none());
        let missing: Vec<_> = missing.map(|((&entry, found), _)| (entry, found)).collect();
        if missing.is_empty() { Ok(None) } else { self.launch(missing).map(Some) }
    }

    /// Waits for what this call has launched; the answers of those that get tokens, if any do.
    fn wait_for_launched(&self, launched: Option<&Launched<'_>>) -> Result<Option<Answers>> {
        match launched {
            Some(Launched { flight: Some(flight), .. }) => self.wait_for(flight).map(Some),
            // So that the step takes the time that it takes, and fails itself if it fails.
            Some(_) => self.on.gpu.lock().wait().map(|()| None),
            None => Ok(None),
        }
    }

    /// Waits for a step, and reads its answer.
    fn wait_for(&self, flight: &InFlight) -> Result<Answers> {
        self.on.gpu.lock().wait_for(self.marks[slot(flight)])?;
        let width = flight.shape.drafts + 1;
        let mut answers = Answers {
            results: vec![StepResult::default(); flight.shape.sequences],
            tokens: vec![0; flight.shape.sequences * width],
            width,
            at_once: self.on.drafter.as_ref().is_some_and(|drafter| drafter.drafts_at_once()),
        };
        let StepBuffers { answers: shared, answer, .. } = &self.buffers;
        let first = slot(flight) * answer.bytes;
        let mut done = [0];
        shared.copy_to(first, &mut answers.results);
        shared.copy_to(first + answer.tokens, &mut answers.tokens);
        shared.copy_to(first + answer.done, &mut done);
        if done != [flight.number] {
            let message =
                format!("step {} is awaited, the device tells of {}", flight.number, done[0]);
            return Err(Error::Device(message));
        }
        Ok(answers)
    }

    fn outcomes(
        &self,
        launched: Option<Launched<'_>>,
        answers: Option<&Answers>,
        settled: &[Settled],
    ) -> Vec<Outcome> {
        let mut settled = settled.iter();
        let outcome = |part: &StepEntry<'_>| match answers.filter(|_| part.entry.samples()) {
            Some(answers) => {
                let settled = settled.next().expect("one a sequence that gets tokens");
                let outcome = answers.outcome(settled, part.given.len());
                match self.state_drafter() {
                    Some(StateDrafter::Head(_)) => {
                        Outcome { draft_computed: part.head_computed(), ..outcome }
                    }
                    // There is no cache.
                    Some(StateDrafter::Medusa(_)) => {
                        Outcome { draft_computed: part.entry.draft_computed, ..outcome }
                    }
                    None => outcome,
                }
            }
            None => Outcome { draft_computed: part.draft_computed(), ..Outcome::default() },
        };
        launched.map_or_else(Vec::new, |launched| launched.parts.iter().map(outcome).collect())
    }
}

/// Whether a step on the device can do all that the request wants.
fn decides_about(entry: &Entry<'_>) -> bool {
    let params = entry.sampler.params();
    params.logprobs.is_none() && params.allowed_tokens.is_none() && entry.prompt_rows == 0
}

/// Whether drafts were made where they were asked for, and nowhere else. A model always has some; of a look-up it is not
/// known.
fn drafted_as_asked(entries: &[Entry<'_>], outcomes: &[Outcome]) -> bool {
    let mut pairs = entries.iter().zip(outcomes);
    pairs.all(|(entry, outcome)| {
        let DraftLens { lookup, model } = entry.draft_lens;
        !entry.given.is_empty()
            || match outcome.draft().map(|draft| draft.source) {
                None => model == 0,
                Some(DraftSource::Lookup) => lookup > 0,
                Some(DraftSource::Model) => model > 0,
            }
    })
}

impl Executor for Steps {
    fn step(&mut self, entries: &[Entry<'_>], _: Unwanted<'_>) -> Result<Option<Stepped>> {
        let stepped = self.step_all(entries);
        if stepped.is_err() {
            self.recover();
        }
        stepped.map(Some)
    }

    fn forget(&mut self, id: SequenceId) {
        if let Some(first) = &mut self.on.first {
            first.forget(id);
        }
        self.host.forget(id);
        // Should it come back, it starts anew.
        if let Some(in_flight) = &mut self.in_flight {
            let places = in_flight.places.iter_mut().filter(|place| place.id == id);
            places.for_each(|place| place.len = 0);
        }
    }

    fn prompt_blocks(&self) -> Option<PromptBlocks> {
        self.on.target.prompt_blocks()
    }

    fn lookahead(&self) -> usize {
        // Where drafts come from texts alone the host wants to see each token before the next step.
        let looks_up_alone = self.on.first.is_some() && self.on.drafter.is_none();
        // Nor does what drafts from states go on without those that the host keeps.
        // And the host has branches begin on pages of their own.
        let goes_on_alone = self.state_drafter().is_none() && !self.branches.any();
        let launches_ahead = self.on.launch_ahead && !looks_up_alone && goes_on_alone;
        // All drafts accepted and a token more, before drafts again.
        if launches_ahead { self.capacity.drafts + 1 } else { 0 }
    }
}
