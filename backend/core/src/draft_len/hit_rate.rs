//! How often a look-up drafts where it is asked.

use super::count::{Count, ENGINE_DECAY, GUESS_TRIALS, SEQUENCE_DECAY};

/// Assumed of an engine that has not looked up yet: most texts repeat themselves now and then.
const PRIOR_RATE: f64 = 0.2;

/// The share of the steps asked in which the step verified what was looked up. A step that began before it was
/// asked for does not, whatever was found: that is what a look-up is worth there.
#[derive(Clone, Copy, Debug)]
pub(super) struct HitRate {
    count: Count,
    decay: f64,
}

impl HitRate {
    /// Of one sequence, nothing seen.
    pub(super) fn of_sequence() -> Self {
        Self { count: Count::default(), decay: SEQUENCE_DECAY }
    }

    /// Of all sequences together, nothing seen.
    pub(super) fn of_engine() -> Self {
        Self { count: Count::default(), decay: ENGINE_DECAY }
    }

    /// Takes in a step that asked.
    pub(super) fn record(&mut self, is_hit: bool) {
        self.count.fade(self.decay);
        self.count.add(is_hit);
    }

    /// What is usual in the engine.
    pub(super) fn usual(&self) -> f64 {
        self.count.rate(PRIOR_RATE, GUESS_TRIALS)
    }

    /// Of a sequence in an engine where `usual` is.
    pub(super) fn rate(&self, usual: f64) -> f64 {
        self.count.rate(usual, GUESS_TRIALS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_starts_from_what_is_usual_and_goes_its_own_way() {
        let mut engine = HitRate::of_engine();
        assert!((engine.usual() - PRIOR_RATE).abs() < 1e-12);
        (0..400).for_each(|step| engine.record(step % 2 == 0));
        assert!((engine.usual() - 0.5).abs() < 0.02, "{}", engine.usual());
        let mut sequence = HitRate::of_sequence();
        assert!((sequence.rate(engine.usual()) - engine.usual()).abs() < 1e-12);
        (0..100).for_each(|_| sequence.record(true));
        assert!(sequence.rate(engine.usual()) > 0.95);
        (0..100).for_each(|_| sequence.record(false));
        assert!(sequence.rate(engine.usual()) < 0.1);
    }
}
