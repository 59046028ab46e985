//! Speculative steps with the decisions made on the host: the target and the drafter give logits,
//! the pure functions of `sampling` and `verify` do the rest.

use crate::batch::{
    Emitted, Entry, Executor, Forward, Logits, LongPrompts, Outcome, PromptBlocks, Segment,
    Stepped, Unwanted,
};
use crate::draft::{Drafter, KeptStates, Proposal, Verified};
use crate::sampling::{self, Context};
use crate::sequence::SequenceId;
use crate::verify::verify;
use crate::{Error, Result};
use std::time::Instant;

/// Bytes a token of the vocabulary for turning one row of logits into a distribution: scores, their order, weights.
const SAMPLING_BYTES: usize = 24;

/// Rows of a long prompt in a step beside others on a CPU: about as many as take as long as to read the weights.
const ROWS_BESIDE_OTHERS: usize = 16;

/// How large steps may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepBounds {
    /// Rows of the target.
    pub rows: usize,
    pub sequences: usize,
    /// Drafts of a sequence.
    pub drafts: usize,
    /// Tokens that the target knows.
    pub vocab_size: usize,
    /// Tokens that a model that drafts knows; 0 without one.
    pub draft_vocab: usize,
}

/// An executor over any target and drafter.
pub struct Host {
    target: Box<dyn Forward>,
    drafter: Option<Box<dyn Drafter>>,
}

impl Host {
    /// Without a drafter every step is a plain one.
    pub fn new(mut target: Box<dyn Forward>, drafter: Option<Box<dyn Drafter>>) -> Result<Self> {
        if let Some(drafter) = &drafter {
            target.tap(drafter.taps())?;
        }
        Ok(Self { target, drafter })
    }

    /// Bytes of the machine's memory that a step takes for a while at most, whatever the requests ask for: the logits of
    /// target and drafter and the distributions that drafts were drawn from.
    pub(crate) fn step_bytes(bounds: &StepBounds) -> usize {
        let StepBounds { rows, sequences, drafts, vocab_size, draft_vocab } = *bounds;
        let logits = |rows: usize, vocab_size: usize| rows * vocab_size * size_of::<f32>();
        let target = logits(rows.min(sequences * (drafts + 1)), vocab_size);
        let drafter = logits(rows.min(sequences * drafts.max(1)), draft_vocab);
        let drawn_from = logits(rows.min(sequences * drafts), draft_vocab);
        drawn_from + target.max(drafter) + SAMPLING_BYTES * vocab_size.max(draft_vocab)
    }

    /// The target's states that the drafter keeps, where it drafts from these.
    pub(crate) fn kept_states(&mut self) -> Option<KeptStates<'_>> {
        self.drafter.as_mut()?.kept_states()
    }

    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let mut proposals = match &mut self.drafter {
            Some(drafter) => drafter.propose(entries)?,
            None => vec![Proposal::default(); entries.len()],
        };
        for (entry, proposal) in entries.iter().zip(&mut proposals) {
            entry.given.iter().for_each(|&token| proposal.push(token, None));
        }
        if !self.target.takes_trees() && !proposals.iter().all(Proposal::is_chain) {
            return Err(Error::Unsupported("a tree of drafts on this device".into()));
        }
        Ok(proposals)
    }

    /// One pass of the target over every entry's chunk and, behind it, its draft.
    fn run_target(
        &mut self,
        entries: &[Entry<'_>],
        proposals: &[Proposal],
        unwanted: Unwanted<'_>,
    ) -> Result<Option<Logits>> {
        let rows: Vec<Vec<u32>> = entries.iter().zip(proposals).map(rows).collect();
        let segments: Vec<Segment<'_>> = entries
            .iter()
            .zip(proposals)
            .zip(&rows)
            .map(|((entry, proposal), tokens)| Segment {
                tokens,
                first_position: entry.computed,
                pages: entry.pages,
                prompt_len: entry.prompt_len,
                num_logits: num_logits(entry, proposal),
                tree: if proposal.is_chain() { &[] } else { &proposal.parents },
            })
            .collect();
        self.target.forward_unless(&segments, unwanted)
    }

    /// Tells the drafter what has become of its drafts.
    fn observe(
        &mut self,
        entries: &[Entry<'_>],
        proposals: &[Proposal],
        paths: &[Vec<usize>],
    ) -> Result<()> {
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        let num_rows = entries.iter().zip(proposals).map(|(entry, p)| entry.chunk + p.len());
        let taps = self.target.taps()?;
        let width = taps.len() / num_rows.sum::<usize>().max(1);
        let mut rest = taps.chunks_exact(width.max(1));
        let mut verified = Vec::with_capacity(entries.len());
        for ((entry, proposal), path) in entries.iter().zip(proposals).zip(paths) {
            let own: Vec<&[f32]> = rest.by_ref().take(entry.chunk + proposal.len()).collect();
            let valid = (0..entry.chunk).chain(path.iter().map(|node| entry.chunk + node));
            verified.push(Verified {
                entry,
                accepted: path.iter().map(|&node| proposal.tokens[node]).collect(),
                taps: valid.filter_map(|row| own.get(row).copied()).collect(),
            });
        }
        drafter.observe(&verified)
    }
}

impl Executor for Host {
    fn step(&mut self, entries: &[Entry<'_>], unwanted: Unwanted<'_>) -> Result<Option<Stepped>> {
        let start = Instant::now();
        let proposals = self.propose(entries)?;
        let proposing = start.elapsed();
        let Some(logits) = self.run_target(entries, &proposals, unwanted)? else {
            return Ok(None);
        };
        let mut first_row = 0;
        let mut outcomes = Vec::with_capacity(entries.len());
        let mut paths = Vec::with_capacity(entries.len());
        for (entry, proposal) in entries.iter().zip(&proposals) {
            let (outcome, path) = accept(entry, proposal, &logits, first_row);
            first_row += num_logits(entry, proposal);
            outcomes.push(outcome);
            self.target.keep(entry.pages, entry.tokens.len(), &path)?;
            paths.push(path);
        }
        let verified = start.elapsed();
        self.observe(entries, &proposals, &paths)?;
        let all = start.elapsed();
        let drafting = self.drafter.as_ref().map(|_| proposing + (all - verified));
        Ok(Some(Stepped { drafting, ..Stepped::as_asked(outcomes, Some(all)) }))
    }

    fn long_prompts(&self) -> LongPrompts {
        LongPrompts { rows_beside_others: ROWS_BESIDE_OTHERS, give_way: self.target.gives_up() }
    }

    fn prompt_blocks(&self) -> Option<PromptBlocks> {
        self.target.prompt_blocks()
    }

    fn forget(&mut self, id: SequenceId) {
        if let Some(drafter) = &mut self.drafter {
            drafter.forget(id);
        }
    }
}

/// The tokens of an entry's rows.
fn rows((entry, proposal): (&Entry<'_>, &Proposal)) -> Vec<u32> {
    let known = &entry.tokens[entry.computed..entry.computed + entry.chunk];
    [known, &proposal.tokens].concat()
}

/// Those that tell of the prompt; then the last known token's row and one a draft, once the chunk reaches it.
fn num_logits(entry: &Entry<'_>, proposal: &Proposal) -> usize {
    entry.prompt_rows + if entry.samples() { 1 + proposal.len() } else { 0 }
}

/// Settles an entry's new tokens from its rows of logits, and the drafts that were kept.
fn accept(
    entry: &Entry<'_>,
    proposal: &Proposal,
    logits: &Logits,
    first_row: usize,
) -> (Outcome, Vec<usize>) {
    let prompt = report_prompt(entry, logits, first_row);
    if !entry.samples() {
        let draft_computed = draft_computed(entry, proposal, 0);
        return (Outcome { prompt, draft_computed, ..Outcome::default() }, Vec::new());
    }
    let first_row = first_row + entry.prompt_rows;
    let row = |node: Option<usize>| logits.row(first_row + node.map_or(0, |node| node + 1));
    let target = |node, drafted: &[u32]| {
        let context = Context { tokens: entry.tokens, prompt_len: entry.prompt_len, drafted };
        entry.sampler.distribution(row(node), context)
    };
    let verdict = verify(entry.sampler, proposal, target, entry.tokens.len());
    let params = entry.sampler.params();
    let nodes = std::iter::once(None).chain(verdict.path.iter().map(|&node| Some(node)));
    let tokens = nodes.zip(verdict.tokens(proposal));
    let outcome = Outcome {
        tokens: tokens.map(|(node, token)| report(params.logprobs, token, row(node))).collect(),
        drafted: proposal.len(),
        draft_depth: proposal.depth(),
        accepted: verdict.accepted(),
        prompt,
        draft_passes: proposal.passes,
        draft_computed: draft_computed(entry, proposal, verdict.accepted()),
    };
    (outcome, verdict.path)
}

/// Positions that the drafter's cache has once `accepted` drafts were kept: no others where it has computed nothing.
fn draft_computed(entry: &Entry<'_>, proposal: &Proposal, accepted: usize) -> usize {
    proposal.cached.map_or(entry.draft_computed, |cached| cached.after(accepted))
}

/// The prompt's tokens behind the rows that tell of them.
fn report_prompt(entry: &Entry<'_>, logits: &Logits, first_row: usize) -> Vec<Emitted> {
    // Behind the chunk's last row comes the next known token, or else one that is not known yet.
    let end = entry.computed + entry.chunk + 1 - usize::from(entry.samples());
    let tokens = &entry.tokens[end - entry.prompt_rows..end];
    let num_top = entry.sampler.params().prompt_logprobs;
    let told = tokens.iter().enumerate();
    told.map(|(idx, &token)| report(num_top, token, logits.row(first_row + idx))).collect()
}

/// A token with the log-probabilities that were asked for.
fn report(num_top: Option<usize>, token: u32, logits: &[f32]) -> Emitted {
    match num_top {
        Some(num_top) => {
            let (logprob, top_logprobs) = sampling::report(logits, token, num_top);
            let rank = Some(sampling::rank(logits, token));
            Emitted { token, logprob: Some(logprob), rank, top_logprobs }
        }
        None => Emitted { token, logprob: None, rank: None, top_logprobs: Vec::new() },
    }
}
