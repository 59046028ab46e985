//! Hidden states that passes keep on the device: the residual stream behind some of the layers.

use crate::Result;
use crate::exec::cuda::device::{Address, Device};

/// Room for the rows of a pass.
#[derive(Debug)]
pub(super) struct Taps {
    /// So many layers each are behind them.
    layers: Vec<usize>,
    /// f32 `[layer][rows][hidden]`.
    values: Address,
    /// Rows of a pass, at most.
    rows: usize,
    hidden: usize,
}

impl Taps {
    pub(super) fn alloc(
        layers: &[usize],
        rows: usize,
        hidden: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let values = device.alloc(layers.len() * rows * hidden * size_of::<f32>())?;
        Ok(Self { layers: layers.to_vec(), values, rows, hidden })
    }

    /// Bytes of a row of one layer.
    pub(super) fn row_bytes(&self) -> usize {
        self.hidden * size_of::<f32>()
    }

    /// Where rows are kept behind `layer` layers: nowhere, if nobody wants them.
    pub(super) fn places(&self, layer: usize) -> impl Iterator<Item = Address> {
        let wanted = self.layers.iter().enumerate().filter(move |(_, wanted)| **wanted == layer);
        wanted.map(|(place, _)| self.place(place))
    }

    fn place(&self, place: usize) -> Address {
        self.values + (place * self.rows * self.row_bytes()) as Address
    }

    /// Appends the first `num_rows` rows of a pass, `[row][layer][hidden]`; waits for the device.
    pub(super) fn read(
        &self,
        num_rows: usize,
        device: &mut dyn Device,
        to: &mut Vec<f32>,
    ) -> Result<()> {
        let (row_len, first) = (self.layers.len() * self.hidden, to.len());
        to.resize(first + num_rows * row_len, 0.0);
        let mut bytes = vec![0; num_rows * self.row_bytes()];
        for place in 0..self.layers.len() {
            device.read(self.place(place), &mut bytes)?;
            let rows = to[first..].chunks_exact_mut(row_len);
            for (row, from) in rows.zip(bytes.chunks_exact(self.row_bytes())) {
                let values = &mut row[place * self.hidden..][..self.hidden];
                for (value, &four) in values.iter_mut().zip(from.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(four);
                }
            }
        }
        Ok(())
    }
}
