//! Where draft tokens come from: the interface and its implementations.
//!
//! A step asks for drafts before the target's pass ([`Drafter::propose`]) and says afterwards what has become of them
//! ([`Drafter::observe`]), with the target's hidden states, if the drafter taps them.

pub(crate) mod catch_up;
mod combined;
mod corpus;
mod eagle;
mod head_states;
mod kept_states;
mod last_states;
mod medusa;
mod model;
mod ngram;
mod spread;
mod suffix;
mod text;
mod tree;
mod watch;

pub(crate) use catch_up::Cached;
pub(crate) use combined::{Combined, ask_first};
pub use eagle::{Eagle, Head, HeadPass, HeadSegment, MaskRow};
pub use head_states::HeadStates;
pub(crate) use kept_states::KeptStates;
pub use medusa::{Heads, Medusa};
pub use model::Model;
pub use ngram::Ngram;
pub use suffix::Suffix;
pub use watch::{OnStates, Watch};

use crate::Result;
use crate::batch::Entry;
use crate::sampling::Distribution;
use crate::sequence::SequenceId;

/// Draft tokens for one sequence, as a tree in topological order. A chain is a tree in which node
/// `i` hangs from node `i - 1`.
#[derive(Clone, Debug, Default)]
pub struct Proposal {
    /// One token a node.
    pub tokens: Vec<u32>,
    /// Parent of each node, `None` for children of the last known token; always an earlier node.
    pub parents: Vec<Option<usize>>,
    /// The distribution each token was drawn from; `None` where the drafter did not draw (one-hot).
    pub q: Vec<Option<Distribution>>,
    /// Forward passes of a model that it took.
    pub passes: usize,
    /// What the drafter's own KV cache has now; `None` where nothing was computed.
    pub(crate) cached: Option<Cached>,
}

impl Proposal {
    /// Adds the next node of a chain.
    pub fn push(&mut self, token: u32, q: Option<Distribution>) {
        self.parents.push(self.tokens.len().checked_sub(1));
        self.tokens.push(token);
        self.q.push(q);
    }

    /// Adds a node behind another one, or behind the last known token; gives its number.
    pub(crate) fn hang(
        &mut self,
        parent: Option<usize>,
        token: u32,
        q: Option<Distribution>,
    ) -> usize {
        self.parents.push(parent);
        self.tokens.push(token);
        self.q.push(q);
        self.len() - 1
    }

    /// A node and those that it hangs from, up to the root.
    pub(crate) fn path(&self, node: Option<usize>) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(node, |&node| self.parents[node])
    }

    /// The tokens from the root to a node.
    pub(crate) fn tokens_to(&self, node: Option<usize>) -> Vec<u32> {
        let mut tokens: Vec<u32> = self.path(node).map(|node| self.tokens[node]).collect();
        tokens.reverse();
        tokens
    }

    /// Leaves out all nodes but these, which are in order and have their parents among them.
    pub(crate) fn keep(&mut self, nodes: &[usize]) {
        let Self { tokens, parents, mut q, passes, cached } = std::mem::take(self);
        (self.passes, self.cached) = (passes, cached);
        let mut new_number = vec![0; tokens.len()];
        for &node in nodes {
            let parent = parents[node].map(|parent| new_number[parent]);
            new_number[node] = self.hang(parent, tokens[node], q[node].take());
        }
    }

    /// Puts every node's first child right behind it, so that the likeliest branch lies where a chain would. Siblings stay in
    /// the order in which they were drawn.
    pub(crate) fn put_first_branch_first(&mut self) {
        let mut children = vec![Vec::new(); self.len() + 1];
        for (node, parent) in self.parents.iter().enumerate() {
            children[parent.map_or(0, |parent| parent + 1)].push(node);
        }
        let Self { tokens, parents, mut q, passes, cached } = std::mem::take(self);
        (self.passes, self.cached) = (passes, cached);
        let mut new_number = vec![0; tokens.len()];
        let mut open: Vec<usize> = children[0].iter().rev().copied().collect();
        while let Some(node) = open.pop() {
            let parent = parents[node].map(|parent| new_number[parent]);
            new_number[node] = self.hang(parent, tokens[node], q[node].take());
            open.extend(children[node + 1].iter().rev());
        }
    }

    /// Whether every node hangs from the one before it.
    pub(crate) fn is_chain(&self) -> bool {
        self.parents.iter().enumerate().all(|(node, parent)| *parent == node.checked_sub(1))
    }

    /// Nodes of the longest branch.
    pub(crate) fn depth(&self) -> usize {
        let mut depths: Vec<usize> = Vec::with_capacity(self.len());
        for parent in &self.parents {
            depths.push(1 + parent.map_or(0, |parent| depths[parent]));
        }
        depths.into_iter().max().unwrap_or(0)
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether nothing is proposed.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// What a step has computed of a sequence, told to whom may draft for it.
#[derive(Clone, Debug)]
pub struct Verified<'a> {
    /// The sequence as it was before the step.
    pub entry: &'a Entry<'a>,
    /// The drafts that were kept, from the first on.
    pub accepted: Vec<u32>,
    /// Hidden states of each position that is valid since: of the chunk's, then of the kept drafts'. One layer after the
    /// other, as [`Drafter::taps`] names them; nothing without any.
    pub taps: Vec<&'a [f32]>,
}

/// A source of draft tokens.
pub trait Drafter: Send {
    /// The layers of the target whose hidden states it wants: of k the residual stream behind k layers.
    fn taps(&self) -> &[usize] {
        &[]
    }

    /// Brings the drafter's state up to each entry's chunk and proposes branches of up to as many tokens for each
    /// as `draft_lens` has for its kind; one proposal an entry, in order, empty where that is 0 or nothing is worth
    /// proposing.
    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>>;

    /// Takes in what the target has computed in a step, of every sequence that took part.
    fn observe(&mut self, verified: &[Verified<'_>]) -> Result<()> {
        let _ = verified;
        Ok(())
    }

    /// The target's states that it keeps, where it drafts from these: an executor may run it by itself.
    fn kept_states(&mut self) -> Option<KeptStates<'_>> {
        None
    }

    /// The sequence has left or lost its pages.
    fn forget(&mut self, id: SequenceId);
}
