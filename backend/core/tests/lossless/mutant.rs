//! Verification rules that are wrong, some of them shipped elsewhere. The tests must notice each.

use crate::game::uniform;
use spec_core::testing::draft::Proposal;
use spec_core::testing::sampling::{Coupling, Distribution, Sampler};
use spec_core::testing::verify::Verdict;

type Target<'a> = &'a mut dyn FnMut(Option<usize>, &[u32]) -> Distribution;

/// Decides on one draft: kept, or the token that ends the step instead.
type Judge = fn(
    p: &Distribution,
    q: &Distribution,
    draft: u32,
    random: &mut dyn FnMut() -> f64,
) -> Option<u32>;

/// Walks a chain with a judge of each draft.
fn walk(
    sampler: &Sampler,
    proposal: &Proposal,
    target: Target<'_>,
    position: usize,
    judge: Judge,
) -> Verdict {
    let mut random = coins(sampler, position);
    for node in 0..=proposal.len() {
        let p = target(node.checked_sub(1), &proposal.tokens[..node]);
        let own = if node == proposal.len() {
            Some(draw(&p, random()))
        } else {
            let token = proposal.tokens[node];
            let given = Distribution::certain(token);
            judge(&p, proposal.q[node].as_ref().unwrap_or(&given), token, &mut random)
        };
        if let Some(token) = own {
            return Verdict { path: (0..node).collect(), token };
        }
    }
    unreachable!("the last node always ends the walk")
}

/// Random numbers of a step.
fn coins(sampler: &Sampler, position: usize) -> impl FnMut() -> f64 {
    let (Coupling::Independent(key) | Coupling::Path(key)) = sampler.coupling();
    let mut state = key.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ (position as u64) << 32;
    move || {
        state = state.wrapping_add(1);
        uniform(state)
    }
}

fn draw(dist: &Distribution, mut u: f64) -> u32 {
    let mut last = 0;
    for (token, prob) in dist.iter() {
        last = token;
        u -= prob;
        if u < 0.0 {
            break;
        }
    }
    last
}

/// The right rule, from the textbook: shows that the walk itself is sound.
pub(crate) fn textbook(
    sampler: &Sampler,
    proposal: &Proposal,
    target: Target<'_>,
    position: usize,
) -> Verdict {
    walk(sampler, proposal, target, position, |p, q, draft, random| {
        let keep = random() < p.prob(draft) / q.prob(draft);
        (!keep).then(|| draw_of_rest(p, q, random()))
    })
}

/// Draws of what `p` has more than `q`.
fn draw_of_rest(p: &Distribution, q: &Distribution, u: f64) -> u32 {
    let left: Vec<_> =
        p.iter().map(|(token, prob)| (token, (prob - q.prob(token)).max(0.0))).collect();
    let mut u = u * left.iter().map(|(_, prob)| prob).sum::<f64>();
    let found = left.iter().find(|(_, prob)| {
        u -= prob;
        u < 0.0
    });
    found.map_or(left[0].0, |(token, _)| *token)
}

/// Judges each of several siblings as if none had been rejected before it.
pub(crate) fn siblings_without_residual(
    sampler: &Sampler,
    proposal: &Proposal,
    target: Target<'_>,
    position: usize,
) -> Verdict {
    let mut random = coins(sampler, position);
    let p = target(None, &[]);
    let of = |node: usize| proposal.q[node].as_ref().expect("it was drawn");
    for node in 0..proposal.len() {
        let token = proposal.tokens[node];
        if random() < p.prob(token) / of(node).prob(token) {
            let next = target(Some(node), &[token]);
            return Verdict { path: vec![node], token: draw(&next, random()) };
        }
    }
    Verdict { path: vec![], token: draw_of_rest(&p, of(proposal.len() - 1), random()) }
}

/// After a rejection, draws from p again.
pub(crate) fn no_residual(
    sampler: &Sampler,
    proposal: &Proposal,
    target: Target<'_>,
    position: usize,
) -> Verdict {
    walk(sampler, proposal, target, position, |p, q, draft, random| {
        let keep = random() < p.prob(draft) / q.prob(draft);
        (!keep).then(|| draw(p, random()))
    })
}

/// Keeps whatever is proposed.
pub(crate) fn accept_always(
    sampler: &Sampler,
    proposal: &Proposal,
    target: Target<'_>,
    position: usize,
) -> Verdict {
    walk(sampler, proposal, target, position, |_, _, _, _| None)
}

/// Inverts the ratio.
pub(crate) fn inverted_ratio(
    sampler: &Sampler,
    proposal: &Proposal,
    target: Target<'_>,
    position: usize,
) -> Verdict {
    walk(sampler, proposal, target, position, |p, q, draft, random| {
        let keep = random() < q.prob(draft) / p.prob(draft);
        (!keep).then(|| draw(p, random()))
    })
}

/// OpenVINO GenAI's: compares the draft's probability with that of a token sampled from the target, against a
/// coin of whole percents, and keeps that token on rejection.
pub(crate) fn openvino(
    sampler: &Sampler,
    proposal: &Proposal,
    target: Target<'_>,
    position: usize,
) -> Verdict {
    walk(sampler, proposal, target, position, |p, q, draft, random| {
        let sampled = draw(p, random());
        let coin = (random() * 101.0).floor() / 100.0;
        let keep = sampled == draft || coin <= q.prob(draft) / p.prob(sampled);
        (!keep).then_some(sampled)
    })
}
