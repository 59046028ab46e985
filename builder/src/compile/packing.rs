//! How the rows of a weight are ordered and packed for a device.

use spec_core::engine::Device;
use spec_core::model::decoder::MatrixKind;
use spec_core::model::image::{self, RUN, RowOrder};
use spec_core::model::{Dtype, ModelConfig, panel};
use std::ops::Range;

/// Packs rows: number format, rows, inputs of a row, where to, a scale for each row if the format has scales.
type Pack = fn(Dtype, &[f32], usize, &mut [u8], &mut [f32]);

/// The layout of one section's rows.
#[derive(Clone, Copy)]
pub(super) struct Packing {
    order: RowOrder,
    /// Bytes of [`Packing::ROWS`] rows of so many inputs.
    pub(super) bytes: fn(Dtype, usize) -> usize,
    pub(super) pack: Pack,
    /// The same for rows that are e4m3 already.
    pub(super) pack_fp8: fn(&[u8], usize, &mut [u8]),
    /// Formats to recommend where fp16 is too narrow.
    pub(super) wider: &'static str,
}

impl Packing {
    /// Rows that are packed at a time.
    pub(super) const ROWS: usize = panel::PANEL;

    /// That of a matrix, or of a vector with a value for each of its rows; none for other vectors.
    pub(super) fn of(device: &Device, kind: Option<MatrixKind>, model: &ModelConfig) -> Self {
        const { assert!(image::TILE == Packing::ROWS) };
        match device {
            Device::Cpu => Self {
                order: RowOrder::Natural,
                bytes: panel::panel_bytes,
                pack: panel::pack_panel,
                pack_fp8: panel::pack_panel_fp8,
                wider: "bf16",
            },
            Device::Cuda { .. } => Self {
                order: kind.map_or(RowOrder::Natural, |kind| RowOrder::of(kind, model)),
                bytes: image::tile_bytes,
                pack: image::pack_tile,
                pack_fp8: image::pack_tile_fp8,
                wider: "fp8",
            },
        }
    }

    /// Which rows of the source, of `n`, stand at `rows`, in runs; `rows` starts with a run.
    pub(super) fn runs(&self, rows: Range<usize>, n: usize) -> Vec<Range<usize>> {
        let run = |first: usize| {
            let source = self.order.source(first, n).expect("the row is not padding");
            source..source + RUN.min(rows.end - first)
        };
        match self.order {
            RowOrder::Natural => vec![rows],
            _ => rows.clone().step_by(RUN).map(run).collect(),
        }
    }
}
