//! Speculative steps on a GPU: one recorded graph drafts, verifies and accepts for all sequences. The host uploads what
//! it knows about them, replays the graph, has the next step begin if that needs nothing of it, and then waits.
//!
//! Nothing but the KV caches and the page table outlives a step on the device, unless the next one goes on from there.
//! Known tokens that come before the last one run as plain passes ahead of the graph, without waiting. Sequences that want
//! log-probabilities, their prompt's included, or tokens of a list alone, are decided about on the host.

use super::code::StepCode;
use super::device::{Graph, Mark};
use super::flight::Flight;
use super::forward::Gpu;
use super::model::Model;
use super::step_answers::Answers;
use super::step_buffers::{MAX_WORDS, StepBuffers, StepCapacity};
use super::step_graph::Shape;
use super::step_input::StepInput;
use super::step_issue::{Launched, slot};
use super::step_params::{ANSWERS, StepResult};
use super::step_part::{Asked, Part};
use super::step_upload::Uploads;
use crate::batch::{Entry, Executor, Outcome, Timing};
use crate::draft::{Drafter, Ngram, Proposal};
use crate::engine::{Engine, Manifest};
use crate::exec::Host;
use crate::sequence::SequenceId;
use crate::{Error, Result};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

/// The drafter's model.
pub struct DraftModel {
    /// On the same GPU as the target.
    pub model: Arc<Model>,
    /// Tokens that both models have.
    pub vocab_size: usize,
}

/// What steps need to be on their GPU.
pub struct OnGpu {
    /// Where everything is.
    pub gpu: Gpu,
    /// The model whose text is wanted.
    pub target: Arc<Model>,
    /// Asked for drafts first.
    pub lookup: Option<Ngram>,
    /// Asked where the look-up has nothing.
    pub draft: Option<DraftModel>,
    /// Whether steps may begin before the one before was told.
    pub launch_ahead: bool,
}

/// An executor of whole steps on one GPU.
pub struct Steps {
    pub(super) on: OnGpu,
    host: Host,
    pub(super) code: StepCode,
    pub(super) buffers: StepBuffers,
    pub(super) capacity: StepCapacity,
    pub(super) uploads: Uploads,
    pub(super) graphs: HashMap<Shape, Graph>,
    /// Behind the steps whose answers they are.
    pub(super) marks: [Mark; ANSWERS],
    /// Of the last step that was issued.
    pub(super) number: u32,
    /// The step that has begun before it was asked for.
    ahead: Option<Flight>,
    /// When the last step was told.
    told: Instant,
    /// Of the last step.
    pub(super) timing: Timing,
}

/// Where drafts of one in so many sequences were looked up, steps wait for the host to say so. Fewer go on with drafts of
/// the model: all would have to wait for them.
const FOUND_SHARE: usize = 4;

impl Steps {
    /// `host` decides about what this cannot, with the same models.
    pub fn new(engine: &Engine, on: OnGpu, host: Host) -> Result<Self> {
        let draft_vocab = on.draft.as_ref().map_or(0, |draft| draft.vocab_size);
        let capacity = StepCapacity::of(engine.manifest(), draft_vocab);
        let mut device = on.gpu.lock();
        let code = StepCode::load(engine, &mut **device)?;
        let buffers = StepBuffers::alloc(&capacity, &mut **device)?;
        let uploads = Uploads::alloc(&capacity, &mut **device)?;
        let marks = [device.new_mark()?, device.new_mark()?];
        drop(device);
        Ok(Self {
            on,
            host,
            code,
            buffers,
            capacity,
            uploads,
            graphs: HashMap::new(),
            marks,
            number: 0,
            ahead: None,
            told: Instant::now(),
            timing: Timing::Call,
        })
    }

    /// Bytes of GPU memory that steps take besides the models.
    pub fn bytes(target: &Manifest, draft_vocab: usize) -> usize {
        StepBuffers::bytes(&StepCapacity::of(target, draft_vocab))
    }

    /// Whether the device can decide about each of the entries, in order.
    fn split(&self, entries: &[Entry<'_>]) -> Vec<bool> {
        let mut words = 0;
        let takes = entries.iter().map(|entry| {
            let more = if entry.samples() { StepInput::num_words(entry) } else { 0 };
            // Without a drafter there is no room for drafts, and requests may bring some.
            let has_room = words + more <= MAX_WORDS && entry.given.len() <= self.capacity.drafts;
            let is_taken = has_room && decides_about(entry);
            words += if is_taken { more } else { 0 };
            is_taken
        });
        takes.collect()
    }

    /// The step of all entries, on the device or on the host.
    fn step_all(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Outcome>> {
        let takes = self.split(entries);
        let on_device: Vec<&Entry<'_>> = entries
            .iter()
            .zip(&takes)
            .filter(|(_, takes)| **takes)
            .map(|(entry, _)| entry)
            .collect();
        let on_host: Vec<Entry<'_>> = entries
            .iter()
            .zip(&takes)
            .filter(|(_, takes)| !**takes)
            .map(|(entry, _)| *entry)
            .collect();
        let mut device = if on_device.is_empty() {
            // Pages may change hands before somebody asks for a step that is on its way.
            self.ahead = None;
            Vec::new()
        } else {
            self.run(&on_device, on_host.is_empty())?
        }
        .into_iter();
        let mut host =
            if on_host.is_empty() { Vec::new() } else { self.host.step(&on_host)? }.into_iter();
        let next = |takes: &bool| if *takes { device.next() } else { host.next() };
        Ok(takes.iter().map(next).map(|outcome| outcome.expect("one outcome an entry")).collect())
    }

    /// After a failure: nothing is on its way, and what the device knows of pages is told anew.
    fn recover(&mut self) {
        self.ahead = None;
        self.uploads.forget_pages();
        // Whether it can still be waited for or not: the failure is told already.
        let _ = self.on.gpu.lock().wait();
    }

    /// The step of all entries. `alone` says that the host has no other work for the device.
    fn run(&mut self, entries: &[&Entry<'_>], alone: bool) -> Result<Vec<Outcome>> {
        let proposals = self.look_up(entries)?;
        let num_found = proposals.iter().filter(|proposal| !proposal.is_empty()).count();
        let needs_host =
            !alone || self.reach() == 0 || num_found * FOUND_SHARE >= entries.len().max(1);
        let ahead = self.ahead.take();
        let had_begun = ahead.is_some();
        let pages = self.uploads.pages();
        let place = |entry: &&Entry<'_>| ahead.as_ref()?.place_of(entry, pages);
        let landing: Vec<Option<usize>> = entries.iter().map(place).collect();
        let others = entries.iter().zip(proposals).zip(&landing);
        let others: Vec<_> = others.filter(|(_, place)| place.is_none()).map(|(e, _)| e).collect();
        let is_ahead = others.is_empty();
        let launched = if is_ahead { None } else { Some(self.launch(others)?) };

        let newest = match &launched {
            Some(launched) => launched.flight.as_ref(),
            None => ahead.as_ref(),
        };
        let mut next = match newest.filter(|flight| !needs_host && flight.goes_on(entries)) {
            Some(flight) => Some(self.go_on(flight, entries)?),
            None => None,
        };
        let landed = match &ahead {
            Some(flight) if landing.iter().any(Option::is_some) => Some(self.wait_for(flight)?),
            _ => None,
        };
        let answers = match &launched {
            Some(Launched { flight: Some(flight), .. }) => Some(self.wait_for(flight)?),
            // So that the step takes the time that it takes, and fails itself if it fails.
            Some(_) => self.on.gpu.lock().wait().map(|()| None)?,
            None => None,
        };
        if let (Some(next), Some(answers)) = (&mut next, answers.as_ref().or(landed.as_ref())) {
            next.begin_after(&answers.results);
        }
        self.ahead = next;
        self.timing = match self.timing {
            // The time of more than one step, and of part of one.
            Timing::Call if !is_ahead && had_begun => Timing::Unlike,
            Timing::Call if is_ahead && alone => Timing::Since(self.told),
            Timing::Call if is_ahead => Timing::Unlike,
            other => other,
        };
        self.told = Instant::now();
        let mut launched = self.outcomes(launched, answers.as_ref()).into_iter();
        let has_model = self.on.draft.is_some();
        let outcome = |(entry, place): (&&Entry<'_>, &Option<usize>)| match (place, &landed) {
            (Some(place), Some(landed)) => landed.outcome(*place, entry, 0, has_model),
            _ => launched.next().expect("an outcome of each entry that was launched"),
        };
        Ok(entries.iter().zip(&landing).map(outcome).collect())
    }

    /// Looks up drafts where that may succeed.
    fn look_up(&mut self, entries: &[&Entry<'_>]) -> Result<Vec<Proposal>> {
        match &mut self.on.lookup {
            Some(lookup) => {
                let entries: Vec<Entry<'_>> = entries.iter().map(|&&entry| entry).collect();
                lookup.propose(&entries)
            }
            None => Ok(vec![Proposal::default(); entries.len()]),
        }
    }

    /// Waits for a step, and reads its answer.
    fn wait_for(&self, flight: &Flight) -> Result<Answers> {
        self.on.gpu.lock().wait_for(self.marks[slot(flight)])?;
        let width = flight.shape.drafts + 1;
        let mut answers = Answers {
            results: vec![StepResult::default(); flight.shape.sequences],
            tokens: vec![0; flight.shape.sequences * width],
            width,
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

    fn outcomes(&self, launched: Option<Launched<'_>>, answers: Option<&Answers>) -> Vec<Outcome> {
        let mut places = 0..;
        let outcome = |part: &Part<'_>| match answers.filter(|_| part.entry.samples()) {
            Some(answers) => {
                let place = places.next().expect("places do not end");
                let has_model = part.drafter != Asked::LookupAlone;
                answers.outcome(place, part.entry, part.given.len(), has_model)
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

impl Executor for Steps {
    fn step(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Outcome>> {
        self.timing = Timing::Call;
        let outcomes = self.step_all(entries);
        if outcomes.is_err() {
            self.recover();
        }
        outcomes
    }

    fn forget(&mut self, id: SequenceId) {
        if let Some(lookup) = &mut self.on.lookup {
            lookup.forget(id);
        }
        self.host.forget(id);
        // Should it come back, it starts anew.
        if let Some(ahead) = &mut self.ahead {
            ahead.places.iter_mut().filter(|place| place.id == id).for_each(|place| place.len = 0);
        }
    }

    fn reach(&self) -> usize {
        // Where drafts come from texts alone the host wants to see each token before the next step.
        let looks_up_alone = self.on.lookup.is_some() && self.on.draft.is_none();
        let goes_ahead = self.on.launch_ahead && !looks_up_alone;
        // All drafts accepted and a token more, before drafts again.
        if goes_ahead { self.capacity.drafts + 1 } else { 0 }
    }

    fn timing(&self) -> Timing {
        self.timing
    }
}
