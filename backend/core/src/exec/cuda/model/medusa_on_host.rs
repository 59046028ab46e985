//! Medusa heads on a GPU, as the executor on the host uses them.

use super::Medusa;
use crate::Result;
use crate::batch::Logits;
use crate::draft::Heads;
use crate::exec::cuda::device::Gpu;
use std::sync::Arc;

/// Heads whose logits the host asks for.
pub struct MedusaOnHost {
    heads: Arc<Medusa>,
    gpu: Gpu,
}

impl MedusaOnHost {
    /// `heads` are on `gpu`.
    pub fn new(heads: Arc<Medusa>, gpu: Gpu) -> Self {
        Self { heads, gpu }
    }
}

impl Heads for MedusaOnHost {
    fn taps(&self) -> &[usize] {
        std::slice::from_ref(&self.heads.config().tap)
    }

    fn num_heads(&self) -> usize {
        self.heads.config().num_heads()
    }

    fn width(&self) -> usize {
        self.heads.width()
    }

    fn states(&mut self, taps: &[f32]) -> Result<Vec<f32>> {
        self.heads.states_of(taps, &mut **self.gpu.lock())
    }

    fn logits(&mut self, head: usize, states: &[f32]) -> Result<Logits> {
        self.heads.logits_of(head, states, &mut **self.gpu.lock())
    }
}
