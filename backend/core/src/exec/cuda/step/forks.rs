//! How often the first draft of a branch is right that is not the drafter's first choice: what further branches are worth.

/// Before any was seen: how often the runner-up is right; each choice behind it half as often as the one before.
const ASSUMED: f64 = 0.12;

/// That counts as if it had been seen so many times.
const ASSUMED_WEIGHT: f64 = 30.0;

/// What was seen counts less with each draft behind it: about the last thousand do.
const DECAY: f64 = 0.999;

/// What became of branches, by rank: the first is that of the runner-up.
#[derive(Clone, Debug)]
pub(super) struct RunnersUp(Vec<Seen>);

#[derive(Clone, Copy, Debug)]
struct Seen {
    right: f64,
    tried: f64,
}

impl RunnersUp {
    /// For drafts of so many branches at most.
    pub(super) fn new(most: usize) -> Self {
        let assumed = std::iter::successors(Some(ASSUMED), |share| Some(share / 2.0));
        let seen = |share| Seen { right: ASSUMED_WEIGHT * share, tried: ASSUMED_WEIGHT };
        Self(assumed.take(most.saturating_sub(1)).map(seen).collect())
    }

    /// Takes in a draft of so many branches, of which the one of this rank began with the target's token, if one did.
    pub(super) fn record(&mut self, num_branches: usize, right: Option<usize>) {
        for (idx, seen) in self.0.iter_mut().enumerate().take(num_branches.saturating_sub(1)) {
            let is_right = right == Some(idx + 1);
            seen.right = DECAY * seen.right + f64::from(u8::from(is_right));
            seen.tried = DECAY * seen.tried + 1.0;
        }
    }

    /// How often each is right, the runner-up first.
    pub(super) fn shares(&self) -> impl Iterator<Item = f32> + '_ {
        self.0.iter().map(|seen| (seen.right / seen.tried) as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(runners_up: &RunnersUp) -> Vec<f32> {
        runners_up.shares().collect()
    }

    #[test]
    fn shares_follow_what_was_seen() {
        let mut runners_up = RunnersUp::new(3);
        assert_eq!(shares(&runners_up), [0.12, 0.06]);
        // Of four drafts with two branches the second is right once; a third one was hardly ever tried.
        for draft in 0..4_000 {
            runners_up.record(2, [Some(1), Some(0), Some(0), None][draft % 4]);
        }
        let [second, third] = shares(&runners_up)[..] else { panic!("two shares") };
        assert!((second - 0.25).abs() < 0.01 && third == 0.06, "{second} {third}");
        for _ in 0..4_000 {
            runners_up.record(3, Some(2));
        }
        let [second, third] = shares(&runners_up)[..] else { panic!("two shares") };
        assert!(second < 0.01 && third > 0.97, "{second} {third}");
    }

    #[test]
    fn drafts_that_do_not_branch_tell_nothing() {
        let mut runners_up = RunnersUp::new(1);
        runners_up.record(1, Some(0));
        assert!(shares(&runners_up).is_empty());
        let mut runners_up = RunnersUp::new(2);
        runners_up.record(1, None);
        assert_eq!(shares(&runners_up), [0.12]);
    }
}
