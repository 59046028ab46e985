//! What a step costs: one target pass over its rows and one drafter pass per draft position. Starts
//! from tables or from assumptions, and follows the step times that are measured.

use super::curve::{Curve, nearest_knot};
use crate::engine::CostTable;

/// Until a draft was timed: a drafter pass as a share of a target pass over as many rows.
const ASSUMED_DRAFT_SHARE: f64 = 0.15;
const ASSUMED_DRAFT_VARIANCE: f64 = 1.0;

/// Relative variance of one measured step time.
const NOISE_VARIANCE: f64 = 0.0025;

/// Added to a variance by each step, so that costs that drift are followed.
const DRIFT_VARIANCE: f64 = 1e-4;

/// Standard deviations beyond which a step time is taken for a stall, and cut.
const MAX_DEVIATIONS: f64 = 4.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepShape {
    /// Rows of the target pass: chunks and drafts.
    pub rows: usize,
    /// Sequences that draft.
    pub drafting: usize,
    /// Drafter passes, which is the longest draft.
    pub draft_passes: usize,
}

/// The cost model of an engine.
#[derive(Clone, Debug)]
pub(super) struct Costs {
    /// By rows of the pass.
    target: Curve,
    /// By sequences that draft: a row each.
    draft: Curve,
}

impl Costs {
    pub(super) fn new(target: Option<&CostTable>, draft: Option<&CostTable>) -> Self {
        Self { target: Curve::new(target), draft: Curve::new(draft) }
    }

    /// Milliseconds that a step takes; relative ones until something was measured.
    pub(super) fn step_ms(&self, step: StepShape) -> f64 {
        self.target_ms(step.rows) + self.drafts_ms(step)
    }

    /// The part of the target's pass.
    pub(super) fn target_ms(&self, rows: usize) -> f64 {
        self.target.at(rows)
    }

    /// One drafter pass for so many sequences.
    pub(super) fn pass_ms(&self, drafting: usize) -> f64 {
        if self.draft.is_known() {
            self.draft.at(drafting)
        } else {
            ASSUMED_DRAFT_SHARE * self.target.at(drafting)
        }
    }

    fn drafts_ms(&self, step: StepShape) -> f64 {
        match step.draft_passes {
            0 => 0.0,
            passes => self.pass_ms(step.drafting) * passes as f64,
        }
    }

    /// Which rows share a measurement with these.
    pub(super) fn knot(rows: usize) -> usize {
        nearest_knot(rows)
    }

    /// Takes in a step that took `ms`. The error is shared between the two passes by how unsure
    /// each is: a Kalman filter whose covariances are left out.
    pub(super) fn observe(&mut self, step: StepShape, ms: f64) {
        if !ms.is_finite() || ms <= 0.0 || step.rows == 0 {
            return;
        }
        if !self.target.is_known() {
            let scale = ms / self.step_ms(step);
            self.target.set(step.rows, scale * self.target.at(step.rows), NOISE_VARIANCE);
            return;
        }
        let (target, drafts) = (self.target.at(step.rows), self.drafts_ms(step));
        let target_relative = self.target.variance(step.rows) + DRIFT_VARIANCE;
        let draft_relative = DRIFT_VARIANCE
            + if self.draft.is_known() {
                self.draft.variance(step.drafting)
            } else {
                ASSUMED_DRAFT_VARIANCE
            };
        let target_variance = target_relative * target * target;
        let draft_variance = draft_relative * drafts * drafts;
        let predicted = target + drafts;
        let total = target_variance + draft_variance + NOISE_VARIANCE * predicted * predicted;
        let bound = MAX_DEVIATIONS * total.sqrt();
        let error = (ms - predicted).clamp(-bound, bound);
        // Halving at most: a cost stays positive whatever is measured.
        let corrected = |cost: f64, gain: f64| (cost + gain * error).max(0.5 * cost);
        let gain = target_variance / total;
        self.target.set(step.rows, corrected(target, gain), target_relative * (1.0 - gain));
        if drafts > 0.0 {
            let gain = draft_variance / total;
            let pass = corrected(drafts, gain) / step.draft_passes as f64;
            self.draft.set(step.drafting, pass, draft_relative * (1.0 - gain));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(rows: usize) -> StepShape {
        StepShape { rows, drafting: 0, draft_passes: 0 }
    }

    fn one(draft_len: usize) -> StepShape {
        StepShape { rows: 1 + draft_len, drafting: 1, draft_passes: draft_len }
    }

    /// A device: target pass and drafter pass.
    fn true_ms(step: StepShape) -> f64 {
        5.0 + 0.2 * step.rows as f64 + 0.9 * step.draft_passes as f64
    }

    fn off(costs: &Costs, step: StepShape) -> f64 {
        (costs.step_ms(step) / true_ms(step) - 1.0).abs()
    }

    #[test]
    fn the_first_time_sets_the_scale() {
        let mut costs = Costs::new(None, None);
        costs.observe(plain(1), 40.0);
        assert!((costs.step_ms(plain(1)) - 40.0).abs() < 1e-9);
        assert!(costs.step_ms(one(4)) > 40.0);
    }

    #[test]
    fn costs_approach_what_is_measured() {
        let mut costs = Costs::new(None, None);
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
        let table = CostTable { rows: vec![1, 16], step_ms: vec![2.5, 4.0] };
        let draft = CostTable { rows: vec![1], step_ms: vec![0.2] };
        let mut costs = Costs::new(Some(&table), Some(&draft));
        (0..60).for_each(|round| costs.observe(one(round % 5), true_ms(one(round % 5))));
        assert!(off(&costs, one(0)) < 0.05 && off(&costs, one(4)) < 0.05);
    }

    #[test]
    fn one_stall_moves_a_settled_cost_little() {
        let mut costs = Costs::new(None, None);
        (0..50).for_each(|_| costs.observe(plain(1), 5.2));
        costs.observe(plain(1), 5000.0);
        assert!(off(&costs, plain(1)) < 0.1);
    }

    #[test]
    fn a_lasting_change_is_followed() {
        let mut costs = Costs::new(None, None);
        (0..50).for_each(|_| costs.observe(plain(1), 2.6));
        (0..100).for_each(|_| costs.observe(plain(1), 5.2));
        assert!(off(&costs, plain(1)) < 0.05);
    }

    #[test]
    fn impossible_times_are_ignored() {
        let mut costs = Costs::new(None, None);
        costs.observe(plain(1), 5.0);
        let before = costs.step_ms(one(3));
        [f64::NAN, f64::INFINITY, 0.0, -1.0].iter().for_each(|&ms| costs.observe(one(3), ms));
        assert_eq!(costs.step_ms(one(3)), before);
    }
}
