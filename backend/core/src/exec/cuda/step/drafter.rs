//! Drafters inside of a step's graph.

use super::graph::{Shape, StepGraph};
use super::head::HeadDrafter;
use super::params::MAX_FED;
use crate::Result;
use crate::batch::Segment;
use crate::draft::catch_up::readable;
use crate::exec::cuda::device::{Device, Op};
use crate::exec::cuda::model::Model;
use crate::pages::PageId;
use std::sync::Arc;

/// A source of drafts that the device runs by itself, ahead of the target's pass.
pub(crate) trait GraphDrafter: Send {
    /// Tokens of its distributions: those that the target has too.
    fn vocab_size(&self) -> usize;

    /// Whether its passes have room for a step.
    fn holds(&self, shape: Shape) -> bool;

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
    pub model: Arc<Model>,
    /// Tokens that both models have.
    pub vocab_size: usize,
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
        let mut ops = Vec::new();
        for pass in 0..shape.passes {
            let places = if pass == 0 { MAX_FED } else { 1 };
            step.pass(&self.model, shape, pass as u32, places, None, &mut ops);
        }
        ops
    }
}
