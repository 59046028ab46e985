//! A head on a GPU, as the executor on the host uses it.

use super::Eagle;
use crate::Result;
use crate::draft::{Head, HeadPass, HeadSegment, MaskRow};
use crate::exec::cuda::device::Gpu;
use std::sync::Arc;

/// A head whose rows the host asks for.
pub struct HeadOnHost {
    head: Arc<Eagle>,
    gpu: Gpu,
    /// What it is told of are states already: see [`OnHost::with_head`](super::OnHost::with_head).
    is_told_states: bool,
}

impl HeadOnHost {
    /// `head` is on `gpu`, and is told of its target's hidden states.
    pub fn new(head: Arc<Eagle>, gpu: Gpu) -> Self {
        Self { head, gpu, is_told_states: false }
    }

    /// The same of a target that makes states of them.
    pub fn told_states(self) -> Self {
        Self { is_told_states: true, ..self }
    }
}

impl Head for HeadOnHost {
    fn taps(&self) -> &[usize] {
        &self.head.config().taps
    }

    fn width(&self) -> usize {
        self.head.width()
    }

    fn vocab_map(&self) -> Option<&[u32]> {
        self.head.vocab_map()
    }

    fn mask(&self) -> Option<&MaskRow> {
        self.head.mask()
    }

    fn states(&mut self, taps: &[f32]) -> Result<Vec<f32>> {
        match self.is_told_states {
            true => Ok(taps.to_vec()),
            false => self.head.states_of(taps, &mut **self.gpu.lock()),
        }
    }

    fn forward(&mut self, segments: &[HeadSegment<'_>]) -> Result<HeadPass> {
        self.head.forward(segments, &mut **self.gpu.lock())
    }
}
