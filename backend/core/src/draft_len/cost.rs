//! What a step costs: one target pass over its rows, and the drafter's passes, one for each draft position or one for all.
//! Starts from tables or from assumptions, and follows the step times that are measured.

use super::curve::{Curve, nearest_knot};
use crate::engine::CostTable;

/// Until a draft was timed: a drafter pass as a share of a target pass over as many rows.
const ASSUMED_DRAFT_SHARE: f64 = 0.15;
const ASSUMED_DRAFT_VARIANCE: f64 = 1.0;

/// Relative variance of one measured step time.
const NOISE_VARIANCE: f64 = 0.0025;

/// Added to the machine's pace by each step, as a relative variance: clocks, and others that share memory and cores.
const PACE_DRIFT: f64 = 4e-4;

/// Added to the cost of what a step did, which changes far more slowly than the pace.
const COST_DRIFT: f64 = 2e-6;

/// Standard deviations beyond which something has changed: the pace most likely, or else what the step did.
const SURPRISE: f64 = 3.0;
const PACE_SURPRISE_VARIANCE: f64 = 0.04;
const COST_SURPRISE_VARIANCE: f64 = 0.005;

/// Standard deviations beyond which a step time is taken for a stall, and cut.
const MAX_DEVIATIONS: f64 = 4.0;

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Rows of the target pass: chunks and drafts.
    pub rows: usize,
    /// Positions of the cache that these rows read, added up.
    pub positions: usize,
    /// Rows of each pass of the drafter: one a sequence that drafts, or one a draft where there is one pass.
    pub drafting: usize,
    /// Positions of the cache that one row of each of them reads.
    pub draft_positions: usize,
    /// Drafter passes: the longest draft, or one for all drafts.
    pub draft_passes: usize,
}

/// What is known of a drafter's passes before any was timed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PassCost<'a> {
    /// It looks up: there are none.
    Free,
    Unknown,
    /// They take this share of the target's.
    Share(f64),
    Measured(&'a CostTable),
}

/// The cost model of an engine. Only ratios of its times matter to a choice, so a machine whose pace changes from minute
/// to minute shall not change them: the pace is followed fast and apart from the costs.
#[derive(Clone, Debug)]
pub(super) struct Costs {
    /// By rows of the pass.
    target: Curve,
    target_position_ms: f64,
    /// By rows of the pass. None where drafting takes no passes.
    draft: Option<Curve>,
    draft_position_ms: f64,
    /// What a pass takes of the target's until one was timed.
    assumed_share: f64,
    /// Of a prompt that a model reads before it drafts; 0 where that was not measured.
    prompt_token_ms: f64,
    /// Steps take so many times what the curves say.
    pace: f64,
    pace_variance: f64,
}

impl Costs {
    pub(super) fn new(target: Option<&CostTable>, pass: PassCost<'_>) -> Self {
        let position_ms = |table: Option<&CostTable>| table.map_or(0.0, |t| 1e-6 * t.position_ns);
        let table = match pass {
            PassCost::Measured(table) => Some(table),
            PassCost::Free | PassCost::Unknown | PassCost::Share(_) => None,
        };
        Self {
            target: Curve::new(target),
            target_position_ms: position_ms(target),
            draft: (!matches!(pass, PassCost::Free)).then(|| Curve::new(table)),
            draft_position_ms: position_ms(table),
            assumed_share: match pass {
                PassCost::Share(share) => share,
                PassCost::Free | PassCost::Unknown | PassCost::Measured(_) => ASSUMED_DRAFT_SHARE,
            },
            prompt_token_ms: table.map_or(0.0, |table| table.prompt_token_ms),
            pace: 1.0,
            pace_variance: NOISE_VARIANCE,
        }
    }

    /// Milliseconds that a step takes at the usual pace; relative ones until something was measured.
    pub(super) fn step_ms(&self, step: StepShape) -> f64 {
        self.target_ms(step.rows) + self.positions_ms(step) + self.drafts_ms(step)
    }

    /// The part of the target's pass, without what lies in the cache.
    pub(super) fn target_ms(&self, rows: usize) -> f64 {
        self.target.at(rows)
    }

    /// What a row of the target takes for positions of the cache.
    pub(super) fn target_position_ms(&self) -> f64 {
        self.target_position_ms
    }

    /// One drafter pass for so many sequences, which have so many positions in the cache.
    pub(super) fn pass_ms(&self, drafting: usize, positions: usize) -> f64 {
        match &self.draft {
            None => 0.0,
            Some(draft) if draft.is_known() => {
                draft.at(drafting) + self.draft_position_ms * positions as f64
            }
            Some(_) => self.assumed_share * self.target.at(drafting),
        }
    }

    /// What a model takes to read so many tokens of a prompt. Where that was not measured, a row of the model is to one of
    /// the target as a pass is to a step, which is too much where a pass does not fill the device.
    pub(super) fn prompt_ms(&self, num_tokens: usize) -> f64 {
        match self.prompt_token_ms {
            0.0 => self.pass_ms(1, 0) / self.target_ms(1) * self.target_ms(num_tokens),
            token_ms => token_ms * num_tokens as f64,
        }
    }

    fn positions_ms(&self, step: StepShape) -> f64 {
        self.target_position_ms * step.positions as f64
    }

    fn drafts_ms(&self, step: StepShape) -> f64 {
        match step.draft_passes {
            0 => 0.0,
            passes => self.pass_ms(step.drafting, step.draft_positions) * passes as f64,
        }
    }

    /// How many times as long as usual steps take now.
    pub(super) fn pace(&self) -> f64 {
        self.pace
    }

    /// Which rows share a measurement with these.
    pub(super) fn knot(rows: usize) -> usize {
        nearest_knot(rows)
    }

    /// Takes in a step that took `ms`, and tells whether that was a surprise. The error is shared between the pace and the two passes by how unsure each is: a
    /// Kalman filter whose covariances are left out.
    pub(super) fn observe(&mut self, step: StepShape, ms: f64) -> bool {
        if !ms.is_finite() || ms <= 0.0 || step.rows == 0 {
            return false;
        }
        if !self.target.is_known() {
            let scale = ms / self.step_ms(step);
            self.target.set(step.rows, scale * self.target.at(step.rows), NOISE_VARIANCE);
            return false;
        }
        let (target, positions, drafts) =
            (self.target.at(step.rows), self.positions_ms(step), self.drafts_ms(step));
        let usual = target + positions + drafts;
        let mut pace_relative = self.pace_variance + PACE_DRIFT;
        let mut target_relative = self.target.variance(step.rows) + COST_DRIFT;
        let mut draft_relative = COST_DRIFT
            + match &self.draft {
                Some(draft) if draft.is_known() => draft.variance(step.drafting),
                _ => ASSUMED_DRAFT_VARIANCE,
            };
        let variances = |pace: f64, target_relative: f64, draft: f64| {
            [pace * usual * usual, target_relative * target * target, draft * drafts * drafts]
        };
        let noise = NOISE_VARIANCE * usual * usual;
        let sum = |variances: [f64; 3]| variances.iter().sum::<f64>() + noise;
        let error = ms / self.pace - usual;
        let expected = sum(variances(pace_relative, target_relative, draft_relative)).sqrt();
        let is_surprise = error.abs() > SURPRISE * expected;
        if is_surprise {
            pace_relative += PACE_SURPRISE_VARIANCE;
            target_relative += COST_SURPRISE_VARIANCE;
            draft_relative += COST_SURPRISE_VARIANCE;
        }
        let variances = variances(pace_relative, target_relative, draft_relative);
        let [pace_variance, target_variance, draft_variance] = variances;
        let total = sum(variances);
        let bound = MAX_DEVIATIONS * expected;
        let error = error.clamp(-bound, bound);
        // Halving at most: a cost stays positive whatever is measured.
        let corrected = |cost: f64, gain: f64| (cost + gain * error).max(0.5 * cost);
        let gain = pace_variance / total;
        self.pace *= corrected(usual, gain) / usual;
        self.pace_variance = pace_relative * (1.0 - gain);
        let gain = target_variance / total;
        self.target.set(step.rows, corrected(target, gain), target_relative * (1.0 - gain));
        if let Some(draft) = self.draft.as_mut().filter(|_| drafts > 0.0) {
            let gain = draft_variance / total;
            let cached = self.draft_position_ms * step.draft_positions as f64;
            let pass = corrected(drafts, gain) / step.draft_passes as f64;
            // Never less than half of it was: what is left beside the cache's part stays positive.
            let pass = (pass - cached).max(0.5 * (drafts / step.draft_passes as f64 - cached));
            draft.set(step.drafting, pass, draft_relative * (1.0 - gain));
        }
        is_surprise
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(rows: usize) -> StepShape {
        StepShape { rows, ..StepShape::default() }
    }

    fn one(draft_len: usize) -> StepShape {
        StepShape {
            rows: 1 + draft_len,
            drafting: 1,
            draft_passes: draft_len,
            ..StepShape::default()
        }
    }

    /// A device: target pass and drafter pass.
    fn true_ms(step: StepShape) -> f64 {
        5.0 + 0.2 * step.rows as f64 + 0.9 * step.draft_passes as f64
    }

    fn off(costs: &Costs, step: StepShape) -> f64 {
        (costs.pace * costs.step_ms(step) / true_ms(step) - 1.0).abs()
    }

    #[test]
    fn the_first_time_sets_the_scale() {
        let mut costs = Costs::new(None, PassCost::Unknown);
        costs.observe(plain(1), 40.0);
        assert!((costs.step_ms(plain(1)) - 40.0).abs() < 1e-9);
        assert!(costs.step_ms(one(4)) > 40.0);
    }

    #[test]
    fn costs_approach_what_is_measured() {
        let mut costs = Costs::new(None, PassCost::Unknown);
        for round in 0..40 {
            for step in [plain(1), one(1 + round % 8), plain(4)] {
                costs.observe(step, true_ms(step));
            }
        }
        for step in [plain(1), plain(4), one(2), one(5), one(8)] {
            assert!(off(&costs, step) < 0.05, "{step:?} is off by {}", off(&costs, step));
        }
    }

    #[test]
    fn a_table_twice_too_low_is_left_behind() {
        let table =
            CostTable { rows: vec![1, 16], step_ms: vec![2.5, 4.0], ..CostTable::default() };
        let draft = CostTable { rows: vec![1], step_ms: vec![0.2], ..CostTable::default() };
        let mut costs = Costs::new(Some(&table), PassCost::Measured(&draft));
        (0..60).for_each(|round| {
            costs.observe(one(round % 5), true_ms(one(round % 5)));
        });
        assert!(off(&costs, one(0)) < 0.05 && off(&costs, one(4)) < 0.05);
    }

    #[test]
    fn one_stall_moves_a_settled_cost_little() {
        let mut costs = Costs::new(None, PassCost::Unknown);
        (0..50).for_each(|_| {
            costs.observe(plain(1), 5.2);
        });
        costs.observe(plain(1), 5000.0);
        assert!((costs.step_ms(plain(1)) / 5.2 - 1.0).abs() < 0.1);
    }

    #[test]
    fn a_lasting_change_is_followed() {
        let mut costs = Costs::new(None, PassCost::Unknown);
        (0..50).for_each(|_| {
            costs.observe(plain(1), 2.6);
        });
        (0..100).for_each(|_| {
            costs.observe(plain(1), 5.2);
        });
        assert!(off(&costs, plain(1)) < 0.05);
    }

    #[test]
    fn a_pace_that_changes_leaves_what_a_draft_is_worth() {
        let mut costs = Costs::new(None, PassCost::Unknown);
        for round in 0..60 {
            costs.observe(one(round % 5), true_ms(one(round % 5)));
        }
        let ratio = |costs: &Costs| costs.step_ms(one(4)) / costs.step_ms(plain(1));
        let before = ratio(&costs);
        for (pace, len) in [(1.6, 4), (0.7, 4), (1.3, 0)] {
            (0..100).for_each(|_| {
                costs.observe(one(len), pace * true_ms(one(len)));
            });
            let changed = ratio(&costs) / before;
            assert!((changed - 1.0).abs() < 0.15, "at {pace} with {len}: {changed}");
        }
    }

    #[test]
    fn what_lies_in_the_cache_costs_each_row_that_reads_it() {
        let table = CostTable {
            rows: vec![1, 2],
            step_ms: vec![4.0, 5.0],
            position_ns: 1000.0,
            ..CostTable::default()
        };
        let draft = CostTable {
            rows: vec![1],
            step_ms: vec![0.5],
            position_ns: 100.0,
            ..CostTable::default()
        };
        let costs = Costs::new(Some(&table), PassCost::Measured(&draft));
        let step = StepShape {
            rows: 2,
            positions: 2 * 3000,
            drafting: 1,
            draft_positions: 3000,
            draft_passes: 1,
        };
        assert!((costs.step_ms(step) - (5.0 + 6.0 + 0.5 + 0.3)).abs() < 1e-9);
    }

    #[test]
    fn looking_up_takes_no_passes() {
        let mut costs = Costs::new(None, PassCost::Free);
        for len in [0, 4, 0, 4] {
            costs.observe(plain(1 + len), true_ms(plain(1 + len)));
        }
        assert_eq!(costs.step_ms(one(4)), costs.step_ms(plain(5)));
    }

    #[test]
    fn impossible_times_are_ignored() {
        let mut costs = Costs::new(None, PassCost::Unknown);
        costs.observe(plain(1), 5.0);
        let before = costs.step_ms(one(3));
        [f64::NAN, f64::INFINITY, 0.0, -1.0].iter().for_each(|&ms| {
            costs.observe(one(3), ms);
        });
        assert_eq!(costs.step_ms(one(3)), before);
    }
}
