//! What a kernel is given, and which kernels serve a format at a level.
#![allow(unsafe_code)]

use super::portable;
use super::prepare::{self, Form};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::exec::cpu::Isa;
use crate::exec::cpu::isa::Level;
use crate::model::Dtype;
use crate::model::panel::{GROUP_BYTES, PANEL};

/// Cache lines of a group.
const GROUP_LINES: usize = GROUP_BYTES / 64;

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
    /// Weights to prefetch meanwhile: with every unit as many bytes from here, and `next_step` bytes on. Only a hint,
    /// so the address need not be valid.
    pub next: *const u8,
    pub next_step: usize,
}

impl Tile {
    /// What is to be fetched with a unit.
    #[inline(always)]
    pub(super) fn next(&self, unit: usize) -> *const u8 {
        self.next.wrapping_add(unit * self.next_step)
    }
}

/// What a strip of `V` vectors of `len` outputs fetches with a group: the group's four lines are shared out among the
/// strips.
#[inline(always)]
pub(super) fn prefetch_share<const V: usize>(group: *const u8, strip: usize, len: usize) {
    let share = GROUP_LINES * V * len / PANEL;
    for line in 0..share {
        prefetch(group.wrapping_add(64 * (strip * share + line)));
    }
    if share == 0 && strip < GROUP_LINES {
        prefetch(group.wrapping_add(64 * strip));
    }
}

#[inline(always)]
pub(super) fn prefetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch may be of any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
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
        Level::Avx512 => avx512::encode,
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
