//! Decides which draft tokens to keep, so that the text is distributed as if the target had drawn it alone.
//!
//! With `Coupling::Path` the target draws its own token at each position and a draft is kept iff it is that
//! token: the text is the same with any drafts. With `Coupling::Independent` drafts are kept by rejection
//! sampling. Greedy targets give the same text under either, as their distributions are certain.
//!
//! Rejection sampling is exact if each node's `q` is the distribution its token was drawn from, given the
//! nodes before it; `None` stands for a token that was not drawn. Whether to propose a position must be
//! decided before its token is drawn: dropping a token because of what it is changes its distribution.

use crate::draft::Proposal;
use crate::sampling::{Coupling, Distribution, Sampler, Stream};

/// What a step settled for one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// The accepted nodes of the proposal, each the parent of the next.
    pub path: Vec<usize>,
    /// The target's own token after them.
    pub token: u32,
}

impl Verdict {
    /// How many draft tokens were accepted.
    pub fn accepted(&self) -> usize {
        self.path.len()
    }

    /// The step's new tokens: the accepted drafts, then the target's own.
    pub fn tokens<'a>(&'a self, proposal: &'a Proposal) -> impl Iterator<Item = u32> + 'a {
        self.path.iter().map(|&node| proposal.tokens[node]).chain([self.token])
    }
}

/// Walks the proposal from its root. `target` gives the processed distribution of the token after a node
/// (`None`: after the last known token), given the draft tokens up to and including that node; it is called once for
/// each accepted node and once for the root. `first_position` is the absolute position of the first draft.
pub fn verify(
    sampler: &Sampler,
    proposal: &Proposal,
    mut target: impl FnMut(Option<usize>, &[u32]) -> Distribution,
    first_position: usize,
) -> Verdict {
    let mut path = Vec::new();
    let mut prefix = Vec::new();
    loop {
        let node = path.last().copied();
        let p = target(node, &prefix);
        let position = first_position + path.len();
        let choice = match sampler.coupling() {
            Coupling::Path(_) => follow(sampler, proposal, node, &p, position),
            Coupling::Independent(_) => reject(sampler, proposal, node, p, position),
        };
        match choice {
            Choice::Child(child) => {
                path.push(child);
                prefix.push(proposal.tokens[child]);
            }
            Choice::Own(token) => return Verdict { path, token },
        }
    }
}

enum Choice {
    /// A draft is kept.
    Child(usize),
    /// The target's own token ends the walk.
    Own(u32),
}

fn follow(
    sampler: &Sampler,
    proposal: &Proposal,
    node: Option<usize>,
    p: &Distribution,
    position: usize,
) -> Choice {
    let token = sampler.draw(p, position, Stream::Target);
    let child = children(proposal, node).find(|&child| proposal.tokens[child] == token);
    child.map_or(Choice::Own(token), Choice::Child)
}

/// Tries the siblings in turn. A rejected one leaves max(p - q, 0), normalised, whichever token it was, so
/// the next may be tried against that with a `q` of its own; given tokens (`None`) leave p without them.
fn reject(
    sampler: &Sampler,
    proposal: &Proposal,
    node: Option<usize>,
    p: Distribution,
    position: usize,
) -> Choice {
    let mut rest = p;
    for (nth, child) in children(proposal, node).enumerate() {
        let (token, q) = (proposal.tokens[child], &proposal.q[child]);
        let log_q = q.as_ref().map_or(0.0, |q| q.log_prob(token));
        // Strict, with a coin above 0: a token that the target excludes is never kept.
        if rest.log_prob(token) > sampler.coin(position, nth).ln() + log_q {
            return Choice::Child(child);
        }
        let left = match q {
            Some(q) => rest.minus(q),
            None => rest.without(token),
        };
        // Nothing is left only if p = q up to rounding (the ratio, and so the chance to be here, was within
        // rounding of 1); then p itself is as exact. A given token that holds all of p has log p = 0 and is kept.
        rest = left.unwrap_or(rest);
    }
    Choice::Own(sampler.draw(&rest, position, Stream::Target))
}

/// Nodes come after their parents.
fn children(proposal: &Proposal, node: Option<usize>) -> impl Iterator<Item = usize> + '_ {
    let first = node.map_or(0, |node| node + 1);
    (first..proposal.len()).filter(move |&child| proposal.parents[child] == node)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::SamplingParams;

    const FIRST: usize = 10;

    fn run(coupling: Coupling, proposal: &Proposal, rows: &[u32]) -> (Verdict, Vec<Option<usize>>) {
        let sampler = Sampler::new(SamplingParams::default(), coupling, vec![]);
        let mut asked = Vec::new();
        let target = |node: Option<usize>, prefix: &[u32]| {
            asked.push(node);
            Distribution::certain(rows[prefix.len()])
        };
        let verdict = verify(&sampler, proposal, target, FIRST);
        (verdict, asked)
    }

    fn chain(tokens: &[u32]) -> Proposal {
        let mut proposal = Proposal::default();
        tokens.iter().for_each(|&token| proposal.push(token, None));
        proposal
    }

    const COUPLINGS: [Coupling; 2] = [Coupling::Path(1), Coupling::Independent(1)];

    #[test]
    fn without_drafts_the_target_draws_one_token() {
        for coupling in COUPLINGS {
            let (verdict, asked) = run(coupling, &Proposal::default(), &[7]);
            assert_eq!((verdict.accepted(), verdict.token), (0, 7));
            assert_eq!(asked, [None]);
        }
    }

    #[test]
    fn rows_after_a_rejected_draft_are_not_asked_for() {
        for coupling in COUPLINGS {
            let (verdict, asked) = run(coupling, &chain(&[3, 9, 5]), &[3, 4, 5, 6]);
            assert_eq!((verdict.path, verdict.token), (vec![0], 4));
            assert_eq!(asked, [None, Some(0)]);
        }
    }

    #[test]
    fn a_token_beyond_the_targets_vocabulary_is_rejected_even_if_the_drafter_is_sure_of_it() {
        for coupling in COUPLINGS {
            let mut proposal = Proposal::default();
            proposal.push(200_000, Some(Distribution::certain(200_000)));
            assert_eq!(
                run(coupling, &proposal, &[3, 4]).0.tokens(&proposal).collect::<Vec<_>>(),
                [3]
            );
        }
    }

    #[test]
    fn a_token_that_the_drafter_could_not_have_drawn_does_no_harm() {
        for coupling in COUPLINGS {
            let mut proposal = Proposal::default();
            proposal.push(5, Some(Distribution::certain(6)));
            assert_eq!(run(coupling, &proposal, &[3, 4]).0.token, 3);
        }
    }
}
