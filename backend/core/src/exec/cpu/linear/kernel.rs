//! What a kernel is given, and which kernels serve a format at a level.
#![allow(unsafe_code)]

use super::fetch::Fetch;
use super::portable;
use super::prepare::{self, Form};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx2, avx512};
use crate::exec::cpu::Isa;
use crate::exec::cpu::isa::Level;
use crate::model::Dtype;
use crate::model::panel::PANEL;

/// A few rows times a chunk of a panel: `acc[r][o]` += sum over the chunk's k of `w[k][o] * x[r][k]`.
pub(super) struct Tile {
    /// Units of the format, or the groups that they were expanded to.
    pub w: *const u8,
    pub units: usize,
    /// The rows' activations from the chunk's first k on.
    pub x: *const u32,
    /// Words from a row to the next.
    pub stride: usize,
    /// Accumulators, `[row][64]`.
    pub acc: *mut f32,
    /// Weights to fetch meanwhile.
    pub fetch: Fetch,
}

/// One row of a panel on its way out.
pub(super) struct Finish<'a> {
    pub acc: &'a [f32; PANEL],
    pub scales: Option<&'a [f32; PANEL]>,
    pub bias: Option<&'a [f32; PANEL]>,
}

/// Multiplies one tile; the kernel's place in its table says how many rows. It fetches what comes next, unless there is so
/// little work between its loads that the processor's own prefetcher does better.
pub(super) type Kernel = unsafe fn(&Tile);

/// Rewrites units of the stored form (source, number, target) into those that the kernels read.
pub(super) type Expand = unsafe fn(*const u8, usize, *mut u8);

/// How a format is multiplied at a level.
pub(super) struct Path {
    /// Where the kernels read another form than the stored one.
    pub expand: Option<Expand>,
    /// Expanded groups of one stored unit.
    pub expansion: usize,
    /// Words of prepared activations for one stored unit.
    pub words: usize,
    /// For 1, 2, ... rows.
    pub kernels: &'static [Kernel],
    /// Up to so many rows are one tile that reads its chunk once, front to back.
    pub once: usize,
    /// With up to so many of those rows there is so little work between loads that the processor's own prefetcher does better
    /// than fetches into the second cache.
    pub light: usize,
    pub finish: unsafe fn(&Finish<'_>, &mut [f32]),
}

/// The kernels for `rows` rows. The choice may depend on the rows only where the arithmetic does not.
pub(super) fn path(isa: Isa, dtype: Dtype, rows: usize) -> Path {
    match isa.level() {
        Level::Portable => portable::path(dtype),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::AvxVnni => avx2::path(isa, dtype, rows),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::path(dtype, rows),
        #[cfg(target_arch = "x86_64")]
        Level::Amx => amx::path(dtype, rows),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("no Isa is made of a level that the machine lacks"),
    }
}

/// What turns a row of activations into words at the level.
pub(super) fn encoder(isa: Isa) -> unsafe fn(Form, &[f32], &mut [u32]) {
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::AvxVnni => avx2::encode,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Amx => avx512::encode,
        _ => prepare::encode,
    }
}

/// The last step of every level: the same operations in the same order. Inlined into functions compiled for each level.
#[inline(always)]
pub(super) fn finish(f: &Finish<'_>, out: &mut [f32]) {
    let mut y = *f.acc;
    if let Some(scales) = f.scales {
        for (y, scale) in y.iter_mut().zip(scales) {
            *y *= scale;
        }
    }
    if let Some(bias) = f.bias {
        for (y, bias) in y.iter_mut().zip(bias) {
            *y += bias;
        }
    }
    match <&mut [f32; PANEL]>::try_from(&mut *out) {
        Ok(out) => *out = y,
        Err(_) => out.copy_from_slice(&y[..out.len()]),
    }
}
