//! Speculative steps on a GPU: one recorded graph drafts, verifies and accepts for all sequences; the host uploads
//! what it knows about them, replays the graph and waits once.
//!
//! Nothing but the KV caches outlives a step on the device. Known tokens that come before the last one run as plain
//! passes ahead of the graph, without waiting. Sequences that want log-probabilities are decided about on the host.

use super::code::StepCode;
use super::device::{Device, Graph, upload};
use super::forward::Gpu;
use super::model::Model;
use super::step_buffers::{MAX_WORDS, StepBuffers, StepCapacity};
use super::step_graph::{Parts, Shape};
use super::step_input::StepInput;
use super::step_params::{Distribution, Drafting, MAX_FED, NO_TOKEN, StepResult};
use crate::Result;
use crate::batch::{Emitted, Entry, Executor, Outcome, Segment};
use crate::draft::{Drafter, Ngram};
use crate::engine::{Engine, Manifest};
use crate::exec::Host;
use crate::sequence::SequenceId;
use std::collections::HashMap;
use std::sync::Arc;

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
}

/// An executor of whole steps on one GPU.
pub struct Steps {
    on: OnGpu,
    host: Host,
    code: StepCode,
    buffers: StepBuffers,
    capacity: StepCapacity,
    graphs: HashMap<Shape, Graph>,
    number: u32,
}

/// Who is asked for a sequence's drafts.
#[derive(Clone, Copy, PartialEq)]
enum Asked {
    /// The model on the device.
    Model,
    /// Nobody any more: something was looked up, and the model sees nothing of this step.
    Lookup,
    /// There is no model that could fall behind.
    LookupAlone,
}

/// A sequence's part in a step.
struct Part<'a> {
    entry: &'a Entry<'a>,
    /// Draft tokens that the host knows already.
    given: Vec<u32>,
    drafter: Asked,
    /// Known tokens that go through the drafter in the graph.
    num_fed: usize,
}

impl Part<'_> {
    /// Drafts that the model is asked for.
    fn draft_len(&self) -> usize {
        if self.drafter == Asked::Model { self.entry.draft_len } else { 0 }
    }

    /// Known tokens that go through the drafter in this step.
    fn drafter_rows(&self) -> std::ops::Range<usize> {
        let end = self.entry.computed + self.entry.chunk;
        let is_fed = self.entry.speculates && self.drafter == Asked::Model;
        if is_fed { self.entry.draft_computed..end } else { end..end }
    }

    /// Positions whose drafter state is valid after a step that kept `accepted` drafts, of which the model made `own`.
    fn draft_computed(&self, own: usize, accepted: usize) -> usize {
        let Entry { computed, chunk, draft_computed, .. } = *self.entry;
        let rows = self.drafter_rows();
        match self.drafter {
            Asked::LookupAlone => computed + chunk + accepted,
            Asked::Model if !rows.is_empty() => rows.end + own.saturating_sub(1).min(accepted),
            Asked::Model | Asked::Lookup => draft_computed,
        }
    }
}

impl Steps {
    /// `host` decides about what this cannot, with the same models.
    pub fn new(engine: &Engine, on: OnGpu, host: Host) -> Result<Self> {
        let draft_vocab = on.draft.as_ref().map_or(0, |draft| draft.vocab_size);
        let capacity = StepCapacity::of(engine.manifest(), draft_vocab);
        let (code, buffers) = {
            let mut device = on.gpu.lock();
            let code = StepCode::load(engine, &mut **device)?;
            (code, StepBuffers::alloc(capacity, &mut **device)?)
        };
        Ok(Self { on, host, code, buffers, capacity, graphs: HashMap::new(), number: 0 })
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
            let is_taken = has_room && entry.sampler.params().logprobs.is_none();
            words += if is_taken { more } else { 0 };
            is_taken
        });
        takes.collect()
    }

    fn run(&mut self, entries: &[&Entry<'_>]) -> Result<Vec<Outcome>> {
        let mut parts = self.parts(entries)?;
        let shape = self.shape(&parts);
        for part in &mut parts {
            let rows = part.drafter_rows().len();
            let asks = shape.is_some_and(|shape| shape.drafting) && part.entry.samples();
            part.num_fed = if asks { rows.min(MAX_FED) } else { 0 };
        }
        self.run_known(&parts)?;
        let Some(shape) = shape else {
            // So that the step takes the time that it takes, and fails itself if it fails.
            self.on.gpu.lock().wait()?;
            return Ok(parts.iter().map(prefilled).collect());
        };
        self.upload(&parts, shape)?;
        self.replay(shape)?;
        Ok(self.outcomes(&parts, shape))
    }

    /// Looks up drafts where that may succeed.
    fn parts<'a>(&mut self, entries: &[&'a Entry<'a>]) -> Result<Vec<Part<'a>>> {
        let has_model = self.on.draft.is_some();
        let proposals = match &mut self.on.lookup {
            Some(lookup) => {
                let entries: Vec<Entry<'_>> = entries.iter().map(|&&entry| entry).collect();
                lookup.propose(&entries)?
            }
            None => vec![Default::default(); entries.len()],
        };
        let parts = entries.iter().zip(proposals).map(|(entry, proposal)| {
            let drafter = match has_model {
                true if proposal.is_empty() => Asked::Model,
                true => Asked::Lookup,
                false => Asked::LookupAlone,
            };
            let given = [proposal.tokens, entry.given.to_vec()].concat();
            Part { entry, given, drafter, num_fed: 0 }
        });
        Ok(parts.collect())
    }

    /// The smallest recorded step that holds the sequences that get tokens; none if none does.
    fn shape(&self, parts: &[Part<'_>]) -> Option<Shape> {
        let sampling = || parts.iter().filter(|part| part.entry.samples());
        let sequences = sampling().count();
        if sequences == 0 {
            return None;
        }
        let asked = sampling().map(Part::draft_len).max().unwrap_or(0);
        let given = sampling().map(|part| part.given.len()).max().unwrap_or(0);
        Some(Shape {
            sequences: sequences.next_power_of_two().min(self.capacity.sequences),
            drafts: asked.max(given),
            drafting: asked > 0,
        })
    }

    /// Runs all known tokens but those that the graph runs.
    fn run_known(&self, parts: &[Part<'_>]) -> Result<()> {
        let mut device = self.on.gpu.lock();
        if let Some(draft) = &self.on.draft {
            let known = parts.iter().map(|part| {
                let rows = part.drafter_rows();
                let tokens = &part.entry.tokens[rows.start..rows.end - part.num_fed];
                let readable =
                    |&token: &u32| if (token as usize) < draft.vocab_size { token } else { 0 };
                (part, rows.start, tokens.iter().map(readable).collect::<Vec<u32>>())
            });
            let known: Vec<_> = known.collect();
            let segments = known.iter().map(|(part, first, tokens)| Segment {
                tokens,
                first_position: *first,
                pages: part.entry.pages,
                num_logits: 0,
            });
            let segments: Vec<_> = segments.filter(|segment| !segment.tokens.is_empty()).collect();
            draft.model.run_without_logits(&segments, &mut **device)?;
        }
        let segments = parts.iter().map(|part| {
            let entry = part.entry;
            let end = entry.computed + entry.chunk - usize::from(entry.samples());
            Segment {
                tokens: &entry.tokens[entry.computed..end],
                first_position: entry.computed,
                pages: entry.pages,
                num_logits: 0,
            }
        });
        let segments: Vec<_> = segments.filter(|segment| !segment.tokens.is_empty()).collect();
        self.on.target.run_without_logits(&segments, &mut **device)
    }

    fn upload(&mut self, parts: &[Part<'_>], shape: Shape) -> Result<()> {
        let Shape { sequences, drafts, .. } = shape;
        let mut input = StepInput::default();
        let mut given = vec![0; sequences * drafts];
        let mut certain = vec![Distribution::certain(NO_TOKEN); sequences * drafts];
        let mut drafting = vec![Drafting::default(); sequences];
        let mut pages = vec![0; sequences * self.capacity.max_pages];
        for (place, part) in parts.iter().filter(|part| part.entry.samples()).enumerate() {
            input.push(part.entry, part.num_fed, part.draft_len(), part.given.len());
            drafting[place].num_drafted = part.given.len() as u32;
            for (idx, &token) in part.given.iter().enumerate() {
                given[place * drafts + idx] = token;
                certain[place * drafts + idx] = Distribution::certain(token);
            }
            let used = &part.entry.pages[..part.entry.pages.len().min(self.capacity.max_pages)];
            pages[place * self.capacity.max_pages..][..used.len()].copy_from_slice(used);
        }
        input.pad(sequences);
        self.number = self.number.wrapping_add(1);
        let buffers = &self.buffers;
        let mut device = self.on.gpu.lock();
        let device = &mut **device;
        upload(device, buffers.sequences, &input.sequences)?;
        upload(device, buffers.words, &input.words)?;
        upload(device, buffers.drafting, &drafting)?;
        upload(device, buffers.drafts, &given)?;
        upload(device, buffers.draft_distributions, &certain)?;
        upload(device, buffers.pages, &pages)?;
        upload(device, buffers.step, &[self.number])
    }

    /// Replays the step, recorded when it is asked for first, and waits for it.
    fn replay(&mut self, shape: Shape) -> Result<()> {
        let mut device = self.on.gpu.lock();
        let device: &mut dyn Device = &mut **device;
        let graph = match self.graphs.get(&shape) {
            Some(&graph) => graph,
            None => {
                let draft = self.on.draft.as_ref();
                let parts = Parts {
                    target: &self.on.target,
                    draft: draft.map(|draft| &*draft.model),
                    draft_vocab: self.capacity.draft_vocab,
                    code: &self.code,
                    buffers: &self.buffers,
                    max_pages: self.capacity.max_pages,
                };
                let graph = device.record(&parts.step(shape))?;
                self.graphs.insert(shape, graph);
                graph
            }
        };
        device.replay(graph)?;
        device.wait()
    }

    fn outcomes(&self, parts: &[Part<'_>], shape: Shape) -> Vec<Outcome> {
        let width = shape.drafts + 1;
        let mut results = vec![StepResult::default(); shape.sequences];
        let mut tokens = vec![0u32; shape.sequences * width];
        let answer = &self.buffers.answer;
        answer.copy_to(0, &mut results);
        answer.copy_to(self.buffers.answer().tokens_offset(), &mut tokens);
        let mut places = results.iter().zip(tokens.chunks_exact(width));
        let outcome = |part: &Part<'_>| {
            let place = part.entry.samples().then(|| places.next()).flatten();
            place.map_or_else(|| prefilled(part), |(result, tokens)| settled(part, result, tokens))
        };
        parts.iter().map(outcome).collect()
    }
}

/// The outcome of an entry that gets no tokens yet.
fn prefilled(part: &Part<'_>) -> Outcome {
    Outcome { draft_computed: part.draft_computed(0, 0), ..Outcome::default() }
}

fn settled(part: &Part<'_>, result: &StepResult, tokens: &[u32]) -> Outcome {
    let emit = |&token| Emitted { token, logprob: None, top_logprobs: Vec::new() };
    let (drafted, accepted) = (result.drafted as usize, result.accepted as usize);
    // Of drafts that were given the model has seen nothing.
    let own = drafted - part.given.len().min(drafted);
    Outcome {
        tokens: tokens[..result.num_tokens as usize].iter().map(emit).collect(),
        drafted,
        accepted,
        draft_passes: own,
        draft_computed: part.draft_computed(own, accepted),
    }
}

impl Executor for Steps {
    fn step(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Outcome>> {
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
        let mut device =
            if on_device.is_empty() { Vec::new() } else { self.run(&on_device)? }.into_iter();
        let mut host =
            if on_host.is_empty() { Vec::new() } else { self.host.step(&on_host)? }.into_iter();
        let next = |takes: &bool| if *takes { device.next() } else { host.next() };
        Ok(takes.iter().map(next).map(|outcome| outcome.expect("one outcome an entry")).collect())
    }

    fn forget(&mut self, id: SequenceId) {
        if let Some(lookup) = &mut self.on.lookup {
            lookup.forget(id);
        }
        self.host.forget(id);
    }
}
