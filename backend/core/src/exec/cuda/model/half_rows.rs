//! Rows of halves as products of few rows read them: row after row, or in units as packed matrices have them, where warpgroups
//! multiply.

use super::shape::has_warpgroups;
use crate::model::Dtype;
use crate::model::image::{TILE, unit_len};

/// How rows of so many halves lie.
#[derive(Clone, Copy, Debug)]
pub struct HalfRows {
    len: usize,
    in_units: bool,
}

impl HalfRows {
    /// On a GPU of this compute capability.
    pub fn new(len: usize, capability: (u32, u32)) -> Self {
        Self { len, in_units: has_warpgroups(capability) }
    }

    /// Elements of a row with what is behind it. A unit of FP8 weights meets two units of halves, which are always there.
    pub(super) fn stride(self) -> usize {
        if self.in_units { self.len.next_multiple_of(unit_len(Dtype::Fp8)) } else { self.len }
    }

    /// Bytes of so many rows. In units those before a row, if it is the first of one.
    pub(super) fn bytes_before(self, rows: usize) -> usize {
        rows * self.stride() * size_of::<u16>()
    }

    /// Bytes that so many rows take.
    pub fn bytes(self, rows: usize) -> usize {
        self.bytes_before(if self.in_units { rows.next_multiple_of(TILE) } else { rows })
    }

    /// Units of 64 rows; 0 where rows follow each other.
    pub fn units(self) -> u32 {
        if self.in_units { (self.stride() / unit_len(Dtype::Fp16)) as u32 } else { 0 }
    }
}
