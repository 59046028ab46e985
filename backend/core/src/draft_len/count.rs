//! How often something happened of late: counts that fade.

/// Weight that remains of what was seen before, after one more of the same sequence.
pub(super) const SEQUENCE_DECAY: f64 = 1.0 - 1.0 / 32.0;

/// The same for the whole engine, which sees many sequences.
pub(super) const ENGINE_DECAY: f64 = 1.0 - 1.0 / 512.0;

/// Trials that a prior counts for where it is no more than a guess.
pub(super) const GUESS_TRIALS: f64 = 2.0;

/// Trials, and those that succeeded.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    trials: f64,
    successes: f64,
}

impl Count {
    pub(super) fn fade(&mut self, decay: f64) {
        self.trials *= decay;
        self.successes *= decay;
    }

    pub(super) fn add(&mut self, succeeded: bool) {
        self.trials += 1.0;
        self.successes += f64::from(u8::from(succeeded));
    }

    /// The share that succeeds; the prior, which counts for so many trials, where nothing was tried.
    pub(super) fn rate(&self, prior: f64, prior_trials: f64) -> f64 {
        (self.successes + prior_trials * prior) / (self.trials + prior_trials)
    }
}
