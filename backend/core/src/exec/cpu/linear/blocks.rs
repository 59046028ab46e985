//! Products of bytes whose blocks of inputs have a scale each, weights and activations alike: within a block exact
//! integer sums, between blocks f32. Written once, for the vectors of every level; all give the same bits.
#![allow(unsafe_code)]

use super::kernel::{Tile, prefetch, prefetch_share};
use crate::model::panel::{BLOCK_BYTES, BLOCK_GROUPS, GROUP_BYTES, PANEL};
use std::array::from_fn;
use std::hint::black_box;

/// Words of a block's activations, `words` for four of them: the activations, then the scale as f32, then what the sums
/// start with. Stored weights have 128 added: -128 times the sum of the activations takes it off.
pub(super) const fn block_words(words: usize) -> usize {
    words * BLOCK_GROUPS + 2
}

/// Sums whose loop over a block's groups is left for the compiler to unroll.
const MAX_UNROLLED: usize = 8;

/// The arithmetic on as many outputs as a vector holds. Everything is `#[inline(always)]`, into functions that
/// enable the level's instructions.
///
/// # Safety
/// All functions need the level's features, and pointers that cover the vector.
pub(super) trait Bytes {
    /// Outputs in a vector.
    const LEN: usize;
    /// Words that hold four activations: one of bytes, or two of 16 bits.
    const WORDS: usize;
    /// Sums of products, i32.
    type Sums: Copy;
    /// Four inputs of every output, ready for `dot`.
    type Weights: Copy;
    /// Four activations, ready for `dot`.
    type Activations: Copy;
    /// Scales of the outputs, f32.
    type Scales: Copy;

    unsafe fn splat(value: i32) -> Self::Sums;
    /// From `4 * LEN` bytes.
    unsafe fn weights(from: *const u8) -> Self::Weights;
    /// From `WORDS` words.
    unsafe fn activations(from: *const u32) -> Self::Activations;
    /// Adds the four products of every output.
    unsafe fn dot(sums: Self::Sums, w: Self::Weights, x: Self::Activations) -> Self::Sums;
    /// From `LEN` bfloat16.
    unsafe fn scales(from: *const u8) -> Self::Scales;
    /// `acc + (sums * scale) * scales`, the last product and the sum rounded once.
    unsafe fn accumulate(acc: *mut f32, sums: Self::Sums, scale: f32, scales: Self::Scales);
}

/// `R` rows, in strips of `V` vectors of outputs; `FETCH`: what comes next.
///
/// # Safety
/// The tile's pointers cover `R` rows, and the machine has the features of `B`.
#[inline(always)]
pub(super) unsafe fn rows<B: Bytes, const R: usize, const V: usize, const FETCH: bool>(
    tile: &Tile,
) {
    // Plain loops over indices: iterators are not unrolled reliably.
    #![allow(clippy::needless_range_loop)]
    let [scale_word, start_word] = [B::WORDS * BLOCK_GROUPS, B::WORDS * BLOCK_GROUPS + 1];
    for unit in 0..tile.units {
        let (w, next) = (tile.w.wrapping_add(unit * BLOCK_BYTES), tile.next(unit));
        let first_row = tile.x.wrapping_add(unit * block_words(B::WORDS));
        let rows: [*const u32; R] = from_fn(|r| first_row.wrapping_add(r * tile.stride));
        for (strip, first) in (0..PANEL).step_by(V * B::LEN).enumerate() {
            // With several strips the compiler would load the activations of all at once, for which registers lack.
            let x = if V * B::LEN < PANEL { black_box(rows) } else { rows };
            // SAFETY: accumulators are `[R][64]`, a block has its words of every row, and its groups lie one behind the
            // other, then its scales.
            unsafe {
                let mut sums = [[B::splat(0); V]; R];
                for r in 0..R {
                    sums[r] = [B::splat(x[r].add(start_word).read() as i32); V];
                }
                // Unrolled, a loop over this many sums has more of them loaded than there are registers.
                let groups =
                    if R * V > MAX_UNROLLED { black_box(BLOCK_GROUPS) } else { BLOCK_GROUPS };
                for group in 0..groups {
                    if FETCH {
                        prefetch_share::<V>(next.wrapping_add(group * GROUP_BYTES), strip, B::LEN);
                    }
                    let w = w.wrapping_add(group * GROUP_BYTES + 4 * first);
                    let mut weights = [B::weights(w); V];
                    for v in 1..V {
                        weights[v] = B::weights(w.wrapping_add(4 * v * B::LEN));
                    }
                    for r in 0..R {
                        let x = B::activations(x[r].add(B::WORDS * group));
                        for v in 0..V {
                            sums[r][v] = B::dot(sums[r][v], weights[v], x);
                        }
                    }
                }
                let scales = BLOCK_GROUPS * GROUP_BYTES;
                if FETCH {
                    for line in (scales..BLOCK_BYTES).step_by(64) {
                        prefetch(next.wrapping_add(line));
                    }
                }
                for v in 0..V {
                    let output = first + v * B::LEN;
                    let scales = B::scales(w.wrapping_add(scales + 2 * output));
                    for r in 0..R {
                        let acc = tile.acc.wrapping_add(r * PANEL + output);
                        let scale = f32::from_bits(x[r].add(scale_word).read());
                        B::accumulate(acc, sums[r][v], scale, scales);
                    }
                }
            }
        }
    }
}

/// Plain Rust, eight outputs at a time.
pub(super) struct Portable;

const LEN: usize = 8;

impl Bytes for Portable {
    const LEN: usize = LEN;
    const WORDS: usize = 1;
    type Sums = [i32; LEN];
    type Weights = [[i32; 4]; LEN];
    type Activations = [i32; 4];
    type Scales = [f32; LEN];

    #[inline(always)]
    unsafe fn splat(value: i32) -> Self::Sums {
        [value; LEN]
    }

    #[inline(always)]
    unsafe fn weights(from: *const u8) -> Self::Weights {
        // SAFETY: as promised by the caller.
        let bytes = unsafe { from.cast::<[[u8; 4]; LEN]>().read() };
        bytes.map(|bytes| bytes.map(i32::from))
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32) -> Self::Activations {
        // SAFETY: as promised by the caller.
        unsafe { from.read() }.to_le_bytes().map(|byte| i32::from(byte as i8))
    }

    #[inline(always)]
    unsafe fn dot(sums: Self::Sums, w: Self::Weights, x: Self::Activations) -> Self::Sums {
        from_fn(|i| sums[i] + w[i].iter().zip(x).map(|(w, x)| w * x).sum::<i32>())
    }

    #[inline(always)]
    unsafe fn scales(from: *const u8) -> Self::Scales {
        // SAFETY: as promised by the caller.
        unsafe { from.cast::<[[u8; 2]; LEN]>().read() }.map(crate::model::panel::bf16_value)
    }

    #[inline(always)]
    unsafe fn accumulate(acc: *mut f32, sums: Self::Sums, scale: f32, scales: Self::Scales) {
        // SAFETY: as promised by the caller.
        let acc = unsafe { &mut *acc.cast::<[f32; LEN]>() };
        for (acc, (sum, scale_of_output)) in acc.iter_mut().zip(sums.iter().zip(scales)) {
            *acc = (*sum as f32 * scale).mul_add(scale_of_output, *acc);
        }
    }
}
