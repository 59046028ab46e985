//! States that rows of a head come with, made of the target's hidden states.

use super::Eagle;
use crate::Result;
use crate::draft::MaskRow;
use crate::exec::cuda::device::{Address, Device, Op, upload};
use crate::exec::cuda::model::Pass;
use crate::exec::cuda::model::forward::download;
use crate::exec::cuda::model::params::{JoinParams, Piece};
use crate::exec::cuda::model::pass::{DecoderPart, Input, Output, PassOps};
use crate::exec::cuda::model::taps::Taps;
use crate::model::{EagleKind, TapNorms};

impl Eagle {
    /// What rows of the mask token are made of, if it has one; waits for the device.
    pub(super) fn read_mask(&self, device: &mut dyn Device) -> Result<Option<MaskRow>> {
        let mask = self.eagle.mask_token.zip(self.parts.mask_hidden);
        let Some((token, taps)) = mask else { return Ok(None) };
        let width = self.eagle.target_hidden;
        let tap = |idx: usize| taps + (idx * width * size_of::<f32>()) as Address;
        self.fuse(1, tap, self.taps_len()).iter().try_for_each(|op| device.issue(op))?;
        let mut state = Vec::new();
        download(device, self.buffers.states, self.width(), &mut state)?;
        Ok(Some(MaskRow { token, state }))
    }

    /// Makes states of hidden states in their buffer, `[row][tap][hidden]`.
    fn fuse_uploaded(&self, num_rows: usize) -> Vec<Op> {
        let (width, row_len) = (self.eagle.target_hidden, self.taps_len());
        let rows = |tap: usize| self.buffers.taps + (tap * width * size_of::<f32>()) as Address;
        self.fuse(num_rows, rows, row_len)
    }

    /// Makes states of rows of hidden states: of those behind each tap where the first one is, `stride` values from one to
    /// the next. EAGLE-1 takes them as they are, behind the norm.
    pub(crate) fn fuse(
        &self,
        num_rows: usize,
        rows: impl Fn(usize) -> Address,
        stride: usize,
    ) -> Vec<Op> {
        let Self { layers, parts, buffers, eagle, .. } = self;
        let width = eagle.target_hidden;
        let norm = |idx: usize| match eagle.tap_norms {
            TapNorms::None => 0,
            TapNorms::Each => parts.tap_norms[idx],
            TapNorms::Together => parts.tap_norms[0] + (idx * width * size_of::<f32>()) as Address,
        };
        let tap = |idx: usize| Piece {
            rows: rows(idx),
            norm: norm(idx),
            stride: stride as u32,
            len: width as u32,
        };
        let taps: Vec<Piece> = (0..eagle.taps.len()).map(tap).collect();
        let pass = Pass { num_rows, ..Pass::default() };
        let mut ops = PassOps::new(layers, &pass, None, DecoderPart::default());
        let params = JoinParams {
            is_together: (eagle.tap_norms == TapNorms::Together).into(),
            num_rows: num_rows as u32,
            ..JoinParams::default()
        };
        let (to, squares) = (buffers.states, buffers.squares);
        if eagle.kind == EagleKind::Eagle1 {
            ops.join(self.code.join, &taps, JoinParams { kept: to, keeps_normed: 1, ..params });
            return ops.ops();
        }
        let (joined, cleared_len) = (buffers.joined, parts.fc.n as u32);
        ops.join(self.code.join, &taps, JoinParams { joined, cleared: to, cleared_len, ..params });
        let sums = Output::Sums { code: &self.code.fc, to, squares };
        ops.multiply(&parts.fc, Input::Halves(buffers.joined), sums);
        ops.ops()
    }

    /// Appends the states of rows whose hidden states are on the device, `[row][width]`; waits for it.
    pub(in crate::exec::cuda::model) fn read_states(
        &self,
        taps: &Taps,
        num_rows: usize,
        device: &mut dyn Device,
        to: &mut Vec<f32>,
    ) -> Result<()> {
        let stride = self.eagle.target_hidden;
        for first in (0..num_rows).step_by(self.capacity.rows) {
            let count = self.capacity.rows.min(num_rows - first);
            let before = (first * stride * size_of::<f32>()) as Address;
            let ops = self.fuse(count, |tap| taps.place(tap) + before, stride);
            ops.iter().try_for_each(|op| device.issue(op))?;
            download(device, self.buffers.states, count * self.width(), to)?;
        }
        Ok(())
    }

    /// Makes states of hidden states, `[row][tap][hidden]`; waits for the device.
    pub(in crate::exec::cuda::model) fn states_of(
        &self,
        taps: &[f32],
        device: &mut dyn Device,
    ) -> Result<Vec<f32>> {
        let row_len = self.taps_len();
        let mut states = Vec::with_capacity(taps.len() / row_len * self.width());
        for taps in taps.chunks(self.capacity.rows * row_len) {
            let num_rows = taps.len() / row_len;
            upload(device, self.buffers.taps, taps)?;
            self.fuse_uploaded(num_rows).iter().try_for_each(|op| device.issue(op))?;
            download(device, self.buffers.states, num_rows * self.width(), &mut states)?;
        }
        Ok(states)
    }
}
