//! Drafts in the making, level by level: the tokens of each are drawn from the drafter's own distributions behind those
//! of the level before. One token a level is a chain.
//!
//! Where tokens are drawn, and how many, is settled before any of them is: by how likely the likeliest ones are, not by
//! which were drawn. Verification takes a token's distribution for what it was drawn from, and that would be another one
//! if the token had a say in whether it is proposed.

use super::Proposal;
use crate::batch::Entry;
use crate::draft_source::Branching;
use crate::sampling::{Context, Distribution, Stream, likeliest};

/// Drafts of the entries of a step.
pub(super) struct Trees(Vec<Tree>);

/// Of one entry.
#[derive(Clone, Debug, Default)]
struct Tree {
    /// How likely each node is held to be, all before it included; 1 where nobody asks.
    likelihood: Vec<f32>,
    /// Nodes of the last level behind which the next one is drawn.
    ends: Vec<Option<usize>>,
}

/// Rows that a drafter computes next for an entry: the last ones are those of the ends, which get logits.
pub(super) struct Rows {
    pub nodes: Vec<usize>,
    pub tokens: Vec<u32>,
    pub first_position: usize,
    pub num_logits: usize,
    /// The parents of all of them; empty where there is one row, behind a chain that has been computed.
    pub tree: Vec<Option<usize>>,
}

/// What may be drawn behind an end.
pub(super) struct Candidates {
    parent: Option<usize>,
    drawn_from: Distribution,
    /// How likely the end and its likeliest continuations are, those first.
    likelihood: Vec<f32>,
    /// The likeliest tokens, where the first of them is certain to be drawn.
    ranked: Vec<u32>,
}

impl Trees {
    pub(super) fn new(num_entries: usize) -> Self {
        Self(vec![Tree { ends: vec![None], ..Tree::default() }; num_entries])
    }

    /// Behind which nodes the entry with this number goes on: `None` is its last known token.
    pub(super) fn ends(&self, idx: usize) -> &[Option<usize>] {
        &self.0[idx].ends
    }

    /// Draws the entry's next level, of the row of logits of each of its ends.
    pub(super) fn draw<'a>(
        &mut self,
        idx: usize,
        entry: &Entry<'_>,
        proposal: &mut Proposal,
        logits: impl Fn(usize) -> &'a [f32],
    ) {
        let ends = 0..self.ends(idx).len();
        let candidates: Vec<Candidates> =
            ends.map(|end| self.candidates(idx, entry, proposal, end, logits(end))).collect();
        self.grow(idx, entry, &candidates, proposal);
    }

    /// What may be drawn behind one of the entry's ends, whose row these logits are.
    pub(super) fn candidates(
        &self,
        idx: usize,
        entry: &Entry<'_>,
        proposal: &Proposal,
        end: usize,
        logits: &[f32],
    ) -> Candidates {
        let Tree { likelihood, ends } = &self.0[idx];
        let parent = ends[end];
        let drafted = proposal.tokens_to(parent);
        let (sampler, width) = (entry.sampler, entry.branching.width);
        let context =
            Context { tokens: entry.tokens, prompt_len: entry.prompt_len, drafted: &drafted };
        let before = parent.map_or(1.0, |node| likelihood[node]);
        let shares = match width > 1 || entry.min_confidence > 0.0 {
            true => likeliest(logits, width),
            false => vec![1.0],
        };
        Candidates {
            parent,
            drawn_from: sampler.distribution(logits, context),
            // Of what is no number nothing is expected.
            likelihood: shares.into_iter().map(|share| (before * share).max(0.0)).collect(),
            ranked: match width > 1 && sampler.params().is_greedy() {
                true => sampler.ranked(logits, context, width),
                false => Vec::new(),
            },
        }
    }

    /// Draws the entry's next level, of what may be drawn behind each of its ends.
    pub(super) fn grow(
        &mut self,
        idx: usize,
        entry: &Entry<'_>,
        candidates: &[Candidates],
        proposal: &mut Proposal,
    ) {
        let tree = &mut self.0[idx];
        let counts = tree.counts(candidates, entry);
        tree.ends.clear();
        for (candidates, count) in candidates.iter().zip(counts) {
            tree.draw(entry, candidates, count, proposal);
        }
        tree.give_up(entry.branching.max_tokens, proposal);
        proposal.passes += 1;
    }

    /// Whether one more level is to be drawn, and behind which nodes.
    pub(super) fn goes_on(&mut self, idx: usize, entry: &Entry<'_>, proposal: &Proposal) -> bool {
        self.0[idx].leave_ends_with_room(entry.branching.max_tokens);
        let Tree { likelihood, ends } = &mut self.0[idx];
        let of = |end: &Option<usize>| end.map_or(1.0, |node| likelihood[node]);
        let best = ends.iter().map(of).fold(0.0, f32::max);
        // In a level of one token that one is asked about by its pass alone.
        if ends.len() > 1 {
            let least = entry.branching.min_likelihood;
            ends.retain(|end| of(end) >= least || of(end) == best);
        }
        let goes_on = proposal.passes < entry.draft_lens.model && best >= entry.min_confidence;
        goes_on && !ends.is_empty()
    }

    /// Leaves of the drawn tree as many tokens as the entry may have, the likeliest ones, and puts the likeliest branch where a
    /// chain would lie.
    ///
    /// Whether a token stays depends on itself as little as on what is drawn after it and its siblings: only what those before it
    /// have behind them may be held to be likelier.
    pub(super) fn finish(&self, idx: usize, entry: &Entry<'_>, proposal: &mut Proposal) {
        if let Some(nodes) = self.0[idx].likeliest(entry.branching.max_tokens) {
            proposal.keep(&nodes);
        }
        proposal.put_first_branch_first();
    }

    /// The rows behind which the next level is drawn, and of a tree all that they attend to: a chain's have been computed.
    pub(super) fn rows(&self, idx: usize, entry: &Entry<'_>, proposal: &Proposal) -> Rows {
        let Tree { ends, .. } = &self.0[idx];
        let first_position = entry.tokens.len();
        let ends: Vec<usize> = ends.iter().copied().flatten().collect();
        if proposal.is_chain() {
            let tokens = ends.iter().map(|&end| proposal.tokens[end]).collect();
            let first_position = first_position + proposal.len() - 1;
            return Rows {
                num_logits: ends.len(),
                nodes: ends,
                tokens,
                first_position,
                tree: Vec::new(),
            };
        }
        let mut is_inner = vec![false; proposal.len()];
        for &end in &ends {
            proposal.path(Some(end)).for_each(|node| is_inner[node] = true);
        }
        let nodes: Vec<usize> = (0..proposal.len()).filter(|&node| is_inner[node]).collect();
        let row = |node: usize| nodes.binary_search(&node).ok();
        Rows {
            tokens: nodes.iter().map(|&node| proposal.tokens[node]).collect(),
            first_position,
            num_logits: ends.len(),
            tree: nodes.iter().map(|&node| proposal.parents[node].and_then(row)).collect(),
            nodes,
        }
    }
}

/// Draws all levels of those entries where the rows of logits are there already, one a position: what is said behind one
/// draft is said behind all of its position. It took one pass.
pub(super) fn draw_at_once(
    drafting: &[usize],
    entries: &[Entry<'_>],
    mut logits: impl FnMut(usize) -> Vec<f32>,
    proposals: &mut [Proposal],
) {
    let mut trees = Trees::new(entries.len());
    let mut first_row = 0;
    for &idx in drafting {
        let (entry, proposal) = (&entries[idx], &mut proposals[idx]);
        let rows = first_row..first_row + entry.draft_lens.model;
        first_row = rows.end;
        for row in rows {
            let logits = logits(row);
            trees.draw(idx, entry, proposal, |_| &logits);
            if !trees.goes_on(idx, entry, proposal) {
                break;
            }
        }
        proposal.passes = 1;
        trees.finish(idx, entry, proposal);
    }
}

impl Tree {
    /// Its likeliest nodes, in order, if it has more than so many. A node's parent is among them: none is likelier than that, and of
    /// those that are alike it comes first.
    fn likeliest(&self, most: usize) -> Option<Vec<usize>> {
        let likelihood = &self.likelihood;
        if likelihood.len() <= most {
            return None;
        }
        let mut nodes: Vec<usize> = (0..likelihood.len()).collect();
        nodes.sort_by(|&a, &b| likelihood[b].total_cmp(&likelihood[a]));
        nodes.truncate(most);
        nodes.sort_unstable();
        Some(nodes)
    }

    /// Forgets what nodes were drawn from that will not be among the likeliest: a table of the vocabulary each.
    fn give_up(&self, most: usize, proposal: &mut Proposal) {
        let Some(nodes) = self.likeliest(most) else { return };
        for (node, q) in proposal.q.iter_mut().enumerate() {
            if nodes.binary_search(&node).is_err() {
                *q = None;
            }
        }
    }

    /// How many tokens are drawn behind each end: of all continuations the likeliest, as many as a level may have, those left
    /// out that are not worth a row, but for the very likeliest, which the pass was for; and those that as many nodes are
    /// likelier than as the whole draft may have.
    fn counts(&self, candidates: &[Candidates], entry: &Entry<'_>) -> Vec<usize> {
        let mut all: Vec<(f32, usize)> = Vec::new();
        for (end, candidates) in candidates.iter().enumerate() {
            all.extend(candidates.likelihood.iter().map(|&likelihood| (likelihood, end)));
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let Branching { width, max_tokens, min_likelihood } = entry.branching;
        let mut counts = vec![0; candidates.len()];
        for (nth, &(likelihood, end)) in all.iter().take(width).enumerate() {
            let before = self.likelihood.iter().filter(|node| **node >= likelihood).count();
            let has_place = before + nth < max_tokens;
            if has_place && (nth == 0 || likelihood >= min_likelihood) {
                counts[end] += 1;
            }
        }
        counts
    }

    /// Goes on behind those ends alone behind which a node may be among the likeliest in the end: for others a drafter has no
    /// room.
    fn leave_ends_with_room(&mut self, most: usize) {
        if let Some(nodes) = self.likeliest(most - 1) {
            self.ends.retain(|end| end.is_none_or(|node| nodes.binary_search(&node).is_ok()));
        }
    }

    /// Draws so many different tokens behind an end.
    fn draw(
        &mut self,
        entry: &Entry<'_>,
        from: &Candidates,
        count: usize,
        proposal: &mut Proposal,
    ) {
        let (sampler, parent) = (entry.sampler, from.parent);
        let depth = proposal.path(parent).count();
        let mut left = Some(from.drawn_from.clone());
        let mut ranked = from.ranked.iter().copied();
        let mut first = None;
        for (nth, &likelihood) in from.likelihood[..count].iter().enumerate() {
            let (token, q) = match left {
                Some(q) => {
                    let stream = Stream::Draft { depth, place: self.ends.len() };
                    let token = sampler.draw(&q, entry.tokens.len() + depth, stream);
                    left = if nth + 1 < count { q.without(token) } else { None };
                    first = first.or(Some(token));
                    (token, Some(q))
                }
                // All was on the first one: these are not drawn.
                None => match ranked.find(|&token| Some(token) != first) {
                    Some(token) => (token, None),
                    None => return,
                },
            };
            self.ends.push(Some(proposal.hang(parent, token, q)));
            self.likelihood.push(likelihood);
        }
    }
}

#[cfg(test)]
mod tests;
