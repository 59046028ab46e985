//! The kernels in plain Rust: the level of last resort. 16-bit and fp8 weights are expanded to f32 a chunk
//! at a time; the loops over outputs are left to the compiler to vectorise.
#![allow(unsafe_code)]

use super::blocks;
use super::kernel::{self, Expand, Finish, Kernel, Path, Tile};
use crate::model::Dtype;
use crate::model::panel::{self, GROUP_BYTES, PANEL};

const F32: [Kernel; 4] = [f32_rows::<1>, f32_rows::<2>, f32_rows::<3>, f32_rows::<4>];
const INT8: [Kernel; 4] = block_kernels::<blocks::Int8>();
const INT4: [Kernel; 4] = block_kernels::<blocks::Int4>();

const fn block_kernels<F: blocks::Stored>() -> [Kernel; 4] {
    [block_rows::<F, 1>, block_rows::<F, 2>, block_rows::<F, 3>, block_rows::<F, 4>]
}

pub(super) fn path(dtype: Dtype) -> Path {
    let (expand, kernels): (Option<Expand>, &'static [Kernel]) = match dtype {
        Dtype::Fp32 => (None, &F32),
        Dtype::Fp16 => (Some(expand::<2, Fp16>), &F32),
        Dtype::Bf16 => (Some(expand::<2, Bf16>), &F32),
        Dtype::Fp8 => (Some(expand::<4, Fp8>), &F32),
        Dtype::Int8 => (None, &INT8),
        Dtype::Int4 => (None, &INT4),
    };
    let expansion = if expand.is_some() { panel::group_len(dtype) } else { 1 };
    let (words, once) = match dtype {
        Dtype::Int8 | Dtype::Int4 => (blocks::block_words(1), kernels.len()),
        _ => (expansion, 0),
    };
    Path { expand, expansion, words, kernels, once, light: 1, finish }
}

fn finish(f: &Finish<'_>, out: &mut [f32]) {
    kernel::finish(f, out);
}

trait Format {
    const DTYPE: Dtype;
}
struct Fp16;
struct Bf16;
struct Fp8;
impl Format for Fp16 {
    const DTYPE: Dtype = Dtype::Fp16;
}
impl Format for Bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
impl Format for Fp8 {
    const DTYPE: Dtype = Dtype::Fp8;
}

/// Groups of `LEN` values an output to `LEN` groups of f32 each.
///
/// # Safety
/// `src` has `groups` groups and `dst`, aligned for f32, room for `LEN` times as many.
unsafe fn expand<const LEN: usize, F: Format>(src: *const u8, groups: usize, dst: *mut u8) {
    // SAFETY: as promised by the caller.
    let (src, dst) = unsafe {
        let src = std::slice::from_raw_parts(src.cast::<[u8; GROUP_BYTES]>(), groups);
        (src, std::slice::from_raw_parts_mut(dst.cast::<[[f32; PANEL]; LEN]>(), groups))
    };
    for (src, dst) in src.iter().zip(dst) {
        for output in 0..PANEL {
            let values = panel::group_values(F::DTYPE, src, output);
            for (dst, value) in dst.iter_mut().zip(values) {
                dst[output] = value;
            }
        }
    }
}

/// # Safety
/// The tile's pointers cover `R` rows.
unsafe fn f32_rows<const R: usize>(tile: &Tile) {
    /// Outputs whose accumulators the compiler can keep in registers.
    const STRIP: usize = 16;
    for r in 0..R {
        // SAFETY: as promised by the caller; weights, activations and accumulators do not overlap.
        let (w, x, acc) = unsafe {
            (
                std::slice::from_raw_parts(tile.w.cast::<[f32; PANEL]>(), tile.units),
                std::slice::from_raw_parts(tile.x.add(r * tile.stride), tile.units),
                &mut *tile.acc.add(r * PANEL).cast::<[f32; PANEL]>(),
            )
        };
        for (strip, acc) in acc.as_chunks_mut::<STRIP>().0.iter_mut().enumerate() {
            let mut sum = *acc;
            for (w, x) in w.iter().zip(x) {
                let x = f32::from_bits(*x);
                for (sum, w) in sum.iter_mut().zip(&w[strip * STRIP..(strip + 1) * STRIP]) {
                    *sum += w * x;
                }
            }
            *acc = sum;
        }
    }
}

/// # Safety
/// The tile's pointers cover `R` rows.
unsafe fn block_rows<F: blocks::Stored, const R: usize>(tile: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe { blocks::rows::<blocks::Portable<F>, R, 2, true>(tile) };
}
