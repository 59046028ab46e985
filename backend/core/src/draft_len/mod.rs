//! How many tokens to draft. Keeps an estimate of acceptance per sequence and a cost model per
//! engine, and picks the draft lengths that promise the most tokens per millisecond. Pure: the same
//! calls give the same lengths. The lengths never change a text, only when its tokens come.

mod acceptance;
mod allocate;
mod cost;
mod curve;

pub(crate) use cost::PassCost;
pub use cost::StepShape;

use crate::engine::CostTable;
use crate::sequence::SequenceId;
use acceptance::Acceptance;
use allocate::Batch;
use cost::Costs;
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

/// Steps between two probes of a sequence at least, however cheap they are.
const PROBE_PERIOD: u64 = 8;

/// A plain step is taken at each batch size when it is first seen and once in this many steps: what
/// speculation is compared with is otherwise never measured again while it pays.
const PLAIN_PERIOD: u64 = 256;

/// Earlier than that where steps became so much slower or faster since, as a logarithm, and so many steps have gone by: that
/// is the machine's pace, or drafting itself has changed, which a plain step tells.
const PLAIN_DRIFT: f64 = 0.2;
const PLAIN_GAP: u64 = 8;

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
    /// Its positions in the cache.
    pub positions: usize,
}

/// What is remembered of a sequence.
#[derive(Clone, Debug)]
struct State {
    acceptance: Acceptance,
    /// The last length chosen on its merits; none before the first.
    draft_len: Option<usize>,
    probed_at: u64,
}

/// Chooses draft lengths for an engine.
#[derive(Clone, Debug)]
pub(crate) struct Tuner {
    policy: DraftPolicy,
    max_draft_len: usize,
    costs: Costs,
    /// Over all sequences: what a new one starts from.
    engine: Acceptance,
    states: BTreeMap<SequenceId, State>,
    /// Choices made.
    steps: u64,
    /// When a plain step was last asked for and the pace then, by knot of its rows.
    plain_at: BTreeMap<usize, (u64, f64)>,
    /// Milliseconds that probes may cost now.
    saved_ms: f64,
    tried: Tried,
}

/// What the last choice was to find out, and what was known of that before.
#[derive(Clone, Debug, Default)]
struct Tried {
    /// The knot at which it was plain.
    plain: Option<(usize, (u64, f64))>,
    /// The sequences that it probed.
    probed: Vec<(SequenceId, u64)>,
    saved_ms: f64,
}

impl Tuner {
    /// Starts from what target and drafter were measured to cost, where known.
    pub(crate) fn new(
        policy: DraftPolicy,
        max_draft_len: usize,
        target: Option<&CostTable>,
        pass: PassCost<'_>,
    ) -> Self {
        Self {
            policy,
            max_draft_len,
            costs: Costs::new(target, pass),
            engine: Acceptance::of_engine(max_draft_len),
            states: BTreeMap::new(),
            steps: 0,
            plain_at: BTreeMap::new(),
            saved_ms: 0.0,
            tried: Tried::default(),
        }
    }

    /// Draft lengths for the candidates, in order, `max_extra` draft rows in all at most.
    /// `base_rows` counts the step's rows without drafts: one a candidate, and any prefill.
    pub(crate) fn choose(
        &mut self,
        candidates: &[Candidate],
        base_rows: usize,
        max_extra: usize,
    ) -> Vec<usize> {
        let limits: Vec<usize> =
            candidates.iter().map(|candidate| candidate.limit.min(self.max_draft_len)).collect();
        if max_extra == 0 || limits.iter().all(|&limit| limit == 0) {
            return vec![0; limits.len()];
        }
        if self.policy == DraftPolicy::Fixed {
            return Batch::longest(&limits, max_extra);
        }
        self.steps += 1;
        self.tried = Tried { saved_ms: self.saved_ms, ..Tried::default() };
        let without_prefill = base_rows == candidates.len();
        if without_prefill && self.is_plain_due(base_rows) {
            return vec![0; limits.len()];
        }
        let gains = self.gains(candidates, &limits);
        let positions: Vec<usize> =
            candidates.iter().map(|candidate| candidate.positions).collect();
        let batch = Batch { gains: &gains, positions: &positions, base_rows, max_extra };
        let mut lens = self.settle(candidates, batch);
        self.probe(candidates, batch, &mut lens);
        lens
    }

    /// How likely a draft must be for one more pass of the drafter to pay: what the pass and the row that
    /// verifies its token cost, in plain steps, each of which is worth one token.
    pub(crate) fn min_confidence(&self) -> f32 {
        if self.policy == DraftPolicy::Fixed {
            return 0.0;
        }
        let plain = self.costs.target_ms(1);
        let one_more = self.costs.pass_ms(1, 0) + (self.costs.target_ms(2) - plain).max(0.0);
        (one_more / plain).clamp(0.0, 1.0) as f32
    }

    /// Takes in what became of a sequence's draft.
    pub(crate) fn record(&mut self, id: SequenceId, drafted: usize, accepted: usize) {
        if self.policy == DraftPolicy::Adaptive && drafted > 0 {
            self.engine.record(drafted, accepted);
            self.state(id).acceptance.record(drafted, accepted);
        }
    }

    /// Takes in the time of a step that ran no prefill through the drafter.
    pub(crate) fn observe(&mut self, step: StepShape, ms: f64) {
        self.costs.observe(step, ms);
    }

    /// The last choice was not carried out, since the step had begun before it was made: what it was to find out is
    /// asked for again.
    pub(crate) fn ask_again(&mut self) {
        let Tried { plain, probed, saved_ms } = std::mem::take(&mut self.tried);
        if plain.is_none() && probed.is_empty() {
            return;
        }
        self.saved_ms = saved_ms;
        self.plain_at.extend(plain);
        for (id, probed_at) in probed {
            self.state(id).probed_at = probed_at;
        }
    }

    /// The sequence has left.
    pub(crate) fn forget(&mut self, id: SequenceId) {
        self.states.remove(&id);
    }

    fn state(&mut self, id: SequenceId) -> &mut State {
        self.states.entry(id).or_insert_with(|| State {
            acceptance: Acceptance::of_sequence(self.max_draft_len),
            draft_len: None,
            probed_at: 0,
        })
    }

    fn is_plain_due(&mut self, rows: usize) -> bool {
        let (knot, pace) = (Costs::knot(rows), self.costs.pace());
        let last = self.plain_at.entry(knot).or_insert((0, pace));
        let (step, pace_then) = *last;
        let ago = self.steps - step;
        let has_drifted = ago >= PLAIN_GAP && (pace / pace_then).ln().abs() > PLAIN_DRIFT;
        // Steps count from 1, so 0 is never.
        let due = step == 0 || ago >= PLAIN_PERIOD || has_drifted;
        if due {
            self.tried.plain = Some((knot, *last));
            *last = (self.steps, pace);
        }
        due
    }

    fn gains(&mut self, candidates: &[Candidate], limits: &[usize]) -> Vec<Vec<f64>> {
        let usual = self.engine.rates();
        let each = candidates.iter().zip(limits);
        each.map(|(candidate, &limit)| {
            self.state(candidate.id).acceptance.gains(&usual, limit).collect()
        })
        .collect()
    }

    /// The best lengths, or the last ones while they are nearly as good.
    fn settle(&mut self, candidates: &[Candidate], batch: Batch<'_>) -> Vec<usize> {
        let best = batch.best(&self.costs);
        let kept: Vec<usize> = candidates
            .iter()
            .zip(batch.gains)
            .zip(&best)
            .map(|((candidate, gains), &len)| {
                self.state(candidate.id).draft_len.unwrap_or(len).min(gains.len())
            })
            .collect();
        let fits = kept.iter().sum::<usize>() <= batch.max_extra;
        let enough = KEEP_SHARE * batch.throughput(&self.costs, &best);
        let keeps = fits && batch.throughput(&self.costs, &kept) >= enough;
        let lens = if keeps { kept } else { best };
        for (candidate, &len) in candidates.iter().zip(&lens) {
            self.state(candidate.id).draft_len = Some(len);
        }
        lens
    }

    /// Drafts one token where none is worth it, as far as the saved time goes, and where it is
    /// longest ago first.
    fn probe(&mut self, candidates: &[Candidate], batch: Batch<'_>, lens: &mut [usize]) {
        let mut ms = self.costs.step_ms(batch.step(lens));
        self.saved_ms = (self.saved_ms + PROBE_SHARE * ms).min(PROBE_SHARE * MAX_SAVED_STEPS * ms);
        let steps = self.steps;
        let mut idle: Vec<(u64, usize)> = (0..lens.len())
            .filter(|&idx| lens[idx] == 0 && !batch.gains[idx].is_empty())
            .map(|idx| (self.state(candidates[idx].id).probed_at, idx))
            .filter(|(probed_at, _)| probed_at + PROBE_PERIOD <= steps)
            .collect();
        idle.sort_unstable();
        for (_, idx) in idle {
            lens[idx] = 1;
            let with_probe = batch.step(lens);
            let cost = self.costs.step_ms(with_probe) - ms;
            if cost > self.saved_ms || with_probe.rows > batch.base_rows + batch.max_extra {
                lens[idx] = 0;
                return;
            }
            self.saved_ms -= cost;
            ms += cost;
            let state = self.state(candidates[idx].id);
            let before = std::mem::replace(&mut state.probed_at, steps);
            self.tried.probed.push((candidates[idx].id, before));
        }
    }
}

#[cfg(test)]
mod tests;
