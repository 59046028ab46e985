//! Rows of a residual stream behind the layers: that of a sequence's last token may be kept from the pass that has run it to
//! the head that has its logits.

use super::shape::TILE_OUTPUTS;
use crate::exec::cuda::device::{Address, Op};

/// Where they are, and the sums of squares that their norm takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResidualRows {
    /// f32 `[rows][hidden]`.
    pub(crate) values: Address,
    /// f32 `[rows][tiles of hidden]`.
    pub(crate) squares: Address,
    pub(crate) hidden: usize,
}

impl ResidualRows {
    /// Bytes of `num_rows` rows, and of their sums of squares.
    pub(crate) fn bytes(num_rows: usize, hidden: usize) -> [usize; 2] {
        [hidden, hidden.div_ceil(TILE_OUTPUTS)].map(|len| num_rows * len * size_of::<f32>())
    }

    /// Copies a row to a place among others.
    pub(crate) fn copy(&self, row: usize, to: &Self, place: usize) -> [Op; 2] {
        let [row_bytes, squares_bytes] = Self::bytes(1, self.hidden);
        let copy = |from: Address, to: Address, bytes: usize| Op::Copy {
            from: from + (row * bytes) as Address,
            to: to + (place * bytes) as Address,
            bytes,
            rows: 1,
            pitch: bytes,
        };
        [copy(self.values, to.values, row_bytes), copy(self.squares, to.squares, squares_bytes)]
    }
}
