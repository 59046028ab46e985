//! How likely a draft token is accepted, by its position in the draft: decayed counts over a prior.

use super::count::{Count, ENGINE_DECAY, GUESS_TRIALS, SEQUENCE_DECAY};
use crate::draft_source::DraftSource;

/// Assumed of an engine that has not drafted yet: common pairs reach 0.6 to 0.8.
const PRIOR_RATE: f64 = 0.7;

/// Trials that count for as much as what is usual of a model's drafts: texts differ little in that. What is looked up is
/// right in one text and wrong in the next.
const USUAL_TRIALS: f64 = 4.0;
/// The same of what was measured of an engine, over more drafts than that.
const MEASURED_TRIALS: f64 = 32.0;

/// No sequence is taken for certain before its drafts were.
const MAX_PRIOR_RATE: f64 = 0.98;

/// Acceptance per position. Position `j` is tried when every draft before it was accepted.
#[derive(Clone, Debug)]
pub(super) struct Acceptance {
    counts: Vec<Count>,
    decay: f64,
    prior_trials: f64,
    /// Of an engine: the rates that it was measured to have.
    measured: Vec<f64>,
}

impl Acceptance {
    /// Of one sequence and source, nothing seen.
    pub(super) fn of_sequence(max_draft_len: usize, source: DraftSource) -> Self {
        let counts = vec![Count::default(); max_draft_len];
        let prior_trials = match source {
            DraftSource::Lookup => GUESS_TRIALS,
            DraftSource::Model => USUAL_TRIALS,
        };
        Self { counts, decay: SEQUENCE_DECAY, prior_trials, measured: Vec::new() }
    }

    /// Of all sequences together, nothing seen; `measured` is what was measured at the first positions.
    pub(super) fn of_engine(max_draft_len: usize, measured: &[f64]) -> Self {
        let counts = vec![Count::default(); max_draft_len];
        let prior_trials = if measured.is_empty() { GUESS_TRIALS } else { MEASURED_TRIALS };
        Self { counts, decay: ENGINE_DECAY, prior_trials, measured: measured.to_vec() }
    }

    /// Takes in a verified draft. Every position fades, tried or not, so that a position no longer
    /// drafted returns to its prior and is tried again.
    pub(super) fn record(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 {
            return;
        }
        for (position, count) in self.counts.iter_mut().enumerate() {
            count.fade(self.decay);
            if position < drafted && position <= accepted {
                count.add(position < accepted);
            }
        }
    }

    /// The rate at each position where those before it were accepted. A position that was not tried is taken for as much
    /// better or worse than it was measured as the one before it is; where nothing was measured, for as good as that one.
    pub(super) fn rates(&self) -> Vec<f64> {
        let last = self.measured.last().copied().unwrap_or(PRIOR_RATE);
        let measured = self.measured.iter().copied().chain(std::iter::repeat(last));
        let next = |better: &mut f64, (count, measured): (&Count, f64)| {
            let own = count.rate((measured * *better).min(MAX_PRIOR_RATE), self.prior_trials);
            *better = own / measured;
            Some(own)
        };
        self.counts.iter().zip(measured).scan(1.0, next).collect()
    }

    /// The expected gain of each position, which is the chance that it and all before it are
    /// accepted; never rising. A position's prior is the rate that is usual there, as much better or worse as the position
    /// before it was.
    pub(super) fn gains(&self, usual: &[f64], draft_len: usize) -> impl Iterator<Item = f64> {
        let each = self.counts.iter().zip(usual).take(draft_len);
        each.scan((1.0, 1.0), |(better, gain), (count, usual)| {
            let own = count.rate((usual * *better).min(MAX_PRIOR_RATE), self.prior_trials);
            *better = own / usual;
            *gain *= own;
            Some(*gain)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gains(acceptance: &Acceptance) -> Vec<f64> {
        let usual = vec![PRIOR_RATE; acceptance.counts.len()];
        acceptance.gains(&usual, acceptance.counts.len()).collect()
    }

    fn of_sequence(max_draft_len: usize) -> Acceptance {
        Acceptance::of_sequence(max_draft_len, DraftSource::Model)
    }

    #[test]
    fn nothing_seen_gives_the_prior() {
        let gains = gains(&of_sequence(2));
        assert!((gains[0] - 0.7).abs() < 1e-12 && (gains[1] - 0.49).abs() < 1e-12);
    }

    #[test]
    fn estimates_approach_what_is_seen() {
        let mut acceptance = of_sequence(3);
        (0..200).for_each(|_| acceptance.record(3, 1));
        let gains = gains(&acceptance);
        assert!(gains[0] > 0.96, "{gains:?}");
        assert!(gains[1] < 0.12, "{gains:?}");
    }

    #[test]
    fn a_position_no_longer_drafted_returns_to_its_prior() {
        let mut acceptance = of_sequence(2);
        (0..100).for_each(|_| acceptance.record(2, 1));
        assert!(gains(&acceptance)[1] < 0.12);
        (0..200).for_each(|_| acceptance.record(1, 1));
        assert!(gains(&acceptance)[1] > 0.9);
    }

    #[test]
    fn a_new_sequence_starts_from_what_is_usual_at_each_position() {
        let mut engine = Acceptance::of_engine(3, &[]);
        (0..400).for_each(|round| engine.record(3, [0, 1, 1, 1][round % 4]));
        let usual = engine.rates();
        assert!((usual[0] - 0.75).abs() < 0.05 && usual[1] < 0.05, "{usual:?}");
        let mut acceptance = of_sequence(3);
        let gains = |acceptance: &Acceptance| acceptance.gains(&usual, 3).collect::<Vec<_>>();
        assert!((gains(&acceptance)[0] - usual[0]).abs() < 1e-12);
        assert!((gains(&acceptance)[1] - usual[0] * usual[1]).abs() < 1e-12);
        // Worse than usual at the first position: worse behind it, too.
        let before = gains(&acceptance)[2];
        (0..8).for_each(|_| acceptance.record(1, 0));
        assert!(gains(&acceptance)[0] < 0.5 * usual[0] && gains(&acceptance)[2] < 0.2 * before);
    }

    #[test]
    fn an_engine_starts_from_what_it_was_measured_to_have() {
        let mut engine = Acceptance::of_engine(4, &[0.5, 0.6]);
        assert_eq!(engine.rates(), [0.5, 0.6, 0.6, 0.6]);
        (0..400).for_each(|_| engine.record(1, 1));
        let rates = engine.rates();
        assert!(rates[0] > 0.94 && rates[1] == MAX_PRIOR_RATE, "as much better: {rates:?}");
    }

    #[test]
    fn a_step_without_drafts_changes_nothing() {
        let mut acceptance = of_sequence(2);
        acceptance.record(2, 0);
        let before = gains(&acceptance);
        acceptance.record(0, 0);
        assert_eq!(gains(&acceptance), before);
    }

    proptest! {
        #[test]
        fn gains_are_chances_that_never_rise(drafts in prop::collection::vec((0usize..6, 0usize..6), 0..80)) {
            let mut acceptance = of_sequence(5);
            for (drafted, accepted) in drafts {
                acceptance.record(drafted.min(5), accepted.min(drafted).min(5));
            }
            let mut last = 1.0;
            for gain in gains(&acceptance) {
                prop_assert!(gain > 0.0 && gain <= last);
                last = gain;
            }
        }
    }
}
