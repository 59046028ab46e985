//! Where further branches of a draft part from its first one: where that has brought the most accepted tokens so far.

/// Before any was seen: how often the drafter's second choice is right; each choice behind it half as often as the one before.
const ASSUMED_RIGHT: f64 = 0.12;

/// How often a draft goes on to be right behind one that is.
const ASSUMED_ON: f64 = 0.7;

/// That counts as if it had been seen so many times.
const ASSUMED_WEIGHT: f64 = 30.0;

/// What was seen counts less with each draft behind it: about the last thousand do.
const DECAY: f64 = 0.999;

/// Where a branch parts from the first one of its draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fork {
    /// Drafts that both have.
    pub depth: usize,
    /// The next one is the drafter's choice that so many are better than; the first branch has the best.
    pub rank: usize,
}

/// A fork, and the tokens of it that are expected to be accepted: those of the first branch not among them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Worth {
    pub(super) fork: Fork,
    pub(super) tokens: f32,
}

/// A branch behind its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Verified {
    pub(super) drafted: usize,
    pub(super) accepted: usize,
}

/// What became of branches.
#[derive(Clone, Debug)]
pub(super) struct Forks {
    /// By depth: behind so many right drafts of the first branch there is another, and it is right.
    on: Vec<Share>,
    /// By rank, of the second choice first: it is right, where all drafts before it are.
    right: Vec<Share>,
}

#[derive(Clone, Copy, Debug)]
struct Share {
    seen: f64,
    of: f64,
}

impl Share {
    fn assumed(share: f64) -> Self {
        Self { seen: ASSUMED_WEIGHT * share, of: ASSUMED_WEIGHT }
    }

    fn record(&mut self, is_seen: bool) {
        self.seen = DECAY * self.seen + f64::from(u8::from(is_seen));
        self.of = DECAY * self.of + 1.0;
    }

    fn value(self) -> f64 {
        self.seen / self.of
    }
}

impl Forks {
    /// For drafts of so many tokens and branches at most.
    pub(super) fn new(max_drafts: usize, most: usize) -> Self {
        let shares = std::iter::successors(Some(ASSUMED_RIGHT), |share| Some(share / 2.0));
        Self {
            on: vec![Share::assumed(ASSUMED_ON); max_drafts],
            right: shares.take(most.saturating_sub(1)).map(Share::assumed).collect(),
        }
    }

    /// Takes in a draft that could be so long: its first branch, and the others with their forks.
    pub(super) fn record(&mut self, len: usize, first: Verified, others: &[(Fork, Verified)]) {
        for (depth, on) in self.on.iter_mut().enumerate().take(len.min(first.accepted + 1)) {
            on.record(first.accepted > depth);
        }
        for &(Fork { depth, rank }, branch) in others {
            // Else its fork has not come to be, or comes behind a wrong draft.
            if depth <= first.accepted && depth < first.drafted {
                self.right[rank - 1].record(branch.accepted > depth);
            }
        }
    }

    /// The forks of drafts of so many tokens, from the one that is worth the most on.
    pub(super) fn by_worth(&self, len: usize) -> Vec<Worth> {
        // So likely are the first so many drafts to be right.
        let reached = self.on[..len].iter().scan(1.0, |share, on| {
            let before = *share;
            *share *= on.value();
            Some(before)
        });
        let reached: Vec<f64> = reached.collect();
        let forks = (0..len).flat_map(|depth| (0..self.right.len()).map(move |idx| (depth, idx)));
        let worth = |(depth, idx): (usize, usize)| {
            // Behind it drafts are as good as from the known tokens on.
            let tokens: f64 = reached[..len - depth].iter().sum();
            let share = reached[depth] * self.right[idx].value();
            Worth { fork: Fork { depth, rank: idx + 1 }, tokens: (share * tokens) as f32 }
        };
        let mut all: Vec<Worth> = forks.map(worth).collect();
        all.sort_by(|a, b| b.tokens.total_cmp(&a.tokens));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verified(drafted: usize, accepted: usize) -> Verified {
        Verified { drafted, accepted }
    }

    fn fork(depth: usize, rank: usize) -> Fork {
        Fork { depth, rank }
    }

    fn order(forks: &Forks, len: usize) -> Vec<(usize, usize)> {
        forks.by_worth(len).iter().map(|worth| (worth.fork.depth, worth.fork.rank)).collect()
    }

    #[test]
    fn forks_that_bring_the_most_tokens_come_first() {
        let forks = Forks::new(3, 3);
        let worth = forks.by_worth(3);
        assert_eq!(order(&forks, 3), [(0, 1), (1, 1), (0, 2), (1, 2), (2, 1), (2, 2)]);
        // Right 0.12 of the time, and behind it up to two more are, each as often as from the known tokens on.
        assert!((worth[0].tokens - 0.12 * (1.0 + 0.7 + 0.49)).abs() < 1e-6, "{worth:?}");
        assert!((worth[1].tokens - 0.7 * 0.12 * (1.0 + 0.7)).abs() < 1e-6, "{worth:?}");
        assert_eq!(order(&forks, 1), [(0, 1), (0, 2)]);
        assert!(order(&forks, 0).is_empty() && order(&Forks::new(3, 1), 3).is_empty());
    }

    #[test]
    fn worth_follows_what_was_seen() {
        let mut forks = Forks::new(2, 2);
        // The first draft is always right, and the second never: the second's second choice is, half of the time.
        for draft in 0..8_000 {
            let branch = verified(2, 1 + draft % 2);
            forks.record(2, verified(2, 1), &[(fork(1, 1), branch)]);
        }
        let worth = forks.by_worth(2);
        assert_eq!(order(&forks, 2), [(0, 1), (1, 1)]);
        let [first, second] = [worth[0].tokens, worth[1].tokens];
        // Pooled over depths; behind the first fork another draft is right as often as the first one is.
        assert!((first - 0.5 * 2.0).abs() < 0.01 && (second - 0.5).abs() < 0.01, "{worth:?}");
    }

    #[test]
    fn a_fork_that_has_not_come_to_be_tells_nothing() {
        let mut forks = Forks::new(4, 2);
        let before = forks.right[0].value();
        let wrong = verified(4, 1);
        forks.record(4, wrong, &[(fork(2, 1), wrong)]);
        forks.record(4, verified(2, 2), &[(fork(2, 1), verified(2, 2))]);
        assert_eq!(forks.right[0].value(), before, "behind a wrong draft, or behind all");
        forks.record(4, wrong, &[(fork(1, 1), verified(4, 3))]);
        forks.record(4, verified(4, 4), &[(fork(1, 1), verified(4, 1))]);
        let seen = (DECAY * (DECAY * 3.6 + 1.0)) / (DECAY * (DECAY * 30.0 + 1.0) + 1.0);
        assert!((forks.right[0].value() - seen).abs() < 1e-9, "right once of twice");
    }

    #[test]
    fn how_far_drafts_reach_is_seen_up_to_the_first_wrong_one() {
        let mut forks = Forks::new(3, 2);
        for _ in 0..8_000 {
            forks.record(3, verified(3, 1), &[]);
        }
        let on: Vec<f64> = forks.on.iter().map(|share| share.value()).collect();
        assert!(on[0] > 0.99 && on[1] < 0.01 && (on[2] - ASSUMED_ON).abs() < 1e-9, "{on:?}");
        // Who could be longer and is not ends it as one that is wrong.
        for _ in 0..8_000 {
            forks.record(3, verified(1, 1), &[]);
            forks.record(1, verified(1, 0), &[]);
        }
        assert!((forks.on[0].value() - 0.5).abs() < 0.01 && forks.on[1].value() < 0.01);
    }
}
