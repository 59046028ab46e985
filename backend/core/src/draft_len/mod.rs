//! How many tokens to draft, from each source. Keeps estimates of acceptance per sequence and source and a cost model
//! per engine, and picks the draft lengths that promise the most tokens per millisecond. Pure: the same calls give the
//! same lengths. The lengths never change a text, only when its tokens come.

mod acceptance;
mod allocate;
mod breadth;
mod cost;
mod count;
mod curve;
mod expected;
mod hit_rate;
mod outlook;
mod reading;

pub(crate) use cost::PassCost;
pub use cost::StepShape;
pub(crate) use reading::Reading;

use crate::batch::Drafted;
use crate::draft_source::{DraftLens, DraftSource, PerSource};
use crate::engine::CostTable;
use crate::sequence::SequenceId;
use allocate::Batch;
use breadth::Breadth;
use cost::Costs;
use outlook::{Outlook, Record};
use reading::Readings;
use std::collections::BTreeMap;
use std::time::Duration;

/// Lengths of the last step are kept if they promise this share of the best: below it they would
/// flicker with every token. Above 0.98, the promise against plain decoding.
const KEEP_SHARE: f64 = 0.99;

/// Share of the time that is spent on drafting where plain decoding promises more, to see whether
/// that has changed.
const PROBE_SHARE: f64 = 0.01;

/// Steps whose share is saved up for a probe at most: a drafter pass may cost more than one step's.
const MAX_SAVED_STEPS: f64 = 64.0;

/// Steps between two probes of a sequence and source at least, however cheap they are.
const PROBE_PERIOD: u64 = 8;

/// A plain step is taken at each batch size when it is first seen and once in this many steps: what
/// speculation is compared with is otherwise never measured again while it pays.
const PLAIN_PERIOD: u64 = 256;

/// Earlier than that where the last one was a surprise, or where steps became so much slower or faster since, as a
/// logarithm, and so many steps have gone by: that is the machine's pace, or drafting itself has changed, which a plain step
/// tells.
const PLAIN_DRIFT: f64 = 0.2;
const PLAIN_GAP: u64 = 8;

/// A drafter that stops by itself may go on to positions that promise this share of what a pass has to bring: promises are of
/// whole texts, and it gets there where it is surer than usual.
const REACH_SHARE: f64 = 0.7;

/// How draft lengths are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftPolicy {
    /// Always as long as the request allows.
    Fixed,
    /// By expected tokens per millisecond.
    #[default]
    Adaptive,
}

/// A step and what it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepTime {
    /// What it computed.
    pub shape: StepShape,
    /// How long a step of this shape takes.
    pub took: Duration,
}

/// A sequence that decodes in the step to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub id: SequenceId,
    /// The longest draft allowed; 0 if it decodes plainly.
    pub limit: usize,
    /// Whether its drafts are as long as allowed, whatever that is worth.
    pub is_fixed: bool,
    /// Whether a model that drafts reads it.
    pub is_read: bool,
    /// Its positions in the cache.
    pub positions: usize,
}

/// What is remembered of a sequence.
#[derive(Clone, Debug)]
struct State {
    record: Record,
    /// The last lengths chosen on their merits; none before the first.
    lens: Option<DraftLens>,
    /// The step in which each source was last probed.
    probed_at: PerSource<u64>,
}

/// Chooses draft lengths for an engine.
#[derive(Clone, Debug)]
pub(crate) struct Tuner {
    policy: DraftPolicy,
    /// Of a source that the engine has not, 0.
    max_lens: DraftLens,
    costs: Costs,
    /// Over all sequences: what a new one starts from.
    engine: Record,
    states: BTreeMap<SequenceId, State>,
    /// Choices made.
    steps: u64,
    /// The plain step that was last asked for, by knot of its rows.
    plain: BTreeMap<usize, Plain>,
    /// Milliseconds that probes may cost now.
    saved_ms: f64,
    tried: Tried,
    breadth: Breadth,
    /// Tokens of a model's draft at most, if it branches.
    max_tree_tokens: usize,
    /// What a row has to bring in the step that was chosen last, in tokens.
    row_worth: f64,
    readings: Readings,
    /// Whether a model has to read a text before it drafts for it.
    has_to_read: bool,
    /// Whether all that a model drafts comes from one pass.
    at_once: bool,
    /// Whether no pass is run behind a draft that the model is not sure enough of.
    stops_early: bool,
    /// What a pass has to bring in the step that was chosen last, in tokens, if one sequence drafts alone and its model stops
    /// early.
    pass_worth: Option<f64>,
}

/// A plain step.
#[derive(Clone, Copy, Debug)]
struct Plain {
    /// In which step it was asked for; 0 is never.
    at: u64,
    /// The pace then.
    pace: f64,
    /// Whether it took another time than was expected.
    was_surprise: bool,
}

/// What the last choice was to find out, and what was known of that before.
#[derive(Clone, Debug, Default)]
struct Tried {
    /// The knot at which it was plain.
    plain: Option<(usize, Plain)>,
    /// The sequences that it probed, and for what.
    probed: Vec<(SequenceId, DraftSource, u64)>,
    saved_ms: f64,
}

impl Tuner {
    /// For one source of drafts: a look-up, if passes are free, else a model. Starts from what target and drafter were
    /// measured to cost, where known.
    pub(crate) fn new(
        policy: DraftPolicy,
        max_draft_len: usize,
        target: Option<&CostTable>,
        pass: PassCost<'_>,
    ) -> Self {
        let max_lens = match pass {
            PassCost::Free => DraftLens { lookup: max_draft_len, model: 0 },
            PassCost::Unknown | PassCost::Share(_) | PassCost::Measured(_) => {
                DraftLens { lookup: 0, model: max_draft_len }
            }
        };
        let measured = match pass {
            PassCost::Measured(table) => &table.acceptance[..],
            PassCost::Free | PassCost::Unknown | PassCost::Share(_) => &[],
        };
        Self {
            policy,
            max_lens,
            costs: Costs::new(target, pass),
            engine: Record::of_engine(max_draft_len, measured),
            states: BTreeMap::new(),
            steps: 0,
            plain: BTreeMap::new(),
            saved_ms: 0.0,
            tried: Tried::default(),
            breadth: Breadth::default(),
            max_tree_tokens: usize::MAX,
            row_worth: 0.0,
            readings: Readings::default(),
            has_to_read: true,
            at_once: false,
            stops_early: false,
            pass_worth: None,
        }
    }

    /// With a look-up that is asked before the model.
    pub(crate) fn with_lookup(mut self) -> Self {
        self.max_lens.lookup = self.max_lens.longest();
        self
    }

    /// With drafts of a model that have so many tokens at most, where they branch.
    pub(crate) fn with_trees_up_to(self, max_tree_tokens: usize) -> Self {
        Self { max_tree_tokens, ..self }
    }

    /// With a model that reads nothing.
    pub(crate) fn without_reading(self) -> Self {
        Self { has_to_read: false, ..self }
    }

    /// With a model that drafts all tokens in one pass.
    pub(crate) fn drafting_at_once(self) -> Self {
        Self { at_once: true, ..self }
    }

    /// With a model whose passes are run one after the other, each only if somebody goes on.
    pub(crate) fn stopping_early(self) -> Self {
        Self { stops_early: !self.at_once, ..self }
    }

    /// Rows of a sequence in a pass of the model behind what it has read, where it drafts so many tokens.
    pub(crate) fn rows_of_pass(&self, draft_len: usize) -> usize {
        if self.at_once { draft_len.max(1) } else { 1 }
    }

    /// Draft lengths for the candidates, in order, `max_extra` draft rows in all at most, whoever drafts.
    /// `base_rows` counts the step's rows without drafts: one a candidate, and any prefill.
    pub(crate) fn choose(
        &mut self,
        candidates: &[Candidate],
        base_rows: usize,
        max_extra: usize,
    ) -> Vec<DraftLens> {
        let fixed = self.fixed(candidates, max_extra);
        let num_fixed: usize = fixed.iter().sum();
        let adaptive = self.adapt(candidates, base_rows + num_fixed, max_extra - num_fixed);
        let lens = fixed.into_iter().zip(adaptive);
        lens.map(|(fixed, lens)| if fixed > 0 { self.within_max(fixed) } else { lens }).collect()
    }

    /// Lengths of those whose drafts are as long as allowed, 0 of all others.
    fn fixed(&self, candidates: &[Candidate], max_extra: usize) -> Vec<usize> {
        let limit = |candidate: &Candidate| match self.is_fixed(candidate) {
            true => self.within_max(candidate.limit).longest(),
            false => 0,
        };
        Batch::longest(&candidates.iter().map(limit).collect::<Vec<_>>(), max_extra)
    }

    fn is_fixed(&self, candidate: &Candidate) -> bool {
        self.policy == DraftPolicy::Fixed || candidate.is_fixed
    }

    /// Lengths of all others, by what they promise.
    fn adapt(
        &mut self,
        candidates: &[Candidate],
        base_rows: usize,
        max_extra: usize,
    ) -> Vec<DraftLens> {
        self.pass_worth = None;
        let plain = vec![DraftLens::default(); candidates.len()];
        let is_plain = |candidate: &Candidate| self.limits(candidate).longest() == 0;
        if max_extra == 0 || candidates.iter().all(is_plain) {
            return plain;
        }
        self.steps += 1;
        self.tried = Tried { saved_ms: self.saved_ms, ..Tried::default() };
        let without_prefill = base_rows == candidates.len();
        if without_prefill && self.is_plain_due(base_rows) {
            return plain;
        }
        let outlooks = self.outlooks(candidates);
        let positions: Vec<usize> =
            candidates.iter().map(|candidate| candidate.positions).collect();
        let batch = Batch {
            outlooks: &outlooks,
            positions: &positions,
            num_alike: 1,
            base_rows,
            max_extra,
            breadth: self.breadth.rate(),
            max_tree_tokens: self.max_tree_tokens,
            at_once: self.at_once,
        };
        let mut lens = self.settle(candidates, batch);
        let pays = lens.iter().any(|lens| lens.model > 0);
        self.probe(candidates, batch, &mut lens);
        let expected = batch.expect(&self.costs, &lens);
        self.row_worth = expected.row_worth(&self.costs);
        if let ([lens], true) = (&mut lens[..], self.stops_early && pays) {
            let pass_worth = expected.pass_worth(&self.costs);
            self.pass_worth = Some(pass_worth);
            lens.model = batch.reach(*lens, REACH_SHARE * pass_worth);
        }
        lens
    }

    /// How likely a second draft of a position must be to pay for its row in the step to come.
    pub(crate) fn min_likelihood(&self) -> f32 {
        self.row_worth.clamp(0.0, 1.0) as f32
    }

    /// How likely a draft must be for one more pass of the drafter to pay: what the pass and the row that
    /// verifies its token cost, in tokens that come in that time otherwise. Where sequences share the passes, or these are
    /// run in any case, in plain steps, each of which is worth one token.
    pub(crate) fn min_confidence(&self) -> f32 {
        if self.policy == DraftPolicy::Fixed {
            return 0.0;
        }
        if let Some(worth) = self.pass_worth {
            return worth.clamp(0.0, 1.0) as f32;
        }
        let plain = self.costs.target_ms(1);
        let pass_ms = if self.at_once { 0.0 } else { self.costs.pass_ms(1, 0) };
        let one_more = pass_ms + (self.costs.target_ms(2) - plain).max(0.0);
        (one_more / plain).clamp(0.0, 1.0) as f32
    }

    /// Takes in what became of a sequence that was to draft so many tokens, and of its draft; `is_fixed` as in [`Candidate`].
    pub(crate) fn record(
        &mut self,
        id: SequenceId,
        asked: DraftLens,
        draft: Option<Drafted>,
        is_fixed: bool,
    ) {
        if self.policy == DraftPolicy::Adaptive {
            self.engine.add(asked, draft);
            self.state(id).record.add(asked, draft);
            // Fixed drafts branch whatever that is worth, which says nothing about others.
            if let Some(draft) =
                draft.filter(|draft| draft.source == DraftSource::Model && !is_fixed)
            {
                self.breadth.record(draft.tokens, draft.len);
            }
        }
    }

    /// Takes in the time of a step that ran no prefill through the drafter.
    pub(crate) fn observe(&mut self, step: StepShape, ms: f64) {
        let is_surprise = self.costs.observe(step, ms);
        if let Some((knot, _)) = self.tried.plain {
            self.plain.entry(knot).and_modify(|plain| plain.was_surprise = is_surprise);
        }
    }

    /// The last choice was not carried out, since the step had begun before it was made: what it was to find out is
    /// asked for again.
    pub(crate) fn ask_again(&mut self) {
        let Tried { plain, probed, saved_ms } = std::mem::take(&mut self.tried);
        if plain.is_none() && probed.is_empty() {
            return;
        }
        self.saved_ms = saved_ms;
        self.plain.extend(plain);
        for (id, source, probed_at) in probed {
            *self.state(id).probed_at.of_mut(source) = probed_at;
        }
    }

    /// The sequence has left.
    pub(crate) fn forget(&mut self, id: SequenceId) {
        self.states.remove(&id);
    }

    /// So long for each source that there is.
    fn within_max(&self, len: usize) -> DraftLens {
        let DraftLens { lookup, model } = self.max_lens;
        DraftLens { lookup: len.min(lookup), model: len.min(model) }
    }

    /// The longest draft of each source that may be chosen for a sequence.
    fn limits(&self, candidate: &Candidate) -> DraftLens {
        if self.is_fixed(candidate) {
            return DraftLens::default();
        }
        let DraftLens { lookup, model } = self.within_max(candidate.limit);
        DraftLens { lookup, model: if candidate.is_read { model } else { 0 } }
    }

    fn state(&mut self, id: SequenceId) -> &mut State {
        self.states.entry(id).or_insert_with(|| State {
            record: Record::of_sequence(self.max_lens.longest()),
            lens: None,
            probed_at: PerSource::default(),
        })
    }

    fn is_plain_due(&mut self, rows: usize) -> bool {
        let (knot, pace) = (Costs::knot(rows), self.costs.pace());
        let never = Plain { at: 0, pace, was_surprise: false };
        let last = self.plain.entry(knot).or_insert(never);
        let ago = self.steps - last.at;
        let has_changed = last.was_surprise || (pace / last.pace).ln().abs() > PLAIN_DRIFT;
        // Steps count from 1.
        let due = last.at == 0 || ago >= PLAIN_PERIOD || has_changed && ago >= PLAIN_GAP;
        if due {
            self.tried.plain = Some((knot, *last));
            *last = Plain { at: self.steps, pace, was_surprise: false };
        }
        due
    }

    fn outlooks(&mut self, candidates: &[Candidate]) -> Vec<Outlook> {
        let usual = self.engine.usual();
        let outlook = |candidate: &Candidate| {
            let limits = self.limits(candidate);
            self.state(candidate.id).record.outlook(&usual, limits)
        };
        candidates.iter().map(outlook).collect()
    }

    /// The best lengths, or the last ones while they are nearly as good.
    fn settle(&mut self, candidates: &[Candidate], batch: Batch<'_>) -> Vec<DraftLens> {
        let best = batch.best(&self.costs);
        let kept: Vec<DraftLens> = candidates
            .iter()
            .zip(&best)
            .map(|(candidate, &lens)| {
                let DraftLens { lookup, model } = self.state(candidate.id).lens.unwrap_or(lens);
                let limits = self.limits(candidate);
                DraftLens { lookup: lookup.min(limits.lookup), model: model.min(limits.model) }
            })
            .collect();
        let enough = KEEP_SHARE * batch.throughput(&self.costs, &best);
        let keeps = batch.fits(&kept) && batch.throughput(&self.costs, &kept) >= enough;
        let lens = if keeps { kept } else { best };
        for (candidate, &lens) in candidates.iter().zip(&lens) {
            self.state(candidate.id).lens = Some(lens);
        }
        lens
    }

    /// Drafts one token where none from a source is worth it, as far as the saved time goes, and where it is longest ago
    /// first. A look-up that is asked ahead of a model drafts as many as that: what it finds comes in place of the
    /// model's draft, in the same rows.
    fn probe(&mut self, candidates: &[Candidate], batch: Batch<'_>, lens: &mut [DraftLens]) {
        let expected = batch.expect(&self.costs, lens);
        let (mut tokens, mut ms) = (expected.tokens, expected.ms(&self.costs));
        self.saved_ms = (self.saved_ms + PROBE_SHARE * ms).min(PROBE_SHARE * MAX_SAVED_STEPS * ms);
        let steps = self.steps;
        for (_, idx, source) in self.idle(candidates, batch, lens) {
            let before = lens[idx];
            match source {
                DraftSource::Lookup => lens[idx].lookup = before.model.max(1),
                DraftSource::Model => lens[idx].model = 1,
            }
            let with_probe = batch.expect(&self.costs, lens);
            let (probe_tokens, probe_ms) = (with_probe.tokens, with_probe.ms(&self.costs));
            // The time that it takes more, and the time that it takes to make up for tokens that it loses.
            let lost_ms = (tokens - probe_tokens).max(0.0) * ms / tokens;
            let cost = (probe_ms - ms).max(0.0) + lost_ms;
            if cost > self.saved_ms || !batch.fits(lens) {
                lens[idx] = before;
                return;
            }
            self.saved_ms -= cost;
            (tokens, ms) = (probe_tokens, probe_ms);
            let id = candidates[idx].id;
            let before = std::mem::replace(self.state(id).probed_at.of_mut(source), steps);
            self.tried.probed.push((id, source, before));
        }
    }

    /// Sources that could draft for a sequence and do not, those first that were probed longest ago.
    fn idle(
        &mut self,
        candidates: &[Candidate],
        batch: Batch<'_>,
        lens: &[DraftLens],
    ) -> Vec<(u64, usize, DraftSource)> {
        let mut idle = Vec::new();
        for (idx, candidate) in candidates.iter().enumerate() {
            for source in DraftSource::ALL {
                let drafts = *lens[idx].of(source) > 0;
                let probed_at = *self.state(candidate.id).probed_at.of(source);
                let is_due = probed_at + PROBE_PERIOD <= self.steps;
                if !drafts && is_due && !batch.outlooks[idx].gains.of(source).is_empty() {
                    idle.push((probed_at, idx, source));
                }
            }
        }
        idle.sort_unstable();
        idle
    }
}

#[cfg(test)]
mod tests;
