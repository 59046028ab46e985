//! Drafters inside of a step's graph.

use super::graph::{ModelPass, Shape, StepGraph};
use super::head::HeadDrafter;
use super::params::MAX_FED;
use super::spread::Spread;
use crate::Result;
use crate::batch::{Entry, Segment};
use crate::draft::catch_up::{self, readable};
use crate::engine::Limits;
use crate::exec::cuda::device::{Device, Op};
use crate::exec::cuda::model::{DecoderPart, Model};
use crate::model::{LayerSkip, ModelConfig};
use crate::pages::PageId;
use std::ops::Range;
use std::sync::Arc;

/// A source of drafts that the device runs by itself, ahead of the target's pass.
pub(crate) trait GraphDrafter: Send {
    /// Tokens of its distributions: those that the target has too.
    fn vocab_size(&self) -> usize;

    /// Whether its passes have room for a step.
    fn holds(&self, shape: Shape) -> bool;

    /// Known tokens that it runs in a step, a head's apart.
    fn rows_to_feed(&self, entry: &Entry<'_>) -> Range<usize> {
        catch_up::rows_to_feed(entry)
    }

    /// Whether its cache is the target's.
    fn is_on_targets_cache(&self) -> bool {
        false
    }

    /// Copies a page of its cache onto another one; does not wait.
    fn copy_page(&self, from: PageId, to: PageId, device: &mut dyn Device) -> Result<()>;

    /// Runs known tokens of sequences, all but the last ones, which the graph runs.
    fn catch_up(&self, segments: &[Segment<'_>], device: &mut dyn Device) -> Result<()>;

    /// What proposes a step's drafts.
    fn ops(&self, shape: Shape, step: &StepGraph<'_>) -> Vec<Op>;

    /// The head on hidden states, if it is one.
    fn head(&self) -> Option<&HeadDrafter> {
        None
    }
}

/// A second, smaller model as the drafter: it proposes a chain, one pass a token.
pub(crate) struct DraftModel {
    /// On the same GPU as the target.
    model: Arc<Model>,
    /// Tokens that both models have.
    vocab_size: usize,
    /// Where it has logits of some of them.
    spread: Option<Spread>,
}

impl DraftModel {
    /// A model whose head has logits of the tokens of `vocab_map`, or of all.
    pub(crate) fn new(
        model: Arc<Model>,
        vocab_size: usize,
        vocab_map: Option<&[u32]>,
        limits: &Limits,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let sequences = limits.max_batch_size;
        let spread = model
            .spread_code()
            .zip(vocab_map)
            .map(|(code, map)| Spread::alloc(code, map, vocab_size, sequences, device));
        Ok(Self { spread: spread.transpose()?, model, vocab_size })
    }

    /// Bytes that `new` takes on the device.
    pub(crate) fn bytes(draft: &ModelConfig, vocab_size: usize, limits: &Limits) -> usize {
        draft.draft_vocab.map_or(0, |_| Spread::bytes(vocab_size, limits.max_batch_size))
    }
}

impl GraphDrafter for DraftModel {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn holds(&self, shape: Shape) -> bool {
        self.model.holds(shape.sequences, MAX_FED)
    }

    fn copy_page(&self, from: PageId, to: PageId, device: &mut dyn Device) -> Result<()> {
        self.model.copy_page(from, to, device)
    }

    fn catch_up(&self, segments: &[Segment<'_>], device: &mut dyn Device) -> Result<()> {
        let tokens: Vec<_> =
            segments.iter().map(|segment| readable(segment.tokens, self.vocab_size)).collect();
        let segments = segments.iter().zip(&tokens);
        let segments: Vec<_> =
            segments.map(|(segment, tokens)| Segment { tokens, ..*segment }).collect();
        self.model.run_without_logits(&segments, device)
    }

    fn ops(&self, shape: Shape, step: &StepGraph<'_>) -> Vec<Op> {
        let (model, spread) = (&self.model, self.spread.as_ref());
        passes(&ModelPass { model, part: DecoderPart::default(), spread }, shape, step)
    }
}

/// The target itself without some of its layers, on its own cache: what it stores there is stale behind its drafts, and
/// the target's pass of the same step stores the same positions anew.
pub(crate) struct PartOfTarget {
    pub target: Arc<Model>,
    /// What it goes without.
    pub skip: LayerSkip,
}

impl GraphDrafter for PartOfTarget {
    fn vocab_size(&self) -> usize {
        self.target.config().vocab_size
    }

    fn holds(&self, shape: Shape) -> bool {
        self.target.holds(shape.sequences, MAX_FED)
    }

    fn rows_to_feed(&self, entry: &Entry<'_>) -> Range<usize> {
        // All before the last token the target has computed, or computes ahead of the graph.
        let end = entry.tokens.len();
        let drafts = entry.samples() && entry.draft_lens.model > 0;
        if drafts { end - 1..end } else { end..end }
    }

    fn is_on_targets_cache(&self) -> bool {
        true
    }

    fn copy_page(&self, _: PageId, _: PageId, _: &mut dyn Device) -> Result<()> {
        // It is copied as the target's.
        Ok(())
    }

    fn catch_up(&self, segments: &[Segment<'_>], _: &mut dyn Device) -> Result<()> {
        assert!(segments.is_empty(), "the target computes what comes before the last token");
        Ok(())
    }

    fn ops(&self, shape: Shape, step: &StepGraph<'_>) -> Vec<Op> {
        let part = DecoderPart { skip: Some(&self.skip), ..DecoderPart::default() };
        passes(&ModelPass { model: &self.target, part, spread: None }, shape, step)
    }
}

/// One pass a draft, the first one with places for all known tokens that a model may have to read.
fn passes(of: &ModelPass<'_>, shape: Shape, step: &StepGraph<'_>) -> Vec<Op> {
    let mut ops = Vec::new();
    for pass in 0..shape.passes {
        let places = if pass == 0 { MAX_FED } else { 1 };
        step.pass(of, shape, pass as u32, places, &mut ops);
    }
    ops
}
