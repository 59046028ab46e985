//! How steps are issued to the device: what it is told of the sequences, the known tokens that run ahead, and the graph.

use super::Steps;
use super::entry::StepEntry;
use super::graph::{Shape, StepGraph};
use super::in_flight::{InFlight, Place};
use super::input::StepInput;
use super::params::{ANSWERS, Distribution, Drafting, MAX_FED, NO_TOKEN};
use super::upload::StepData;
use crate::Result;
use crate::batch::{Entry, Segment};
use crate::draft::Proposal;
use crate::exec::cuda::device::Graph;
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
        let shape = self.shape(&parts);
        for part in &mut parts {
            let rows = part.drafter_rows().len();
            let asks = shape.is_some_and(|shape| shape.passes > 0) && part.entry.samples();
            part.num_fed = if asks { rows.min(MAX_FED) } else { 0 };
        }
        self.run_known(&parts)?;
        let Some(shape) = shape else { return Ok(Launched { parts, flight: None }) };
        self.number = self.number.wrapping_add(1);
        self.tell(&parts, shape)?;
        let place = |part: &StepEntry<'_>| Place {
            id: part.entry.id,
            len: part.entry.tokens.len(),
            draft_len: part.draft_len(),
            min_confidence: part.entry.min_confidence,
            is_given: !part.given.is_empty(),
        };
        let sampling = parts.iter().filter(|part| part.entry.samples());
        let flight = InFlight { number: self.number, shape, places: sampling.map(place).collect() };
        self.replay(&flight)?;
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
        self.replay(&next)?;
        Ok(Some(next))
    }

    fn parts<'a>(&self, entries: Vec<(&'a Entry<'a>, Option<Proposal>)>) -> Vec<StepEntry<'a>> {
        let has_drafter = self.on.drafter.is_some();
        let parts = entries.into_iter().map(|(entry, found)| {
            let asks_graph = has_drafter && found.is_none();
            let found = found.map(|proposal| proposal.tokens).unwrap_or_default();
            let given = [&found, entry.given].concat();
            StepEntry { entry, given, asks_graph, num_fed: 0 }
        });
        parts.collect()
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
            sequences: sequences.next_power_of_two().min(self.capacity.sequences),
            drafts: asked.max(given),
            passes: asked,
        })
    }

    /// Runs all known tokens but those that the graph runs.
    fn run_known(&self, parts: &[StepEntry<'_>]) -> Result<()> {
        let mut device = self.on.gpu.lock();
        if let Some(drafter) = &self.on.drafter {
            let segments = parts.iter().map(|part| {
                let rows = part.drafter_rows();
                known(part.entry, rows.start..rows.end - part.num_fed)
            });
            let segments = segments.filter(|segment| !segment.tokens.is_empty());
            drafter.catch_up(&segments.collect::<Vec<_>>(), &mut **device)?;
        }
        let blocks = self.on.target.prompt_blocks();
        let known_rows = |part: &StepEntry<'_>| {
            let entry = part.entry;
            let end = entry.computed + entry.chunk - usize::from(entry.samples());
            let blocks_end = blocks.map_or(0, |blocks| blocks.end(entry.prompt_len));
            (entry.computed..end, blocks_end.clamp(entry.computed, end))
        };
        // Blocks first: rows behind them then share passes with those of others.
        let in_blocks = parts.iter().map(|part| {
            let (rows, blocks_end) = known_rows(part);
            known(part.entry, rows.start..blocks_end)
        });
        let behind = parts.iter().map(|part| {
            let (rows, blocks_end) = known_rows(part);
            known(part.entry, blocks_end..rows.end)
        });
        let segments = in_blocks.chain(behind).filter(|segment| !segment.tokens.is_empty());
        self.on.target.run_without_logits(&segments.collect::<Vec<_>>(), &mut **device)
    }

    /// Tells a step what it is about.
    fn tell(&mut self, parts: &[StepEntry<'_>], shape: Shape) -> Result<()> {
        let Shape { sequences, drafts, .. } = shape;
        let mut told = StepData {
            input: StepInput::default(),
            drafting: vec![Drafting::default(); sequences],
            drafts: vec![0; sequences * drafts],
            distributions: vec![Distribution::certain(NO_TOKEN); sequences * drafts],
            number: self.number,
        };
        let sampling = || parts.iter().filter(|part| part.entry.samples()).enumerate();
        for (place, part) in sampling() {
            told.input.push(part.entry, part.planned());
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
        let pages = sampling().map(|(place, part)| (place, part.entry.pages));
        self.uploads.tell_pages(pages, &self.buffers, device)
    }

    /// Issues a step, recorded when its like is asked for first.
    fn replay(&mut self, flight: &InFlight) -> Result<()> {
        let graph = match self.graphs.get(&flight.shape) {
            Some(&graph) => graph,
            None => {
                self.has_recorded = true;
                self.record(flight.shape)?
            }
        };
        let mut device = self.on.gpu.lock();
        device.replay(graph)?;
        device.put_mark(self.marks[slot(flight)])
    }

    /// Records the steps that are common, so that no request waits for it.
    pub(super) fn record_common(&mut self) -> Result<()> {
        let shapes = Shape::recorded(&self.capacity, self.on.drafter.is_some());
        shapes.into_iter().try_for_each(|shape| self.record(shape).map(drop))
    }

    fn record(&mut self, shape: Shape) -> Result<Graph> {
        let parts = StepGraph {
            target: &self.on.target,
            drafter: self.on.drafter.as_deref(),
            draft_vocab: self.capacity.draft_vocab,
            code: &self.code,
            buffers: &self.buffers,
            max_pages: self.capacity.max_pages,
        };
        let graph = self.on.gpu.lock().record(&parts.step(shape))?;
        self.graphs.insert(shape, graph);
        Ok(graph)
    }
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

/// Which of the answers is a step's.
pub(super) fn slot(flight: &InFlight) -> usize {
    flight.number as usize % ANSWERS
}
