//! Draft lengths for a batch: the ones with the most expected tokens per millisecond.

use super::cost::{Costs, StepShape};

/// A step to come.
#[derive(Clone, Copy)]
pub(super) struct Batch<'a> {
    /// Of each sequence, the chance that each position is accepted; never rising.
    pub(super) gains: &'a [Vec<f64>],
    /// Of each sequence, its positions in the cache.
    pub(super) positions: &'a [usize],
    /// Rows that are computed without any draft.
    pub(super) base_rows: usize,
    /// Draft rows at most.
    pub(super) max_extra: usize,
}

impl Batch<'_> {
    /// The shape of the step with these draft lengths.
    pub(super) fn step(&self, lens: &[usize]) -> StepShape {
        StepShape {
            rows: self.base_rows + lens.iter().sum::<usize>(),
            positions: self.positions.iter().zip(lens).map(|(at, len)| at * (1 + len)).sum(),
            drafting: lens.iter().filter(|&&len| len > 0).count(),
            draft_positions: self.drafting_positions(lens),
            draft_passes: lens.iter().copied().max().unwrap_or(0),
        }
    }

    fn drafting_positions(&self, lens: &[usize]) -> usize {
        let drafting = self.positions.iter().zip(lens).filter(|&(_, &len)| len > 0);
        drafting.map(|(at, _)| at).sum()
    }

    /// Expected tokens per millisecond with these draft lengths.
    pub(super) fn throughput(&self, costs: &Costs, lens: &[usize]) -> f64 {
        let drafts: f64 = self.gains.iter().zip(lens).flat_map(|(gains, &len)| &gains[..len]).sum();
        (self.gains.len() as f64 + drafts) / costs.step_ms(self.step(lens))
    }

    /// The best draft lengths. A step's cost depends on the longest draft and on the sum of all, so
    /// for every longest draft and every sum the positions with the most gain are tried.
    pub(super) fn best(&self, costs: &Costs) -> Vec<usize> {
        let ranked = self.ranked();
        let within = |draft_passes| {
            let within = move |rank: &&(f64, usize, usize)| rank.1 < draft_passes;
            ranked.iter().filter(within).take(self.max_extra)
        };
        let mut lens = vec![0; self.gains.len()];
        // Looked up once: the loop below runs a few thousand times for a large batch.
        let num_extra = ranked.len().min(self.max_extra);
        let target_ms: Vec<f64> =
            (0..=num_extra).map(|extra| costs.target_ms(self.base_rows + extra)).collect();
        let position_ms = costs.target_position_ms();
        let base_ms = position_ms * self.positions.iter().sum::<usize>() as f64;
        let (mut best, mut best_passes, mut best_extra) = (self.throughput(costs, &lens), 0, 0);
        for draft_passes in 1..=self.gains.iter().map(Vec::len).max().unwrap_or(0) {
            let (mut tokens, mut drafting, mut draft_positions) = (self.gains.len() as f64, 0, 0);
            let (mut positions_ms, mut pass_ms) = (base_ms, 0.0);
            for (&(gain, position, idx), extra) in within(draft_passes).zip(1..) {
                tokens += gain;
                positions_ms += position_ms * self.positions[idx] as f64;
                if position == 0 {
                    drafting += 1;
                    draft_positions += self.positions[idx];
                    pass_ms = costs.pass_ms(drafting, draft_positions);
                }
                let ms = target_ms[extra] + positions_ms + draft_passes as f64 * pass_ms;
                if tokens > best * ms {
                    (best, best_passes, best_extra) = (tokens / ms, draft_passes, extra);
                }
            }
        }
        within(best_passes).take(best_extra).for_each(|&(_, _, idx)| lens[idx] += 1);
        lens
    }

    /// Every (gain, position, sequence), the most gain first. Gains never rise within a sequence and
    /// ties go by position, so a prefix of the list is a prefix of each draft.
    fn ranked(&self) -> Vec<(f64, usize, usize)> {
        let mut ranked: Vec<_> = self
            .gains
            .iter()
            .enumerate()
            .flat_map(|(idx, gains)| gains.iter().enumerate().map(move |(j, &gain)| (gain, j, idx)))
            .collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
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

#[cfg(test)]
mod tests {
    use super::super::cost::PassCost;
    use super::*;
    use crate::engine::CostTable;
    use proptest::prelude::*;

    /// Every combination of draft lengths.
    fn naive_best(batch: &Batch<'_>, costs: &Costs) -> f64 {
        let mut all = vec![Vec::new()];
        for gains in batch.gains {
            all = all
                .iter()
                .flat_map(|lens| {
                    (0..=gains.len()).map(move |len| [lens.as_slice(), &[len]].concat())
                })
                .collect();
        }
        all.iter()
            .filter(|lens| lens.iter().sum::<usize>() <= batch.max_extra)
            .map(|lens| batch.throughput(costs, lens))
            .fold(0.0, f64::max)
    }

    fn gains() -> impl Strategy<Value = Vec<f64>> {
        prop::collection::vec(0.01f64..1.0, 0..5).prop_map(|rates| {
            let product = |gain: &mut f64, rate: f64| {
                *gain *= rate;
                Some(*gain)
            };
            rates.into_iter().scan(1.0, product).collect()
        })
    }

    proptest! {
        #[test]
        fn the_best_is_found(
            gains in prop::collection::vec(gains(), 1..4),
            prefill in 0usize..20,
            max_extra in 0usize..12,
            step_ms in (1.0f64..2.0, 2.0f64..3.0, 3.0f64..9.0),
            draft_ms in 0.01f64..1.5,
            position_ns in 0.0f64..500.0,
        ) {
            let target = CostTable { rows: vec![1, 4, 12], step_ms: vec![step_ms.0, step_ms.1, step_ms.2], position_ns };
            // A drafter pass must cost the same for any number of sequences here: how many draft
            // is not told by the longest draft and the sum, and `best` takes the ones of most gain.
            // And every sequence has as much in the cache.
            let draft = CostTable { rows: vec![1, 9], step_ms: vec![draft_ms, draft_ms], position_ns: 0.0 };
            let costs = Costs::new(Some(&target), PassCost::Measured(&draft));
            let positions = vec![2000; gains.len()];
            let batch =
                Batch { gains: &gains, positions: &positions, base_rows: gains.len() + prefill, max_extra };
            let lens = batch.best(&costs);
            prop_assert!(lens.iter().sum::<usize>() <= max_extra);
            prop_assert!(lens.iter().zip(&gains).all(|(&len, gains)| len <= gains.len()));
            let (found, best) = (batch.throughput(&costs, &lens), naive_best(&batch, &costs));
            prop_assert!(found >= best * (1.0 - 1e-12), "{found} of {best} with {lens:?}");
        }
    }

    #[test]
    fn short_rows_are_shared_evenly() {
        assert_eq!(Batch::longest(&[4, 0, 4, 2], 5), [2, 0, 2, 1]);
        assert_eq!(Batch::longest(&[4, 0, 4, 2], 99), [4, 0, 4, 2]);
        assert_eq!(Batch::longest(&[], 5), Vec::<usize>::new());
    }
}
