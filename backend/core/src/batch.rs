//! What the scheduler hands to an executor for one step, and what comes back; and one level below,
//! the rows of a single forward pass. Data only: `scheduler` and `exec` share nothing else.

use crate::draft_source::{Branching, DraftLens, DraftSource};
use crate::pages::PageId;
use crate::sampling::Sampler;
use crate::sequence::{SequenceId, Shares};
use crate::{Error, Result};
use std::time::Duration;

/// One sequence's part in a step. The executor computes the rows `computed .. computed + chunk` of
/// the known tokens; when they reach the last known token it also drafts, verifies and samples.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Whose part it is: drafters key what they remember by it.
    pub id: SequenceId,
    /// All known tokens: the prompt, then what was generated.
    pub tokens: &'a [u32],
    /// How many of `tokens` are the prompt.
    pub prompt_len: usize,
    /// Tokens that it has when it ends, at most.
    pub max_len: usize,
    /// Positions whose target KV is valid.
    pub computed: usize,
    /// Known tokens to run through the target now, at least 1.
    pub chunk: usize,
    /// Positions whose drafter KV is valid.
    pub draft_computed: usize,
    /// Whether a model that drafts reads the sequence, in this step or another.
    pub is_read: bool,
    /// Whether the drafter keeps its cache in step with the target's.
    pub speculates: bool,
    /// Draft tokens to propose one behind the other at most, by who proposes them; 0 unless the chunk reaches the last known token.
    pub draft_lens: DraftLens,
    /// How a model's draft may branch: it has at most `width` times as many tokens as it is long.
    pub branching: Branching,
    /// Draft tokens that came with the request, to verify in place of a drafter's. `draft_lens` are 0
    /// where there are any.
    pub given: &'a [u32],
    /// A drafter goes on only while it holds its draft so far to be at least this likely; 0 is always.
    pub min_confidence: f32,
    /// The sequence's pages, in order, enough for `computed + chunk` positions and the drafts; and, where there are
    /// pages to spare, for as many positions more as the executor [looks ahead](Executor::lookahead).
    pub pages: &'a [PageId],
    /// So many rows of the chunk, the last ones but for that of the last known token, tell how likely the prompt's
    /// tokens behind them are: what the request wants to hear of them.
    pub prompt_rows: usize,
    /// Whose texts may be looked at for its drafts: those whose pages it may share.
    pub shares: Shares,
    /// How to turn logits into tokens.
    pub sampler: &'a Sampler,
}

impl Entry<'_> {
    /// Whether this step yields tokens for the sequence.
    pub(crate) fn samples(&self) -> bool {
        self.computed + self.chunk == self.tokens.len()
    }
}

/// A token and what is reported about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Emitted {
    /// The token.
    pub token: u32,
    /// Its log-probability in the target's own distribution, if asked for.
    pub logprob: Option<f32>,
    /// Its place among all tokens by that, 1 for the likeliest, if asked for.
    pub rank: Option<u32>,
    /// The most likely tokens and their log-probabilities, best first, as many as asked for.
    pub top_logprobs: Vec<(u32, f32)>,
}

/// What a step did for one entry.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// New tokens: the accepted drafts, then one of the target's own. Empty while prefilling.
    pub tokens: Vec<Emitted>,
    /// Draft tokens that were verified: as many as were asked for at most, or, if the step began before it was asked
    /// for, as in the step before.
    pub drafted: usize,
    /// How many of them, of all branches, follow each other at most.
    pub draft_depth: usize,
    /// How many of them were accepted.
    pub accepted: usize,
    /// Tokens of the prompt behind its `prompt_rows`, in order.
    pub prompt: Vec<Emitted>,
    /// Forward passes of a drafter model that they took.
    pub draft_passes: usize,
    /// Positions whose drafter KV is valid now; a drafter without a cache does not count them.
    pub draft_computed: usize,
}

/// A draft that was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drafted {
    pub source: DraftSource,
    /// Its tokens, in all branches; at least 1.
    pub tokens: usize,
    /// Tokens of its longest branch.
    pub len: usize,
    /// How many were accepted, of one branch.
    pub accepted: usize,
}

impl Outcome {
    /// What became of a drafter's draft, if there was one. A model takes passes, a look-up takes none. Not to
    /// be asked where drafts came with the request.
    pub(crate) fn draft(&self) -> Option<Drafted> {
        let source = match self.draft_passes {
            0 => DraftSource::Lookup,
            _ => DraftSource::Model,
        };
        let (tokens, len, accepted) = (self.drafted, self.draft_depth, self.accepted);
        (tokens > 0).then_some(Drafted { source, tokens, len, accepted })
    }
}

/// A step that was run to its end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stepped {
    /// One an entry, in order.
    pub outcomes: Vec<Outcome>,
    /// How long a step like it takes; none where this one says nothing about that: it came with preparations that no
    /// other needs, or did the work of more than one.
    pub cost: Option<Duration>,
    /// How long drafters took, where the host runs them: drafting, and taking in what became of the drafts. None where a
    /// GPU runs one inside of its step.
    pub drafting: Option<Duration>,
    /// Whether it drafted where it was asked to. A step that began before it was asked for drafts as the one before.
    pub as_asked: bool,
    /// Whether it had begun before it was asked for.
    pub ahead: bool,
}

impl Stepped {
    /// A step that did what it was asked for, from when that was on.
    pub(crate) fn as_asked(outcomes: Vec<Outcome>, cost: Option<Duration>) -> Self {
        Self { outcomes, cost, drafting: None, as_asked: true, ahead: false }
    }
}

/// How prompts that take many steps leave room to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongPrompts {
    /// Their rows in a step beside others. With fewer a step is hardly shorter.
    pub rows_beside_others: usize,
    /// Whether a step that computes nothing else can be given up for who comes, and may be as long as any for that reason.
    pub give_way: bool,
}

impl Default for LongPrompts {
    fn default() -> Self {
        Self { rows_beside_others: 128, give_way: false }
    }
}

/// Which positions of a prompt a device computes in blocks: many at a time, faster than others and with other bits. It
/// follows from the prompt's length alone, and so do the bits, since a row has its place in its block whatever else is
/// computed with it: a text depends neither on how prompts are cut into chunks nor on what is cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptBlocks {
    /// Positions of a block. Blocks begin at multiples of it.
    pub len: usize,
    /// A prompt's last block has at least so many positions; fewer are better computed as others are.
    pub least: usize,
}

impl PromptBlocks {
    /// The positions before this one are in blocks.
    pub fn end(&self, prompt_len: usize) -> usize {
        let rest = prompt_len % self.len;
        if rest < self.least { prompt_len - rest } else { prompt_len }
    }

    /// Of the rows `first .. first + len` of a prompt those up to the last end of a block, if there is one, or all where
    /// they go on behind the last block. A block that is cut takes nearly as long as a whole one, and again for its
    /// rest.
    pub fn whole(&self, first: usize, len: usize, prompt_len: usize) -> usize {
        let (end, last) = (self.end(prompt_len), first + len);
        if last >= end { len } else { (last / self.len * self.len).saturating_sub(first) }
    }
}

/// Says whether what is being computed is no longer wanted.
pub type Unwanted<'a> = &'a dyn Fn() -> bool;

/// What is always wanted.
pub const WANTED: Unwanted<'static> = &|| false;

/// Runs whole speculative steps on a device.
pub trait Executor: Send {
    /// Draft, verify and accept for every entry. `None`: it was given up, since `unwanted` said so and this executor can;
    /// the same rows may be computed again.
    fn step(&mut self, entries: &[Entry<'_>], unwanted: Unwanted<'_>) -> Result<Option<Stepped>>;

    /// The sequence has left or lost its pages: drop whatever is remembered about it.
    fn forget(&mut self, id: SequenceId);

    /// How long prompts leave room to others.
    fn long_prompts(&self) -> LongPrompts {
        LongPrompts::default()
    }

    /// What of a prompt it computes in blocks, if anything.
    fn prompt_blocks(&self) -> Option<PromptBlocks> {
        None
    }

    /// Positions beyond a step's own that an executor writes to when it begins the next step before it has told of
    /// this one. What it writes there is behind whatever is valid.
    fn lookahead(&self) -> usize {
        0
    }
}

/// Consecutive rows of one sequence in a forward pass.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// One token a row.
    pub tokens: &'a [u32],
    /// Position of the first row; its KV goes to this slot of the sequence's pages.
    pub first_position: usize,
    /// The sequence's pages, in order, enough for every row.
    pub pages: &'a [PageId],
    /// How long the prompt is whose rows these are, where a device may compute it in [blocks](PromptBlocks); else 0.
    pub prompt_len: usize,
    /// The last `num_logits` rows get logits.
    pub num_logits: usize,
    /// The parents of the last `tree.len()` rows, if these are a tree of drafts: each another of these rows before it, or
    /// `None` for the row before the tree. A row attends to its ancestors and comes after its parent; its KV goes to the
    /// slot that it would have in a chain. Empty where every row follows the one before it.
    pub tree: &'a [Option<usize>],
}

/// Logits of a forward pass, rows in segment order.
#[derive(Clone, Debug, Default)]
pub struct Logits {
    /// Values in a row.
    pub vocab_size: usize,
    /// Row after row.
    pub values: Vec<f32>,
}

impl Logits {
    /// The logits of one row.
    pub fn row(&self, idx: usize) -> &[f32] {
        &self.values[idx * self.vocab_size..(idx + 1) * self.vocab_size]
    }
}

/// Runs ragged rows of one model: prefill chunks, decode rows and verify rows alike.
pub trait Forward: Send {
    /// Writes the rows' keys and values to their pages and returns the logits that were asked for.
    /// A row attends to every position of its sequence up to its own. Its result does not depend on
    /// the other segments, bit for bit.
    fn forward(&mut self, segments: &[Segment<'_>]) -> Result<Logits>;

    /// What of a prompt it computes in blocks, if anything.
    fn prompt_blocks(&self) -> Option<PromptBlocks> {
        None
    }

    /// Whether rows may be a tree; a model that cannot do that is given chains alone.
    fn takes_trees(&self) -> bool {
        false
    }

    /// Of the drafts that lie from `first_draft` on in the order of their tree, those of `path` continue their sequence:
    /// their KV moves to where it is looked for. Nothing has to move for a chain.
    fn keep(&mut self, pages: &[PageId], first_draft: usize, path: &[usize]) -> Result<()> {
        let _ = (pages, first_draft);
        assert!(path.iter().copied().eq(0..path.len()), "a branch of a tree: {path:?}");
        Ok(())
    }

    /// Has the passes from now on keep the residual stream of every row behind so many layers each; a model that cannot
    /// refuses to.
    fn tap(&mut self, layers: &[usize]) -> Result<()> {
        match layers {
            [] => Ok(()),
            _ => Err(Error::Unsupported(format!(
                "hidden states of layers {layers:?} on this device"
            ))),
        }
    }

    /// What was kept of the last pass: `[row][layer][hidden]`.
    fn taps(&mut self) -> Result<&[f32]> {
        Ok(&[])
    }

    /// Whether a pass can be given up.
    fn gives_up(&self) -> bool {
        false
    }

    /// As `forward`, given up between two layers once `unwanted` says so, if this model can: `None` then. What it has
    /// written for these rows is not valid.
    fn forward_unless(
        &mut self,
        segments: &[Segment<'_>],
        _unwanted: &dyn Fn() -> bool,
    ) -> Result<Option<Logits>> {
        self.forward(segments).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BLOCKS: PromptBlocks = PromptBlocks { len: 512, least: 129 };

    #[test]
    fn blocks_end_with_their_prompt_and_none_is_short() {
        let ends = [0, 1, 128, 129, 512, 513, 640, 641, 1025].map(|len| BLOCKS.end(len));
        assert_eq!(ends, [0, 0, 0, 129, 512, 512, 512, 641, 1024]);
    }

    proptest! {
        #[test]
        fn chunks_end_where_blocks_do_or_behind_them_all(
            prompt_len in 1usize..40, first in 0usize..40, len in 0usize..40,
            size in 1usize..9, least in 1usize..9,
        ) {
            let blocks = PromptBlocks { len: size, least: least.min(size) };
            let end = blocks.end(prompt_len);
            prop_assert!(end <= prompt_len);
            prop_assert!(end.is_multiple_of(size) || (end % size >= least && end == prompt_len));
            let whole = blocks.whole(first, len, prompt_len);
            prop_assert!(whole <= len);
            let last = first + whole;
            prop_assert!(whole == 0 || last >= end || last.is_multiple_of(size));
            // No block more would have fitted.
            prop_assert!(whole == len || len - whole < size || first + len < first / size * size + size);
        }
    }
}
