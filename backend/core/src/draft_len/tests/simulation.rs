//! Engines and drafters that are simulated: what steps take and what drafts are worth, which the tuner has to find out.

use crate::draft_len::*;

/// A device and a drafter whose truth the tuner does not know.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World {
    pub(crate) target_ms: f64,
    pub(crate) row_ms: f64,
    pub(crate) draft_ms: f64,
}

pub(crate) const MEMORY_BOUND: World = World { target_ms: 10.0, row_ms: 0.1, draft_ms: 0.8 };
pub(crate) const MAX_DRAFT_LEN: usize = 8;

impl World {
    pub(crate) fn ms(self, step: StepShape) -> f64 {
        self.target_ms + self.row_ms * step.rows as f64 + self.draft_ms * step.draft_passes as f64
    }
}

/// What a sequence's drafts are worth.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Truth {
    pub(crate) hit_rate: f64,
    /// Chance of each of its tokens.
    pub(crate) accepted: PerSource<f64>,
}

/// A run over a batch of sequences.
pub(crate) struct Run {
    pub(crate) tuner: Tuner,
    pub(crate) world: World,
    pub(crate) truths: Vec<Truth>,
    pub(crate) random: u64,
    pub(crate) tokens: f64,
    pub(crate) ms: f64,
    pub(crate) lens: Vec<DraftLens>,
    /// Tokens of each position that the model drafts.
    pub(crate) breadth: usize,
    /// Tokens of its drafts at most.
    pub(crate) max_tree_tokens: usize,
    /// Whether it drafts in one pass.
    pub(crate) at_once: bool,
}

impl Run {
    /// With a model alone, of whose tokens so many are accepted.
    pub(crate) fn new(world: World, rates: &[f64]) -> Self {
        let truth =
            |&model: &f64| Truth { hit_rate: 0.0, accepted: PerSource { lookup: 0.0, model } };
        let truths: Vec<Truth> = rates.iter().map(truth).collect();
        let run = Self::combined(world, &truths);
        let tuner = Tuner::new(DraftPolicy::Adaptive, MAX_DRAFT_LEN, None, PassCost::Unknown);
        Self { tuner, ..run }
    }

    /// With a look-up ahead of the model.
    pub(crate) fn combined(world: World, truths: &[Truth]) -> Self {
        let tuner = Tuner::new(DraftPolicy::Adaptive, MAX_DRAFT_LEN, None, PassCost::Unknown);
        Self {
            tuner: tuner.with_lookup(),
            world,
            truths: truths.to_vec(),
            random: 88172645463325252,
            tokens: 0.0,
            ms: 0.0,
            lens: Vec::new(),
            breadth: 1,
            max_tree_tokens: usize::MAX,
            at_once: false,
        }
    }

    pub(crate) fn uniform(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }

    pub(crate) fn candidates(&self) -> Vec<Candidate> {
        (0..self.truths.len())
            .map(|idx| Candidate {
                id: idx as u64,
                limit: MAX_DRAFT_LEN,
                is_fixed: false,
                is_read: true,
                positions: 0,
            })
            .collect()
    }

    pub(crate) fn step(&mut self) {
        let num = self.truths.len();
        self.lens = self.tuner.choose(&self.candidates(), num, 1024);
        let mut step = StepShape { rows: num, ..StepShape::default() };
        for idx in 0..num {
            let (asked, truth) = (self.lens[idx], self.truths[idx]);
            let is_found = asked.lookup > 0 && self.uniform() < truth.hit_rate;
            let source = if is_found { DraftSource::Lookup } else { DraftSource::Model };
            let (len, rate) = (*asked.of(source), *truth.accepted.of(source));
            let accepted = (0..len).take_while(|_| self.uniform() < rate).count();
            let breadth = if source == DraftSource::Model { self.breadth } else { 1 };
            let tokens = (breadth * len).min(self.max_tree_tokens);
            let draft = (len > 0).then_some(Drafted { source, tokens, len, accepted });
            self.tuner.record(idx as u64, asked, draft, false);
            self.tokens += 1.0 + accepted as f64;
            step.rows += tokens;
            if source == DraftSource::Model && len > 0 {
                step.drafting += 1;
                let passes = if self.at_once { 1 } else { len };
                step.draft_passes = step.draft_passes.max(passes);
            }
        }
        let ms = self.world.ms(step);
        self.tuner.observe(step, ms);
        self.tuner.save_for_readings(ms);
        self.ms += ms;
    }

    pub(crate) fn steps(&mut self, count: usize) -> &mut Self {
        (self.tokens, self.ms) = (0.0, 0.0);
        (0..count).for_each(|_| self.step());
        self
    }

    /// Tokens per millisecond since the last call of `steps`, relative to plain decoding.
    pub(crate) fn speedup(&self) -> f64 {
        let num = self.truths.len();
        let plain = num as f64 / self.world.ms(StepShape { rows: num, ..StepShape::default() });
        self.tokens / self.ms / plain
    }

    pub(crate) fn mean_len(&mut self, idx: usize, count: usize) -> f64 {
        let PerSource { lookup, model } = self.mean_lens(idx, count);
        lookup.max(model)
    }

    pub(crate) fn mean_lens(&mut self, idx: usize, count: usize) -> PerSource<f64> {
        let mut mean = PerSource::default();
        for _ in 0..count {
            self.step();
            for source in DraftSource::ALL {
                *mean.of_mut(source) += *self.lens[idx].of(source) as f64 / count as f64;
            }
        }
        mean
    }
}
