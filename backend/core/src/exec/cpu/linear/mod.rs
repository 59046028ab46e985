//! out = x · wᵀ, scaled and biased, for packed weights of every format and any number of rows.
//!
//! A row's result depends on nothing but the row and the weights, bit for bit: every (row, output) has one
//! accumulator that runs over k upwards with the same arithmetic whatever the number of rows, their order
//! and the threads. k is cut into chunks so that the weights stay in cache while all rows pass, and the
//! accumulators are put down and taken up between chunks exactly. Instruction sets may differ in bits.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod blocks;
mod fetch;
mod kernel;
mod portable;
mod prepare;
#[cfg(test)]
mod tests;

pub use prepare::{Prepared, prepare};

use super::pool::{Pool, SyncPtr};
use super::{ArenaSlice, Isa};
use crate::model::Dtype;
use crate::model::panel::{self, PANEL};
use fetch::{Ahead, Cache};
use kernel::{Finish, Path, Tile};
use std::mem::MaybeUninit;

/// Rows whose accumulators are held at a time: 64 KiB of them, an eighth of a typical L2.
const ROW_TILE: usize = 256;
/// Bytes of weights, or of their expanded form, that all rows pass before the next.
const CHUNK_BYTES: usize = 32 << 10;
/// The same for up to [`FEW_ROWS`] rows, which leave little time to fetch the next: both lie in a typical L1 then.
const SHORT_CHUNK_BYTES: usize = CHUNK_BYTES / 2;
const FEW_ROWS: usize = 32;

/// A packed matrix with what is applied to its outputs.
pub struct Weight {
    dtype: Dtype,
    n: usize,
    k: usize,
    bytes: ArenaSlice,
    /// One an output, or none; padded to whole panels, as is `bias`.
    scales: Vec<f32>,
    bias: Vec<f32>,
}

impl Weight {
    /// A matrix of `n` outputs and `k` inputs from its packed bytes; one scale an output for scaled
    /// formats, none for others.
    pub fn new(
        dtype: Dtype,
        n: usize,
        k: usize,
        bytes: ArenaSlice,
        scales: Vec<f32>,
        bias: Option<Vec<f32>>,
    ) -> Self {
        assert!(n > 0 && k > 0, "empty matrix [{n}, {k}]");
        assert_eq!(bytes.len(), panel::packed_bytes(dtype, n, k), "bytes of {dtype} [{n}, {k}]");
        assert_eq!(
            scales.len(),
            if dtype.has_output_scales() { n } else { 0 },
            "scales of {dtype}"
        );
        let pad = |mut values: Vec<f32>| {
            values.resize(values.len().next_multiple_of(PANEL), 0.0);
            values
        };
        let bias = bias.unwrap_or_default();
        assert!(bias.is_empty() || bias.len() == n, "bias of {} for {n} outputs", bias.len());
        Self { dtype, n, k, bytes, scales: pad(scales), bias: pad(bias) }
    }

    /// The format.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The weights of one output, scale applied: a row of an embedding.
    pub(crate) fn row(&self, idx: usize, out: &mut [f32]) {
        assert!(idx < self.n, "row {idx} of {}", self.n);
        let scale = self.scales.get(idx).copied();
        panel::unpack_row(self.dtype, &self.bytes, self.k, idx, scale, out);
    }
}

/// Multiplies the first `rows` rows of `x` by `w` into `out`, `[rows][n]`.
pub fn linear(isa: Isa, pool: &Pool, w: &Weight, x: &Prepared, rows: usize, out: &mut [f32]) {
    x.check(isa, w.dtype, w.k, rows);
    assert_eq!(out.len(), rows * w.n, "output of {rows} rows of {}", w.n);
    if rows == 0 {
        return;
    }
    let path = kernel::path(isa, w.dtype, rows);
    let job = Job { w, x, rows, path, out: SyncPtr(out.as_mut_ptr()) };
    pool.for_each(w.n.div_ceil(PANEL), |panel_idx| job.run_panel(panel_idx));
}

/// What the tasks of one product share.
struct Job<'a> {
    w: &'a Weight,
    x: &'a Prepared,
    rows: usize,
    path: Path,
    /// `[rows][n]`; the task of a panel writes the panel's columns.
    out: SyncPtr<f32>,
}

/// A task's working memory.
#[repr(align(64))]
struct Scratch {
    /// `[row][output]`.
    acc: [[f32; PANEL]; ROW_TILE],
    expanded: [u8; CHUNK_BYTES],
}

impl Job<'_> {
    fn run_panel(&self, panel_idx: usize) {
        let mut scratch = MaybeUninit::<Scratch>::uninit();
        let scratch = scratch.as_mut_ptr();
        for first_row in (0..self.rows).step_by(ROW_TILE) {
            let num_rows = ROW_TILE.min(self.rows - first_row);
            // SAFETY: in bounds of `acc`; zero bits are 0.0.
            unsafe { (&raw mut (*scratch).acc).cast::<[f32; PANEL]>().write_bytes(0, num_rows) };
            self.accumulate(panel_idx, first_row, num_rows, scratch);
            self.finish(panel_idx, first_row, num_rows, scratch);
        }
    }

    /// Runs a tile of rows over the whole of k.
    fn accumulate(
        &self,
        panel_idx: usize,
        first_row: usize,
        num_rows: usize,
        scratch: *mut Scratch,
    ) {
        let (path, x) = (&self.path, self.x);
        let panel_bytes = panel::panel_bytes(self.w.dtype, self.w.k);
        let panel = &self.w.bytes[panel_idx * panel_bytes..][..panel_bytes];
        let unit_bytes = panel::unit_bytes(self.w.dtype);
        let chunk_bytes = match num_rows {
            // Read once.
            _ if num_rows <= path.once => panel.len(),
            ..=FEW_ROWS => SHORT_CHUNK_BYTES,
            _ => CHUNK_BYTES,
        };
        let chunk_units = chunk_bytes / unit_bytes / path.expansion;
        let num_tiles = num_rows.div_ceil(path.kernels.len());
        let cache = Cache::of_machine();
        for (chunk_idx, chunk) in panel.chunks(chunk_units * unit_bytes).enumerate() {
            let units = chunk.len() / unit_bytes;
            let mut w = chunk.as_ptr();
            if let Some(expand) = path.expand {
                // SAFETY: `chunk` is whole units and `expanded` holds `expansion` times as many.
                unsafe {
                    let expanded = (&raw mut (*scratch).expanded).cast::<u8>();
                    expand(w, units, expanded);
                    w = expanded;
                }
            }
            let ahead = if num_rows > path.once {
                Ahead::of_the_next(cache, chunk, units * path.expansion, num_tiles)
            } else if num_rows <= path.light && cache == Cache::Second {
                Ahead::nothing()
            } else {
                Ahead::of_a_pass(cache, chunk, unit_bytes)
            };
            let first_word = chunk_idx * chunk_units * path.words;
            let mut row = 0;
            for tile_idx in 0..num_tiles {
                // Even tiles: 4 + 4 rows are cheaper than 6 + 2.
                let tile_rows = (num_rows - row).div_ceil(num_tiles - tile_idx);
                // SAFETY: `row < num_rows <= ROW_TILE` and the rows of `x` were checked to have `words` words
                // for every unit of the panel.
                let tile = unsafe {
                    Tile {
                        w,
                        units: units * path.expansion,
                        x: x.row(first_row + row).add(first_word),
                        stride: x.stride(),
                        acc: (&raw mut (*scratch).acc).cast::<f32>().add(row * PANEL),
                        fetch: ahead.part(tile_idx),
                    }
                };
                // SAFETY: the tile's pointers cover `tile_rows` rows, and `path` is of a level that an
                // `Isa` vouched for.
                unsafe { path.kernels[tile_rows - 1](&tile) };
                row += tile_rows;
            }
        }
    }

    fn finish(&self, panel_idx: usize, first_row: usize, num_rows: usize, scratch: *mut Scratch) {
        let (w, first) = (self.w, panel_idx * PANEL);
        let len = PANEL.min(w.n - first);
        let padded = |values: &[f32]| -> Option<[f32; PANEL]> {
            values.get(first..first + PANEL).map(|v| v.try_into().expect("the slice is PANEL long"))
        };
        let (scales, bias) = (padded(&w.scales), padded(&w.bias));
        for row in 0..num_rows {
            // SAFETY: `accumulate` wrote the row; no one else has the scratch.
            let acc = unsafe { &*(&raw const (*scratch).acc).cast::<[f32; PANEL]>().add(row) };
            // SAFETY: columns `first..first + len` of the output belong to this task alone.
            let out = unsafe {
                let start = self.out.get().add((first_row + row) * w.n + first);
                std::slice::from_raw_parts_mut(start, len)
            };
            let finish = Finish { acc, scales: scales.as_ref(), bias: bias.as_ref() };
            // SAFETY: `path` is of a level that an `Isa` vouched for.
            unsafe { (self.path.finish)(&finish, out) };
        }
    }
}
