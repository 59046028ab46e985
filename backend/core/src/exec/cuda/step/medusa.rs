//! Medusa heads inside of a step's graph.
//!
//! Each head drafts one token from the state of the position in front of the last known token, which the host uploads. Behind
//! the verification the hidden states of its rows become states, of which the host keeps that of the last one that is valid.

use super::drafter::GraphDrafter;
use super::graph::{Shape, StepGraph, StepLogits};
use super::head::most_rows;
use super::params::CACHE_OF_KNOWN;
use super::state_drafter::StateDrafter;
use crate::Result;
use crate::batch::Segment;
use crate::engine::Limits;
use crate::exec::cuda::device::{Address, Device, Op, upload};
use crate::exec::cuda::model::{Medusa, Taps};
use crate::model::ModelConfig;
use crate::pages::PageId;
use std::slice;
use std::sync::Arc;

/// Heads as the drafter.
pub(crate) struct MedusaDrafter {
    heads: Arc<Medusa>,
    /// Hidden states of the rows that are verified.
    taps: Taps,
}

impl MedusaDrafter {
    pub(crate) fn new(
        heads: Arc<Medusa>,
        limits: &Limits,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let tap = slice::from_ref(&heads.config().tap);
        let taps = Taps::alloc(tap, most_rows(limits), heads.width(), device)?;
        let taps = taps.copied_by(heads.join_code());
        Ok(Self { heads, taps })
    }

    /// Bytes that `new` takes on the device.
    pub(crate) fn bytes(heads: &ModelConfig, limits: &Limits) -> usize {
        Taps::bytes(1, most_rows(limits), heads.hidden_size)
    }

    /// Where the target's pass keeps the hidden states of its rows.
    pub(super) fn taps(&self) -> &Taps {
        &self.taps
    }

    /// Values of a state.
    pub(super) fn width(&self) -> usize {
        self.heads.width()
    }

    /// Makes states of the hidden states of all rows that were verified.
    pub(super) fn ops_behind(&self, num_rows: usize) -> Vec<Op> {
        self.heads.fuse(num_rows, self.taps.place(0))
    }

    /// Where these, and those that heads begin with, are.
    pub(super) fn states(&self) -> Address {
        self.heads.states()
    }

    /// Tells the heads the states that they begin with, place by place; none where nothing is drafted.
    pub(super) fn tell<'a>(
        &self,
        shape: Shape,
        states: impl Iterator<Item = Option<&'a [f32]>>,
        device: &mut dyn Device,
    ) -> Result<()> {
        let mut all = vec![0.0; shape.sequences * self.width()];
        for (to, state) in all.chunks_exact_mut(self.width()).zip(states) {
            state.into_iter().for_each(|state| to.copy_from_slice(state));
        }
        upload(device, self.heads.states(), &all)
    }
}

impl GraphDrafter for MedusaDrafter {
    fn vocab_size(&self) -> usize {
        self.heads.vocab_size()
    }

    fn holds(&self, shape: Shape) -> bool {
        self.heads.holds(shape.sequences, shape.drafts + 1)
    }

    fn cache(&self) -> u32 {
        // Which it does not have: none of its drafts is in one.
        CACHE_OF_KNOWN
    }

    fn copy_page(&self, _: PageId, _: PageId, _: &mut dyn Device) -> Result<()> {
        Ok(())
    }

    fn catch_up(&self, segments: &[Segment<'_>], _: &mut dyn Device) -> Result<()> {
        assert!(segments.is_empty(), "heads read no tokens");
        Ok(())
    }

    fn ops(&self, shape: Shape, step: &StepGraph<'_>) -> Vec<Op> {
        let (heads, work) = (&self.heads, self.heads.workspace());
        let stride = heads.vocab_size();
        let logits = StepLogits { values: work.logits, best: work.best, stride, rows_each: 1 };
        let mut ops = heads.begin(shape.sequences);
        // What there is no head for is not drafted.
        for head in 0..shape.from_graph.min(heads.config().num_heads()) {
            ops.extend(heads.head(head, shape.sequences));
            step.draw(logits, shape, head as u32, &mut ops);
        }
        ops
    }

    fn state_drafter(&self) -> Option<StateDrafter<'_>> {
        Some(StateDrafter::Medusa(self))
    }
}
