//! How steps are issued to the device: what it is told of the sequences, the known tokens that run ahead, and the graph.

use super::Steps;
use super::answers::{Answers, Settled};
use super::branches::{Branch, BranchPages, branches};
use super::entry::StepEntry;
use super::graph::{Shape, StepGraph};
use super::in_flight::{InFlight, Place};
use super::input::StepInput;
use super::params::{ANSWERS, Distribution, Drafting, NO_TOKEN};
use super::state_drafter::StateDrafter;
use super::upload::StepData;
use crate::Result;
use crate::batch::{Entry, Segment};
use crate::draft::{HeadSegment, HeadStates, KeptStates, Proposal};
use crate::draft_source::DraftLens;
use crate::exec::cuda::device::Graph;
use crate::exec::cuda::model::Extent;
use std::ops::Range;

/// Entries whose step was issued in this call.
pub(super) struct Launched<'a> {
    pub(super) parts: Vec<StepEntry<'a>>,
    /// The step of those that get tokens, if any do.
    pub(super) flight: Option<InFlight>,
}

impl Steps {
    /// Issues the step of entries that are not on their way.
    pub(super) fn launch<'a>(
        &mut self,
        entries: Vec<(&'a Entry<'a>, Option<Proposal>)>,
    ) -> Result<Launched<'a>> {
        let mut parts = self.parts(entries);
        self.run_last_rows_ahead(&mut parts);
        let shape = self.shape(&parts);
        let drafts = shape.filter(|shape| shape.from_graph > 0);
        let drafter = self.on.drafter.as_ref();
        let most_fed = drafts.zip(drafter).map_or(0, |(shape, drafter)| drafter.most_fed(shape));
        for part in &mut parts {
            let reaches_end = part.drafter_rows.end == part.entry.tokens.len();
            let asks = part.entry.samples() && reaches_end;
            part.num_fed = if asks { part.drafter_rows.len().min(most_fed) } else { 0 };
        }
        let shape = shape.map(|shape| self.branch(&mut parts, shape));
        self.run_known(&parts)?;
        let Some(shape) = shape else { return Ok(Launched { parts, flight: None }) };
        self.number = self.number.wrapping_add(1);
        let pages = self.branch_pages(&parts)?;
        self.tell(&parts, &pages, shape)?;
        self.tell_states(&parts, shape)?;
        let place = |Branch { part, .. }: Branch<'_, '_>| Place {
            id: part.entry.id,
            len: part.entry.tokens.len(),
            draft_len: part.draft_len(),
            min_confidence: part.entry.min_confidence,
            is_given: !part.given.is_empty(),
        };
        let places = branches(&parts).map(place).collect();
        let flight = InFlight { number: self.number, shape, places };
        self.replay(&flight, &places_that_have_run(&parts))?;
        Ok(Launched { parts, flight: Some(flight) })
    }

    /// Has the device go on with the step after `newest`, if that needs nothing that only the host will know.
    pub(super) fn launch_ahead(
        &mut self,
        newest: &InFlight,
        entries: &[&Entry<'_>],
    ) -> Result<Option<InFlight>> {
        if !newest.goes_on(entries) {
            return Ok(None);
        }
        let next = newest.next();
        self.number = next.number;
        self.uploads.next_slot();
        let pages = entries.iter().map(|entry| entry.pages).enumerate();
        self.uploads.tell_pages(pages, &self.buffers, &mut **self.on.gpu.lock())?;
        self.replay(&next, &[])?;
        Ok(Some(next))
    }

    fn parts<'a>(&mut self, entries: Vec<(&'a Entry<'a>, Option<Proposal>)>) -> Vec<StepEntry<'a>> {
        let ends_in_block: Vec<bool> =
            entries.iter().map(|(entry, _)| self.ends_in_block(entry)).collect();
        let drafter = self.on.drafter.as_deref();
        let mut kept = match drafter.and_then(|drafter| drafter.state_drafter()) {
            Some(_) => self.host.kept_states(),
            None => None,
        };
        let parts = entries.into_iter().zip(ends_in_block).map(|((entry, found), has_run)| {
            let is_free = drafter.is_some() && found.is_none();
            let found = found.map(|proposal| proposal.tokens).unwrap_or_default();
            let given = [&found, entry.given].concat();
            // Behind a row that the graph does not run nothing is drafted.
            let draft_lens = if has_run { DraftLens::default() } else { entry.draft_lens };
            let asked = Entry { draft_lens, ..*entry };
            let drafter_rows = match &mut kept {
                _ if !is_free => 0..0,
                Some(states) => states.rows_to_feed(&asked, entry.speculates),
                None => drafter.map_or(0..0, |drafter| drafter.rows_to_feed(&asked)),
            };
            // Without the state before the last token nothing is drafted from states.
            let has_states = !drafter_rows.is_empty() && drafter_rows.end == entry.tokens.len();
            let asks_graph = is_free && !has_run && (kept.is_none() || has_states);
            let (num_fed, forks) = (0, Vec::new());
            StepEntry { entry, given, asks_graph, drafter_rows, num_fed, has_run, forks }
        });
        parts.collect()
    }

    /// Where all that get tokens come to the end of known tokens that run ahead, their last ones run with these: the graph
    /// would read all weights once more for them. Beside others they take nothing in it.
    fn run_last_rows_ahead(&self, parts: &mut [StepEntry<'_>]) {
        let sampling = |part: &&mut StepEntry<'_>| part.entry.samples();
        let can = |part: &mut StepEntry<'_>| {
            let verifies = !part.given.is_empty() || part.draft_len() > 0;
            part.has_run || part.entry.chunk > 1 && !verifies
        };
        if parts.iter_mut().filter(sampling).all(can) {
            parts.iter_mut().filter(sampling).for_each(|part| part.has_run = true);
        }
    }

    /// What drafts in the graph from hidden states, if it does.
    pub(super) fn state_drafter(&self) -> Option<StateDrafter<'_>> {
        self.on.drafter.as_ref()?.state_drafter()
    }

    /// The smallest recorded step that holds the sequences that get tokens; none if none does.
    fn shape(&self, parts: &[StepEntry<'_>]) -> Option<Shape> {
        let sampling = || parts.iter().filter(|part| part.entry.samples());
        let sequences = sampling().count();
        if sequences == 0 {
            return None;
        }
        let asked = sampling().map(StepEntry::draft_len).max().unwrap_or(0);
        let given = sampling().map(|part| part.given.len()).max().unwrap_or(0);
        Some(Shape {
            sequences: self.capacity.places_for(sequences),
            drafts: asked.max(given),
            from_graph: asked,
        })
    }

    /// Runs all known tokens but those that the graph runs.
    fn run_known(&mut self, parts: &[StepEntry<'_>]) -> Result<()> {
        let mut device = self.on.gpu.lock();
        let ahead = || parts.iter().filter(|part| !part.rows_ahead().is_empty());
        let drafter = self.on.drafter.as_ref();
        let from_states = drafter.and_then(|drafter| drafter.state_drafter());
        match (drafter, from_states, self.host.kept_states()) {
            (_, Some(StateDrafter::Head(head)), Some(KeptStates::OfRows(states))) => {
                let segments = ahead().map(|part| head_rows(part, part.rows_ahead(), states));
                head.run(&segments.collect::<Vec<_>>(), &mut **device)?;
            }
            (Some(drafter), _, _) => {
                let segments = ahead().map(|part| known(part.entry, part.rows_ahead()));
                drafter.catch_up(&segments.collect::<Vec<_>>(), &mut **device)?;
            }
            (None, _, _) => (),
        }
        let blocks = self.on.target.prompt_blocks();
        let known_rows = |part: &StepEntry<'_>| {
            let entry = part.entry;
            let in_graph = entry.samples() && !part.has_run;
            let end = entry.computed + entry.chunk - usize::from(in_graph);
            let blocks_end = blocks.map_or(0, |blocks| blocks.end(entry.prompt_len));
            (entry.computed..end, blocks_end.clamp(entry.computed, end))
        };
        // Blocks first: rows behind them then share passes with those of others.
        let in_blocks = parts.iter().map(|part| {
            let (rows, blocks_end) = known_rows(part);
            (part, rows.start..blocks_end)
        });
        let behind = parts.iter().map(|part| {
            let (rows, blocks_end) = known_rows(part);
            (part, blocks_end..rows.end)
        });
        let (mut segments, mut places) = (Vec::new(), Vec::new());
        for (part, rows) in in_blocks.chain(behind).filter(|(_, rows)| !rows.is_empty()) {
            let reaches_end = part.has_run && rows.end == part.entry.tokens.len();
            places.extend(place_of(parts, part).filter(|_| reaches_end));
            let num_logits = usize::from(reaches_end);
            segments.push(Segment { num_logits, ..known(part.entry, rows) });
        }
        self.on.target.run_to_head(&segments, &self.buffers.last_rows, &places, &mut **device)
    }

    /// Tells a step what it is about.
    fn tell(
        &mut self,
        parts: &[StepEntry<'_>],
        own_pages: &[Option<BranchPages>],
        shape: Shape,
    ) -> Result<()> {
        let Shape { sequences, drafts, .. } = shape;
        let mut told = StepData {
            input: StepInput::new(self.capacity.last_len()),
            drafting: vec![Drafting::default(); sequences],
            drafts: vec![0; sequences * drafts],
            distributions: vec![Distribution::certain(NO_TOKEN); sequences * drafts],
            number: self.number,
        };
        for Branch { place, part, nth } in branches(parts) {
            told.input.push(part.entry, part.planned(nth));
            told.drafting[place].num_drafted = part.given.len() as u32;
            for (idx, &token) in part.given.iter().enumerate() {
                told.drafts[place * drafts + idx] = token;
                told.distributions[place * drafts + idx] = Distribution::certain(token);
            }
        }
        told.input.pad(sequences);
        self.uploads.next_slot();
        let device = &mut **self.on.gpu.lock();
        self.uploads.tell(&told, &self.buffers, device)?;
        let pages = branches(parts).zip(own_pages).map(|(branch, own)| match own {
            Some(own) => (branch.place, &own.all[..]),
            None => (branch.place, branch.part.entry.pages),
        });
        self.uploads.tell_pages(pages, &self.buffers, device)
    }

    /// Tells what drafts from hidden states in the graph what it begins with.
    fn tell_states(&mut self, parts: &[StepEntry<'_>], shape: Shape) -> Result<()> {
        if shape.from_graph == 0 {
            return Ok(());
        }
        let from_states = self.on.drafter.as_ref().and_then(|drafter| drafter.state_drafter());
        let device = &mut **self.on.gpu.lock();
        match (from_states, self.host.kept_states()) {
            (Some(StateDrafter::Head(head)), Some(KeptStates::OfRows(states))) => {
                let fed = branches(parts).map(|Branch { part, .. }| {
                    let rows = part.drafter_rows.end - part.num_fed..part.drafter_rows.end;
                    (head_rows(part, rows, states), part.draft_len())
                });
                head.tell(shape, &fed.collect::<Vec<_>>(), device)
            }
            (Some(StateDrafter::Medusa(heads)), Some(KeptStates::Last(states))) => {
                let last = branches(parts).map(|branch| states.before_last(branch.part.entry));
                heads.tell(shape, last, device)
            }
            _ => Ok(()),
        }
    }

    /// Takes in what the target's hidden states have become of the rows of a step.
    pub(super) fn take_states(
        &mut self,
        launched: &Launched<'_>,
        answers: &Answers,
        settled: &[Settled],
    ) -> Result<()> {
        let from_states = self.on.drafter.as_ref().and_then(|drafter| drafter.state_drafter());
        let kept = from_states.zip(self.host.kept_states());
        let Some((from_states, mut kept)) = kept else { return Ok(()) };
        let Some(InFlight { shape, .. }) = launched.flight else { return Ok(()) };
        let sampling = || launched.parts.iter().filter(|part| part.entry.samples());
        if !sampling().any(|part| kept.wants(part.entry)) {
            return Ok(());
        }
        let states = from_states.states(shape, &mut **self.on.gpu.lock())?;
        let width = from_states.width();
        let place_len = (shape.drafts + 1) * width;
        for (part, &Settled { place, .. }) in sampling().zip(settled) {
            if kept.wants(part.entry) {
                // Of the last known token, and of the drafts that were kept.
                let valid = (1 + answers.results[place].accepted as usize) * width;
                kept.take(part.entry, &states[place * place_len..][..valid]);
            }
        }
        Ok(())
    }

    /// Issues a step. The last rows of some places may `have_run` ahead of it.
    fn replay(&mut self, flight: &InFlight, have_run: &[usize]) -> Result<()> {
        let shape = flight.shape;
        if have_run.is_empty() {
            self.replay_part(shape, Extent::Whole)?;
        } else {
            if have_run.len() < flight.places.len() {
                self.replay_part(shape, Extent::Layers)?;
            }
            self.put_last_rows(shape, have_run)?;
            self.replay_part(shape, Extent::Head)?;
        }
        self.on.gpu.lock().put_mark(self.marks[slot(flight)])
    }

    /// Part of a step, recorded when its like is asked for first.
    fn replay_part(&mut self, shape: Shape, extent: Extent) -> Result<()> {
        let graph = match self.graphs.get(&(shape, extent)) {
            Some(&graph) => graph,
            None => {
                self.has_recorded = true;
                self.record(shape, extent)?
            }
        };
        self.on.gpu.lock().replay(graph)
    }

    /// Puts the last rows of places to where the target's head finds them.
    fn put_last_rows(&self, shape: Shape, places: &[usize]) -> Result<()> {
        let device = &mut **self.on.gpu.lock();
        let rows = self.on.target.residual_rows();
        for &place in places {
            let copies = self.buffers.last_rows.copy(place, &rows, place * (shape.drafts + 1));
            copies.iter().try_for_each(|op| device.issue(op))?;
        }
        Ok(())
    }

    /// Records the steps that are common, so that no request waits for it.
    pub(super) fn record_common(&mut self) -> Result<()> {
        let shapes = Shape::recorded(&self.capacity, self.on.drafter.is_some());
        let held: Vec<Shape> = shapes.into_iter().filter(|&shape| self.holds(shape)).collect();
        for shape in held {
            self.record(shape, Extent::Whole)?;
            // Prompts that come to their end, and nobody else.
            if shape.drafts == 0 {
                self.record(shape, Extent::Head)?;
            }
        }
        Ok(())
    }

    fn record(&mut self, shape: Shape, extent: Extent) -> Result<Graph> {
        assert!(self.holds(shape), "{shape:?} is more than the buffers of its passes hold");
        let parts = StepGraph {
            target: &self.on.target,
            drafter: self.on.drafter.as_deref(),
            draft_vocab: self.capacity.draft_vocab,
            code: &self.code,
            buffers: &self.buffers,
            max_pages: self.capacity.max_pages,
            last_len: self.capacity.last_len(),
        };
        let graph = self.on.gpu.lock().record(&parts.step(shape, extent))?;
        self.graphs.insert((shape, extent), graph);
        Ok(graph)
    }
}

/// The place of a sequence's first branch, if it gets tokens.
fn place_of(parts: &[StepEntry<'_>], part: &StepEntry<'_>) -> Option<usize> {
    let first = |branch: &Branch<'_, '_>| std::ptr::eq(branch.part, part);
    branches(parts).find(first).map(|branch| branch.place)
}

/// The places whose last known token runs ahead of the graph.
fn places_that_have_run(parts: &[StepEntry<'_>]) -> Vec<usize> {
    branches(parts).filter(|branch| branch.part.has_run).map(|branch| branch.place).collect()
}

/// Known tokens of a sequence, whose logits nobody wants.
fn known<'a>(entry: &Entry<'a>, rows: Range<usize>) -> Segment<'a> {
    Segment {
        tokens: &entry.tokens[rows.clone()],
        first_position: rows.start,
        pages: entry.pages,
        prompt_len: entry.prompt_len,
        num_logits: 0,
        tree: &[],
    }
}

/// The same of a head, with the states that wait for the rows to feed.
fn head_rows<'a>(
    part: &StepEntry<'a>,
    rows: Range<usize>,
    states: &'a HeadStates,
) -> HeadSegment<'a> {
    let before = rows.start - part.drafter_rows.start;
    let waiting = states.of(part.entry.id, before..before + rows.len());
    HeadSegment {
        tokens: &part.entry.tokens[rows.clone()],
        states: waiting,
        first_position: rows.start,
        pages: part.entry.pages,
        num_logits: 0,
        tree: &[],
    }
}

/// Which of the answers is a step's.
pub(super) fn slot(flight: &InFlight) -> usize {
    flight.number as usize % ANSWERS
}
