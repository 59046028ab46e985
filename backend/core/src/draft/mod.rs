//! Where draft tokens come from: the interface and its implementations.

mod combined;
mod model;
mod ngram;

pub use combined::Combined;
pub use model::Model;
pub use ngram::Ngram;

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
}

impl Proposal {
    /// Adds the next node of a chain.
    pub fn push(&mut self, token: u32, q: Option<Distribution>) {
        self.parents.push(self.tokens.len().checked_sub(1));
        self.tokens.push(token);
        self.q.push(q);
    }

    /// Adds a node that the drafter did not draw.
    pub fn hang(&mut self, parent: Option<usize>, token: u32) -> usize {
        self.parents.push(parent);
        self.tokens.push(token);
        self.q.push(None);
        self.len() - 1
    }

    /// Whether every node hangs from the one before it.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().enumerate().all(|(node, parent)| *parent == node.checked_sub(1))
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

/// A source of draft tokens.
pub trait Drafter: Send {
    /// Brings the drafter's state up to each entry's chunk and proposes up to `draft_len` tokens for
    /// each; one proposal an entry, in order, empty where `draft_len` is 0 or nothing is worth proposing.
    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>>;

    /// Positions whose drafter state is valid after a step in which `accepted` drafts were kept.
    fn computed_after(&self, entry: &Entry<'_>, proposed: usize, accepted: usize) -> usize;

    /// Forward passes of a model that the entry's proposal took.
    fn passes(&self, entry: &Entry<'_>, proposed: usize) -> usize;

    /// The sequence has left or lost its pages.
    fn forget(&mut self, id: SequenceId);
}
