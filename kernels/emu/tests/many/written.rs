//! Operands as a kernel writes them, and how close they must be.

use crate::image::{TILE, e4m3_value, place_in_image};
use crate::run::{UNTOUCHED, floats, read};
use half::f16;
use spec_core::testing::cuda::model::many_params::Operand;
use spec_emu::Arena;
use spec_kernels::Format;

/// Half a unit in the last place and half the smallest step of f16, and what the operations before it lose.
const F16_ERROR: (f64, f64) = (1.0 / 2048.0 + 1e-5, 3e-8 + 1e-12);
/// The same of e4m3, in units of the row's scale where absolute.
const E4M3_ERROR: (f64, f64) = (1.0 / 16.0 + 1e-5, 1.0 / 1024.0 + 1e-5);
/// The largest e4m3.
const E4M3_MOST: f64 = 448.0;
/// A scale is two roundings away from the exact one, behind what the kernel computes in f32.
const SCALE_ERROR: f64 = 1e-5;

/// How rows stand in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    RowAfterRow,
    /// As in a packed matrix, from this place on.
    Units {
        first: usize,
    },
}

/// With rows in one tile and in two.
pub(crate) const LAYOUTS: [Layout; 3] =
    [Layout::RowAfterRow, Layout::Units { first: 0 }, Layout::Units { first: 62 }];

/// Room for rows of an operand, and others that nobody may touch.
pub(crate) struct Written {
    format: Format,
    rows: usize,
    layout: Layout,
    pub(crate) params: Operand,
}

impl Written {
    /// Of at least `stride` elements a row.
    pub(crate) fn new(
        arena: &Arena,
        format: Format,
        rows: usize,
        stride: usize,
        layout: Layout,
    ) -> Self {
        let (stride, first, places) = match layout {
            Layout::RowAfterRow => (stride, 0, rows + 1),
            Layout::Units { first } => {
                let unit_k = 128 / bytes_of(format);
                (stride.next_multiple_of(unit_k), first, (first + rows).next_multiple_of(TILE))
            }
        };
        let params = Operand {
            values: arena.put(&vec![UNTOUCHED; places * stride * bytes_of(format)]),
            scales: arena.put(&vec![UNTOUCHED; (rows + 1) * 4]),
            stride: stride as u32,
            format: code_of(format),
            first: first as u32,
            in_units: u32::from(layout != Layout::RowAfterRow),
        };
        Self { format, rows, layout, params }
    }

    /// Where an element of a row is.
    fn place(&self, row: usize, k: usize) -> usize {
        let (stride, bytes) = (self.params.stride as usize, bytes_of(self.format));
        match self.layout {
            Layout::RowAfterRow => (row * stride + k) * bytes,
            Layout::Units { first } => {
                place_in_image(self.format, stride * bytes / 128, first + row, k)
            }
        }
    }

    fn places(&self) -> usize {
        match self.layout {
            Layout::RowAfterRow => self.rows + 1,
            Layout::Units { first } => (first + self.rows).next_multiple_of(TILE),
        }
    }

    /// The bytes of each row, its scale among them.
    pub(crate) fn rows(&self, arena: &Arena) -> Vec<(Vec<u8>, f32)> {
        let (stride, bytes) = (self.params.stride as usize, bytes_of(self.format));
        let mut values = read(arena, self.params.values, self.places() * stride * bytes);
        let scales = read(arena, self.params.scales, (self.rows + 1) * 4);
        let mut take = |row: usize, k: usize| {
            let place = self.place(row, k);
            let element = values[place..place + bytes].to_vec();
            values[place..place + bytes].fill(UNTOUCHED);
            element
        };
        let rows: Vec<Vec<u8>> =
            (0..self.rows).map(|row| (0..stride).flat_map(|k| take(row, k)).collect()).collect();
        assert!(values.iter().all(|&x| x == UNTOUCHED), "a row too many");
        rows.into_iter().zip(floats(&scales)).collect()
    }

    /// Compares the rows with what they should be.
    pub(crate) fn check(&self, arena: &Arena, expected: &[Vec<f64>]) {
        for (idx, ((bytes, scale), expected)) in self.rows(arena).iter().zip(expected).enumerate() {
            let found = match self.format {
                Format::Fp16 => halves(bytes),
                Format::Fp8 => {
                    check_scale(*scale, expected);
                    bytes.iter().map(|&x| e4m3_value(x) * f64::from(*scale)).collect()
                }
            };
            for (k, &x) in found.iter().enumerate() {
                let wanted = expected.get(k).copied().unwrap_or(0.0);
                let near = self.near(wanted, f64::from(*scale));
                assert!((x - wanted).abs() <= near, "row {idx}, {k}: {x} for {wanted}");
                assert!(k < expected.len() || x.to_bits() == 0, "row {idx}: {x} behind its end");
            }
        }
    }

    fn near(&self, wanted: f64, scale: f64) -> f64 {
        match self.format {
            Format::Fp16 if wanted.abs() > 65504.0 => wanted.abs() - 65504.0,
            Format::Fp16 => wanted.abs() * F16_ERROR.0 + F16_ERROR.1,
            Format::Fp8 => wanted.abs() * E4M3_ERROR.0 + scale * E4M3_ERROR.1,
        }
    }
}

/// The largest of a row becomes the largest e4m3, unless it is next to nothing.
fn check_scale(scale: f32, expected: &[f64]) {
    let most = expected.iter().fold(1e-12, |most: f64, x| most.max(x.abs()));
    let wanted = most / E4M3_MOST;
    let error = (f64::from(scale) / wanted - 1.0).abs();
    assert!(error < SCALE_ERROR, "a scale of {scale} for {wanted}");
}

fn halves(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|&two| f16::from_le_bytes(two).to_f64()).collect()
}

pub(crate) fn bytes_of(format: Format) -> usize {
    match format {
        Format::Fp8 => 1,
        Format::Fp16 => 2,
    }
}

/// As `types.cuh` numbers them.
pub(crate) fn code_of(format: Format) -> u32 {
    match format {
        Format::Fp8 => 1,
        Format::Fp16 => 2,
    }
}
