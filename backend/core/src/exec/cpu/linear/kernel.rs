//! What a kernel is given, and which kernels serve a format at a level.
#![allow(unsafe_code)]

use super::portable;
use super::prepare::{self, Form};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::exec::cpu::Isa;
use crate::exec::cpu::isa::Level;
use crate::model::Dtype;
use crate::model::panel::PANEL;

/// A few rows times a chunk of a panel: `acc[r][o]` += sum over the chunk's k of `w[k][o] * x[r][k]`.
pub(super) struct Block {
    /// Groups of 256 bytes, stored or expanded.
    pub w: *const u8,
    pub groups: usize,
    /// The rows' activations from the chunk's first k on.
    pub x: *const u32,
    /// Words from a row to the next.
    pub stride: usize,
    /// Accumulators, `[row][64]`.
    pub acc: *mut u32,
    /// Weights to prefetch meanwhile: with every group four cache lines from here, and `next_step` bytes on.
    /// Only a hint, so the address need not be valid.
    pub next: *const u8,
    pub next_step: usize,
}

/// One row of a panel on its way out.
pub(super) struct Finish<'a> {
    /// f32 bits, or i32 for int8.
    pub acc: &'a [u32; PANEL],
    /// For int8: the row's scale and the sum of its quantised activations.
    pub row: Option<(f32, i32)>,
    pub scales: Option<&'a [f32; PANEL]>,
    pub bias: Option<&'a [f32; PANEL]>,
}

/// Runs one block; the kernel's place in its table says how many rows.
pub(super) type Kernel = unsafe fn(&Block);

/// Rewrites groups of the stored form (source, number, target) into those that the kernels read.
pub(super) type Expand = unsafe fn(*const u8, usize, *mut u8);

/// How a format is multiplied at a level.
pub(super) struct Path {
    /// Where the kernels read another form than the stored one.
    pub expand: Option<Expand>,
    /// Expanded groups of one stored group.
    pub expansion: usize,
    /// Words of prepared activations for one stored group.
    pub words: usize,
    /// Whether a kernel reads a chunk once, front to back, with little work between the loads.
    pub is_streamed: bool,
    /// For 1, 2, ... rows.
    pub kernels: &'static [Kernel],
    pub finish: unsafe fn(&Finish<'_>, &mut [f32]),
}

/// The kernels for `rows` rows. The choice may depend on the rows only where the arithmetic does not.
pub(super) fn path(isa: Isa, dtype: Dtype, rows: usize) -> Path {
    match isa.level() {
        Level::Portable => portable::path(dtype),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::path(dtype),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::path(dtype, rows),
        #[cfg(not(target_arch = "x86_64"))]
        _ => unreachable!("no Isa is made of a level that the machine lacks"),
    }
}

/// What turns a row of activations into words at the level.
pub(super) fn encoder(isa: Isa) -> unsafe fn(Form, &[f32], &mut [u32]) {
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::encode,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::encode,
        _ => prepare::encode,
    }
}

/// The last step of every level: the same operations in the same order, so that int8 gives the same bits
/// everywhere. Inlined into functions compiled for each level.
#[inline(always)]
pub(super) fn finish(f: &Finish<'_>, out: &mut [f32]) {
    let mut y = match f.row {
        None => f.acc.map(f32::from_bits),
        Some((scale, sum)) => {
            // Stored weights have 128 added, so every accumulator holds 128 * sum too much.
            let excess = sum.wrapping_mul(128);
            f.acc.map(|acc| (acc as i32).wrapping_sub(excess) as f32 * scale)
        }
    };
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
