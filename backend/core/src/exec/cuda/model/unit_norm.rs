//! A norm that changes nothing, for rows that have none before a product that comes behind one.

use super::pass::Input;
use super::shape::TILE_OUTPUTS;
use crate::Result;
use crate::exec::cuda::device::{Address, Device, arrays, upload};
use crate::model::ModelConfig;

/// Its weights, and what it takes for the sums of squares of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct UnitNorm {
    /// f32 `[hidden]`, all of them 1.
    weights: Address,
    /// f32 `[rows][tiles]`, of which the norm makes the factor 1.
    squares: Address,
}

fn sizes(model: &ModelConfig, rows: usize) -> [usize; 2] {
    let tiles = model.hidden_size.div_ceil(TILE_OUTPUTS);
    [model.hidden_size * size_of::<f32>(), rows * tiles * size_of::<f32>()]
}

impl UnitNorm {
    /// Of up to so many rows of a model.
    pub(super) fn alloc(model: &ModelConfig, rows: usize, device: &mut dyn Device) -> Result<Self> {
        let ModelConfig { hidden_size, rms_norm_eps, .. } = *model;
        let [weights, squares] = arrays::alloc(sizes(model, rows), device)?;
        upload(device, weights, &vec![1.0f32; hidden_size])?;
        let mut row = vec![0.0; hidden_size.div_ceil(TILE_OUTPUTS)];
        row[0] = hidden_size as f32 * (1.0 - rms_norm_eps);
        upload(device, squares, &row.repeat(rows))?;
        Ok(Self { weights, squares })
    }

    /// At an address that means nothing.
    pub(super) fn outline(somewhere: Address) -> Self {
        Self { weights: somewhere, squares: somewhere }
    }

    /// Bytes that [`alloc`](Self::alloc) takes.
    pub(super) fn bytes(model: &ModelConfig, rows: usize) -> usize {
        arrays::total(&sizes(model, rows))
    }

    /// Rows behind it: the first ones, as many as are multiplied.
    pub(super) fn of(&self, rows: Address) -> Input {
        Input::Rows { rows, norm: self.weights, squares: self.squares }
    }
}
