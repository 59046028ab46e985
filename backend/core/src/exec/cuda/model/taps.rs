//! Hidden states that passes keep on the device: the residual stream behind some of the layers.

use super::params::{JoinParams, MOST_PIECES, Piece};
use super::shape;
use crate::Result;
use crate::exec::cuda::device::{Address, Device, Kernel, Launch, Op};

/// Room for the rows of a pass.
#[derive(Debug)]
pub(crate) struct Taps {
    /// So many layers each are behind them.
    layers: Vec<usize>,
    /// f32 `[layer][rows][hidden]`.
    values: Address,
    /// Rows of a pass, at most.
    rows: usize,
    hidden: usize,
    /// What copies rows (`join.cu`), so that a graph is of kernels alone; else the device does.
    copier: Option<Kernel>,
}

impl Taps {
    pub(crate) fn alloc(
        layers: &[usize],
        rows: usize,
        hidden: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let values = device.alloc(Self::bytes(layers.len(), rows, hidden))?;
        Ok(Self { layers: layers.to_vec(), values, rows, hidden, copier: None })
    }

    /// With a kernel that copies.
    pub(crate) fn copied_by(self, copier: Kernel) -> Self {
        Self { copier: Some(copier), ..self }
    }

    /// Copies the first rows of a residual stream to where they are kept.
    pub(super) fn copy(&self, from: Address, to: Address, num_rows: usize) -> Op {
        let Some(copier) = self.copier else {
            let bytes = num_rows * self.row_bytes();
            return Op::Copy { from, to, bytes, rows: 1, pitch: bytes };
        };
        let len = self.hidden as u32;
        let mut pieces = [Piece::default(); MOST_PIECES];
        pieces[0] = Piece { rows: from, norm: 0, stride: len, len };
        let num_rows = num_rows as u32;
        let params =
            JoinParams { pieces, num_pieces: 1, kept: to, num_rows, ..JoinParams::default() };
        let shared_bytes = shape::OPERAND_SHARED_BYTES;
        Op::Launch(Launch::new(copier, num_rows, shape::ROW_THREADS, shared_bytes, params))
    }

    /// Bytes that [`alloc`](Self::alloc) takes.
    pub(crate) fn bytes(num_layers: usize, rows: usize, hidden: usize) -> usize {
        num_layers * rows * hidden * size_of::<f32>()
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

    /// Where the rows of a layer are kept, the layers in their order.
    pub(crate) fn place(&self, place: usize) -> Address {
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
