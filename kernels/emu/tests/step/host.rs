//! The reference: the host's own executor over scripted models.

use crate::world::{Model, Sequence, World};
use spec_core::Result;
use spec_core::testing::batch::{Executor, Forward, Logits, Outcome, Segment, WANTED};
use spec_core::testing::{Host, PageId, draft};

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

/// What target and drafter have seen of each sequence before a step.
pub(crate) fn fed(world: &World, sequences: &[Sequence]) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let readable = |&token: &u32| if (token as usize) < world.shared_vocab() { token } else { 0 };
    let each = |sequence: &Sequence| {
        let (target, _) = sequence.tokens.split_at(sequence.tokens.len() - 1);
        let drafter = &sequence.tokens[..sequence.draft_computed];
        (target.to_vec(), drafter.iter().map(readable).collect())
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
    let drafter = draft::Model::new(Box::new(drafter), world.shared_vocab());
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
