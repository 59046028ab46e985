//! The reference: the host's own executor over scripted models.

use crate::world::{Model, Sequence, World};
use spec_core::Result;
use spec_core::runtime::SequenceId;
use spec_core::testing::batch::{
    DraftLens, Entry, Executor, Forward, Logits, Outcome, Segment, WANTED,
};
use spec_core::testing::cuda::step::{Branched, Fork};
use spec_core::testing::draft::{self, Drafter, Proposal};
use spec_core::testing::sampling::{Context, Stream};
use spec_core::testing::{Host, PageId};

/// A model that remembers what it was fed, by position.
struct Scripted {
    model: Model,
    vocab: usize,
    fed: Vec<Vec<u32>>,
}

impl Forward for Scripted {
    fn forward(&mut self, segments: &[Segment<'_>]) -> Result<Logits> {
        let mut logits = Logits { vocab_size: self.vocab, values: Vec::new() };
        for segment in segments {
            let sequence = segment.pages[0] as usize;
            let fed = &mut self.fed[sequence];
            fed.truncate(segment.first_position);
            assert_eq!(fed.len(), segment.first_position, "a gap in the cache");
            for (idx, &token) in segment.tokens.iter().enumerate() {
                fed.push(token);
                if idx + segment.num_logits >= segment.tokens.len() {
                    logits.values.extend((self.model)(sequence, fed));
                }
            }
        }
        Ok(logits)
    }
}

/// A drafter whose drafts may fork: at one of them another of its choices is taken than the best.
struct Branching {
    inner: draft::Model,
    world: World,
    sequences: Vec<Sequence>,
}

impl Branching {
    /// What the entry's drafts are, so many of them, behind some that are made.
    fn behind(&mut self, entry: &Entry<'_>, made: &[u32], model: usize) -> Result<Vec<u32>> {
        if model == 0 {
            return Ok(Vec::new());
        }
        let tokens = [entry.tokens, made].concat();
        let draft_lens = DraftLens { lookup: 0, model };
        let chunk = entry.chunk + made.len();
        let longer = Entry { tokens: &tokens, chunk, draft_lens, ..*entry };
        Ok(self.inner.propose(&[longer])?.remove(0).tokens)
    }

    /// The token that `rank` others are better than, behind drafts that are made.
    fn choice(&self, entry: &Entry<'_>, made: &[u32], rank: usize) -> Option<u32> {
        let (sampler, vocab) = (entry.sampler, self.world.shared_vocab());
        let tokens = [entry.tokens, made].concat();
        let seen: Vec<u32> = tokens.iter().map(|token| readable(&self.world, token)).collect();
        let mut logits = (self.world.drafter)(entry.id as usize, &seen);
        logits.truncate(vocab);
        let prompt_len = entry.prompt_len;
        let context = Context { tokens: entry.tokens, prompt_len, drafted: made };
        let mut left = Some(sampler.distribution(&logits, context));
        let mut chosen = None;
        for nth in 0..=rank {
            let Some(q) = left else {
                // All was on the one before.
                let ranked = sampler.ranked(&logits, context, rank + 1);
                return ranked.get(rank).copied().filter(|_| sampler.params().is_greedy());
            };
            let stream = Stream::Draft { depth: made.len(), place: nth };
            let token = sampler.draw(&q, tokens.len(), stream);
            chosen = Some(token);
            left = q.without(token);
        }
        chosen
    }

    fn forked(&mut self, entry: &Entry<'_>, fork: Fork) -> Result<Vec<u32>> {
        let len = entry.draft_lens.model;
        let mut drafts = self.behind(entry, &[], fork.depth.min(len))?;
        if drafts.len() < fork.depth || fork.depth == len {
            return Ok(drafts);
        }
        if let Some(token) = self.choice(entry, &drafts, fork.rank) {
            drafts.push(token);
            let rest = self.behind(entry, &drafts, len - drafts.len())?;
            drafts.extend(rest);
        }
        Ok(drafts)
    }
}

impl Drafter for Branching {
    fn propose(&mut self, entries: &[Entry<'_>]) -> Result<Vec<Proposal>> {
        let propose = |entry: &Entry<'_>| {
            let fork = match self.sequences[entry.id as usize].branch {
                Branched::From(fork) if entry.draft_lens.model > 0 => fork,
                _ => return Ok(self.inner.propose(&[*entry])?.remove(0)),
            };
            let mut proposal = Proposal::default();
            self.forked(entry, fork)?.into_iter().for_each(|token| proposal.push(token, None));
            Ok(proposal)
        };
        entries.iter().map(propose).collect()
    }

    fn forget(&mut self, id: SequenceId) {
        self.inner.forget(id);
    }
}

fn readable(world: &World, &token: &u32) -> u32 {
    if (token as usize) < world.shared_vocab() { token } else { 0 }
}

/// What target and drafter have seen of each sequence before a step.
pub(crate) fn fed(world: &World, sequences: &[Sequence]) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let each = |sequence: &Sequence| {
        let (target, _) = sequence.tokens.split_at(sequence.tokens.len() - 1);
        let drafter = &sequence.tokens[..sequence.draft_computed];
        (target.to_vec(), drafter.iter().map(|token| readable(world, token)).collect())
    };
    sequences.iter().map(each).unzip()
}

/// One step of all sequences.
pub(crate) fn step(world: &World, sequences: &[Sequence]) -> Vec<Outcome> {
    let (fed_target, fed_drafter) = fed(world, sequences);
    let target =
        Scripted { model: world.target.clone(), vocab: world.target_vocab, fed: fed_target };
    let drafter =
        Scripted { model: world.drafter.clone(), vocab: world.drafter_vocab, fed: fed_drafter };
    let inner = draft::Model::new(Box::new(drafter), world.shared_vocab()).at_once(world.mask);
    let drafter = Branching { inner, world: world.clone(), sequences: sequences.to_vec() };
    let mut host = Host::new(Box::new(target), Some(Box::new(drafter))).unwrap();
    let pages: Vec<[PageId; 1]> = (0..sequences.len()).map(|idx| [idx as PageId]).collect();
    let entries: Vec<_> = sequences
        .iter()
        .zip(&pages)
        .enumerate()
        .map(|(idx, (sequence, pages))| {
            let mut entry = sequence.entry(idx);
            entry.pages = pages;
            entry.draft_lens.model = entry.draft_lens.model.min(world.max_drafts);
            entry
        })
        .collect();
    host.step(&entries, WANTED).unwrap().expect("it is wanted").outcomes
}
