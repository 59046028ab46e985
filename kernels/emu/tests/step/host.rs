//! The reference: the host's own executor over scripted models.

use crate::world::{Model, Sequence, World};
use spec_core::Result;
use spec_core::batch::{Executor, Forward, Logits, Outcome, Segment};
use spec_core::draft;
use spec_core::exec::Host;
use spec_core::pages::PageId;

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

/// What the drafter can read of these tokens.
pub(crate) fn readable(tokens: &[u32], vocab: usize) -> Vec<u32> {
    tokens.iter().map(|&token| if (token as usize) < vocab { token } else { 0 }).collect()
}

/// One step of all sequences.
pub(crate) fn step(world: &World, sequences: &[Sequence]) -> Vec<Outcome> {
    let fed = |vocab| sequences.iter().map(|s| readable(&s.tokens, vocab)).collect();
    let target =
        Scripted { model: world.target.clone(), vocab: world.target_vocab, fed: fed(usize::MAX) };
    let drafter = Scripted {
        model: world.drafter.clone(),
        vocab: world.drafter_vocab,
        fed: fed(world.shared_vocab()),
    };
    let drafter = draft::Model::new(Box::new(drafter), world.shared_vocab());
    let mut host = Host::new(Box::new(target), Some(Box::new(drafter)));
    let pages: Vec<[PageId; 1]> = (0..sequences.len()).map(|idx| [idx as PageId]).collect();
    let entries: Vec<_> = sequences
        .iter()
        .zip(&pages)
        .enumerate()
        .map(|(idx, (sequence, pages))| {
            let mut entry = sequence.entry(idx);
            entry.pages = pages;
            entry.draft_len = entry.draft_len.min(world.max_drafts);
            entry
        })
        .collect();
    host.step(&entries).unwrap()
}
