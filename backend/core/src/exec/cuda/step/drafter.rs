//! Drafters inside of a step's graph.

use super::graph::{FirstRows, ModelPass, Shape, StepGraph};
use super::params::{CACHE_OF_DRAFTS, CACHE_OF_KNOWN, CACHE_OF_TARGET, MAX_FED};
use super::spread::Spread;
use super::state_drafter::StateDrafter;
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

    /// Known tokens of a sequence that a step has room for.
    fn most_fed(&self, _: Shape) -> usize {
        MAX_FED
    }

    /// What its cache is left with behind a step, as the kernels are told.
    fn cache(&self) -> u32 {
        CACHE_OF_DRAFTS
    }

    /// Whether all drafts come from one pass.
    fn drafts_at_once(&self) -> bool {
        false
    }

    /// Copies a page of its cache onto another one; does not wait.
    fn copy_page(&self, from: PageId, to: PageId, device: &mut dyn Device) -> Result<()>;

    /// Runs known tokens of sequences, all but the last ones, which the graph runs.
    fn catch_up(&self, segments: &[Segment<'_>], device: &mut dyn Device) -> Result<()>;

    /// What proposes a step's drafts.
    fn ops(&self, shape: Shape, step: &StepGraph<'_>) -> Vec<Op>;

    /// Itself, if it drafts from hidden states of the target.
    fn state_drafter(&self) -> Option<StateDrafter<'_>> {
        None
    }
}

/// A second, smaller model as the drafter: it proposes a chain, one pass a token, or all of it in one pass, if it was made for
/// that.
pub(crate) struct DraftModel {
    /// On the same GPU as the target.
    model: Arc<Model>,
    /// Tokens that both models have.
    vocab_size: usize,
    /// Where it has logits of some of them.
    spread: Option<Spread>,
    /// The token of the rows behind the first draft, if all drafts come from one pass: PARD.
    mask_token: Option<u32>,
}

/// Rows that a drafter has logits of in a pass, at most.
pub(super) fn most_logits(mask_token: Option<u32>, limits: &Limits) -> usize {
    limits.max_batch_size * if mask_token.is_some() { limits.max_draft_len } else { 1 }
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
        let num_rows = most_logits(model.config().mask_token, limits);
        let spread = model
            .spread_code()
            .zip(vocab_map)
            .map(|(code, map)| Spread::alloc(code, map, vocab_size, num_rows, device));
        let mask_token = model.config().mask_token;
        Ok(Self { spread: spread.transpose()?, model, vocab_size, mask_token })
    }

    /// Bytes that `new` takes on the device.
    pub(crate) fn bytes(draft: &ModelConfig, vocab_size: usize, limits: &Limits) -> usize {
        let num_rows = most_logits(draft.mask_token, limits);
        draft.draft_vocab.map_or(0, |_| Spread::bytes(vocab_size, num_rows))
    }

    fn first_rows(&self, shape: Shape) -> FirstRows {
        FirstRows::of(shape, self.most_fed(shape), self.mask_token)
    }
}

impl GraphDrafter for DraftModel {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn holds(&self, shape: Shape) -> bool {
        self.model.holds(shape.sequences, self.first_rows(shape).places())
    }

    fn most_fed(&self, shape: Shape) -> usize {
        // Of its own drafts it has run none.
        if self.drafts_at_once() { shape.drafts + 1 } else { MAX_FED }
    }

    fn cache(&self) -> u32 {
        if self.drafts_at_once() { CACHE_OF_KNOWN } else { CACHE_OF_DRAFTS }
    }

    fn drafts_at_once(&self) -> bool {
        self.mask_token.is_some()
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
        let (model, spread, first) = (&self.model, self.spread.as_ref(), self.first_rows(shape));
        passes(&ModelPass { model, part: DecoderPart::default(), spread, first }, shape, step)
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

    fn cache(&self) -> u32 {
        CACHE_OF_TARGET
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
        let first = FirstRows { most_fed: MAX_FED, ..FirstRows::default() };
        passes(&ModelPass { model: &self.target, part, spread: None, first }, shape, step)
    }
}

/// One pass a draft, but for those that come from masks in the first one.
fn passes(of: &ModelPass<'_>, shape: Shape, step: &StepGraph<'_>) -> Vec<Op> {
    let mut ops = Vec::new();
    for pass in 0..shape.from_graph - of.first.num_masks {
        step.pass(of, shape, pass as u32, &mut ops);
    }
    ops
}
