//! Drafters in a step's graph that draft from hidden states of the target. The host keeps these from step to step
//! (`draft/kept_states.rs`), since it alone knows which are needed: so no step is launched ahead.

use super::graph::Shape;
use super::head::HeadDrafter;
use super::medusa::MedusaDrafter;
use crate::Result;
use crate::exec::cuda::device::pod::bytes_of_mut;
use crate::exec::cuda::device::{Device, Op};
use crate::exec::cuda::model::Taps;

/// One of these.
#[derive(Clone, Copy)]
pub(crate) enum StateDrafter<'a> {
    /// A head with a cache: EAGLE.
    Head(&'a HeadDrafter),
    /// Heads without one.
    Medusa(&'a MedusaDrafter),
}

impl<'a> StateDrafter<'a> {
    /// Where the target's pass keeps the hidden states of its rows.
    pub(super) fn taps(self) -> &'a Taps {
        match self {
            Self::Head(head) => head.taps(),
            Self::Medusa(heads) => heads.taps(),
        }
    }

    /// Makes states of the hidden states of all rows that were verified.
    pub(super) fn ops_behind(self, shape: Shape) -> Vec<Op> {
        let num_rows = shape.sequences * (shape.drafts + 1);
        match self {
            Self::Head(head) => head.ops_behind(num_rows),
            Self::Medusa(heads) => heads.ops_behind(num_rows),
        }
    }

    /// Values of a state.
    pub(super) fn width(self) -> usize {
        match self {
            Self::Head(head) => head.width(),
            Self::Medusa(heads) => heads.width(),
        }
    }

    /// The states of all rows that were verified, `[sequence][draft][width]`; waits for the device.
    pub(super) fn states(self, shape: Shape, device: &mut dyn Device) -> Result<Vec<f32>> {
        let from = match self {
            Self::Head(head) => head.states(),
            Self::Medusa(heads) => heads.states(),
        };
        let mut states = vec![0.0; shape.sequences * (shape.drafts + 1) * self.width()];
        device.read(from, bytes_of_mut(&mut states))?;
        Ok(states)
    }
}
