//! Draft lengths for a batch: the ones with the most expected tokens per millisecond.
//!
//! Where a look-up is asked before a model, who drafts is not known before the step: what it brings and what it computes
//! are expectations over that, by the share of steps in which the look-up finds something. Without a model, or without a
//! look-up, nothing is left to chance.

use super::cost::Costs;
use super::expected::Expected;
use super::outlook::Outlook;
use crate::draft_source::{DraftLens, DraftSource};

/// A step to come.
#[derive(Clone, Copy)]
pub(super) struct Batch<'a> {
    /// Of each sequence, what drafts promise.
    pub(super) outlooks: &'a [Outlook],
    /// Of each sequence, its positions in the cache.
    pub(super) positions: &'a [usize],
    /// Sequences alike that each of these stands for.
    pub(super) num_alike: usize,
    /// Rows that are computed without any draft: one of each sequence, and those of others, such as prompts.
    pub(super) base_rows: usize,
    /// Draft rows at most, whoever drafts.
    pub(super) max_extra: usize,
    /// Rows that a draft of the model takes for each of its tokens.
    pub(super) breadth: f64,
    /// and at most, if it branches.
    pub(super) max_tree_tokens: usize,
    /// Whether all that a model drafts comes from one pass.
    pub(super) at_once: bool,
}

/// A draft position that may be asked for.
#[derive(Clone, Copy, Debug)]
struct Ranked {
    /// The chance that it is accepted, if its source drafts: also what each of its rows brings.
    gain: f64,
    position: usize,
    idx: usize,
    source: DraftSource,
}

impl<'a> Batch<'a> {
    /// Rows of a draft of the model with so many tokens one behind the other.
    pub(super) fn model_rows(&self, len: usize) -> f64 {
        let most = self.max_tree_tokens.max(len) as f64;
        (self.breadth * len as f64).min(most)
    }

    /// What a step with these draft lengths is expected to do.
    pub(super) fn expect(&self, costs: &Costs, lens: &[DraftLens]) -> Expected<'a> {
        let passes = lens.iter().map(|lens| lens.model).max().unwrap_or(0);
        let mut expected = Expected::new(*self, passes);
        for (idx, lens) in lens.iter().enumerate() {
            for source in DraftSource::ALL {
                (0..*lens.of(source)).for_each(|_| expected.add(costs, idx, source));
            }
        }
        expected
    }

    /// Expected tokens per millisecond with these draft lengths.
    pub(super) fn throughput(&self, costs: &Costs, lens: &[DraftLens]) -> f64 {
        let expected = self.expect(costs, lens);
        expected.tokens / expected.ms(costs)
    }

    /// Tells what the target's pass takes for these sequences, by rows of the step. What others take is left out: they are
    /// computed whatever is drafted, and a prompt's time would otherwise make drafts look cheap that take more of it than
    /// they save of the steps to come.
    pub(super) fn target_ms<'c>(&self, costs: &'c Costs) -> impl Fn(usize) -> f64 + use<'c> {
        let own = costs.target_ms(self.num_alike * self.outlooks.len());
        let without_drafts = costs.target_ms(self.base_rows);
        move |rows| own + (costs.target_ms(rows) - without_drafts).max(0.0)
    }

    /// Whether draft lengths fit into the rows: each sequence gets as many as its longer draft has.
    pub(super) fn fits(&self, lens: &[DraftLens]) -> bool {
        self.num_alike * lens.iter().map(DraftLens::longest).sum::<usize>() <= self.max_extra
    }

    /// How long the model's draft for the only sequence may become: as long as every token promises so much, and no row is
    /// lacking.
    pub(super) fn reach(&self, lens: DraftLens, worth: f64) -> usize {
        let gains = &self.outlooks[0].gains.model;
        let promising =
            gains.iter().take(self.max_extra).take_while(|gain| **gain >= worth).count();
        lens.model.max(promising)
    }

    /// The best draft lengths. A step's cost depends on the model's longest draft and on the sum of all rows, so for every
    /// longest draft and every sum the positions with the most gain a row are tried. What is looked up comes in the place
    /// of the model's draft, which may have been the better one: either all look up, or nobody, or, beside the model's
    /// drafts that are the best then, those to whom a look-up promises more tokens than these.
    pub(super) fn best(&self, costs: &Costs) -> Vec<DraftLens> {
        let ranked = self.ranked();
        // Looked up once: the loop over them runs a few thousand times for a large batch.
        let num_extra = (self.num_alike * ranked.len()).min(self.max_extra);
        let most_rows = (num_extra as f64 * self.breadth.max(1.0)).ceil() as usize;
        let target_ms = self.target_ms(costs);
        let times: Vec<f64> =
            (0..=most_rows + 1).map(|extra| target_ms(self.base_rows + extra)).collect();
        let search = Search { batch: *self, costs, ranked: &ranked, times: &times };
        let nobody = vec![false; self.outlooks.len()];
        let all = self.preferring_lookup(|_| 0);
        let mut best = Found {
            tokens_per_ms: self.throughput(costs, &vec![DraftLens::default(); nobody.len()]),
            passes: 0,
            looks_up: nobody.clone(),
            num_ranked: 0,
        };
        let longest = self.outlooks.iter().map(|outlook| outlook.gains.model.len()).max();
        for passes in 0..=longest.unwrap_or(0) {
            if all != nobody {
                search.improve(&mut best, passes, all.clone());
            }
            search.improve(&mut best, passes, nobody.clone());
        }
        let lens = search.lens(&best);
        let (passes, preferring) = (best.passes, self.preferring_lookup(|idx| lens[idx].model));
        if preferring != best.looks_up {
            search.improve(&mut best, passes, preferring);
        }
        search.lens(&best)
    }

    /// Who is better off with a look-up than with a draft of the model of this length.
    fn preferring_lookup(&self, model_len: impl Fn(usize) -> usize) -> Vec<bool> {
        let each = self.outlooks.iter().enumerate();
        each.map(|(idx, outlook)| outlook.prefers_lookup(model_len(idx))).collect()
    }

    /// Every position that may be drafted, the most gain first. Gains never rise within a draft and ties go by position, so
    /// a prefix of the list is a prefix of each draft.
    fn ranked(&self) -> Vec<Ranked> {
        let mut ranked = Vec::new();
        for (idx, outlook) in self.outlooks.iter().enumerate() {
            for source in DraftSource::ALL {
                let gains = outlook.gains.of(source).iter().enumerate();
                ranked.extend(gains.map(|(position, &gain)| Ranked {
                    gain,
                    position,
                    idx,
                    source,
                }));
            }
        }
        let order = |at: &Ranked| (at.position, at.idx, at.source);
        ranked.sort_by(|a, b| b.gain.total_cmp(&a.gain).then(order(a).cmp(&order(b))));
        ranked
    }

    /// As long as allowed, without regard to cost: where rows are short, every sequence gets its
    /// first positions before any gets more.
    pub(super) fn longest(limits: &[usize], max_extra: usize) -> Vec<usize> {
        let mut lens = vec![0; limits.len()];
        let mut left = max_extra;
        for position in 0..limits.iter().copied().max().unwrap_or(0) {
            for (len, _) in lens.iter_mut().zip(limits).filter(|(_, limit)| **limit > position) {
                let taken = left.min(1);
                *len += taken;
                left -= taken;
            }
        }
        lens
    }
}

/// Lengths that were found: the first ranked positions, with a bound on the model's passes and on who looks up.
struct Found {
    tokens_per_ms: f64,
    passes: usize,
    looks_up: Vec<bool>,
    num_ranked: usize,
}

/// What is tried, and by which times.
struct Search<'a> {
    batch: Batch<'a>,
    costs: &'a Costs,
    ranked: &'a [Ranked],
    /// Of the target for these sequences, by rows beyond those without drafts.
    times: &'a [f64],
}

impl Search<'_> {
    /// Looks for better lengths than the best so far.
    fn improve(&self, best: &mut Found, passes: usize, looks_up: Vec<bool>) {
        let from = best.tokens_per_ms;
        let (mut tokens_per_ms, mut num_ranked) = (from, 0);
        let mut expected = Expected::new(self.batch, passes);
        for (rank, at) in (1..).zip(self.ranked) {
            if self.takes(&expected, at, passes, &looks_up) {
                expected.add(self.costs, at.idx, at.source);
                let ms = expected.ms_by(|rows| self.times[rows - self.batch.base_rows], self.costs);
                if expected.tokens > tokens_per_ms * ms {
                    (tokens_per_ms, num_ranked) = (expected.tokens / ms, rank);
                }
            }
        }
        if num_ranked > 0 {
            *best = Found { tokens_per_ms, passes, looks_up, num_ranked };
        }
    }

    /// Whether a position is drafted: it is within the bounds, those before it are, and there is a row for it, or one that
    /// the other source's draft has already.
    fn takes(
        &self,
        expected: &Expected<'_>,
        at: &Ranked,
        passes: usize,
        looks_up: &[bool],
    ) -> bool {
        let lens = expected.lens[at.idx];
        let is_allowed = match at.source {
            DraftSource::Lookup => looks_up[at.idx],
            DraftSource::Model => at.position < passes,
        };
        let num_extra = expected.num_extra + self.batch.num_alike;
        let has_row = at.position < lens.longest() || num_extra <= self.batch.max_extra;
        is_allowed && has_row && at.position == *lens.of(at.source)
    }

    fn lens(&self, found: &Found) -> Vec<DraftLens> {
        let mut expected = Expected::new(self.batch, found.passes);
        for at in &self.ranked[..found.num_ranked] {
            if self.takes(&expected, at, found.passes, &found.looks_up) {
                expected.add(self.costs, at.idx, at.source);
            }
        }
        expected.lens
    }
}

#[cfg(test)]
mod tests;
