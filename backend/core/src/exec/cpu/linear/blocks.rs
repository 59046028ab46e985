//! Products of codes whose blocks of inputs have a scale each, weights and activations alike: within a block exact
//! integer sums, between blocks f32. Written once, for the vectors of every level; all give the same bits.
#![allow(unsafe_code)]

use super::kernel::Tile;
use crate::model::Dtype;
use crate::model::panel::{
    BLOCK, GROUP_BYTES, PANEL, SCALES_BYTES, block_groups, group_len, unit_bytes,
};
use std::array::from_fn;
use std::hint::black_box;
use std::marker::PhantomData;

/// Fours of activations of a block.
const FOURS: usize = BLOCK / 4;

/// Words of a block's activations, `words` for four of them: the activations, then the scale as f32, then -128 times the sum
/// of the activations. Sums of int8 start with that, since its stored weights have 128 added.
pub(super) const fn block_words(words: usize) -> usize {
    words * FOURS + 2
}

/// What the sum of a block's activations follows from, of what is stored of it: exactly, in f32 too.
const SUM_FACTOR: f32 = -1.0 / 128.0;

/// Sums whose loop over a block's groups is left for the compiler to unroll.
const MAX_UNROLLED: usize = 7;

/// The arithmetic on as many outputs as a vector holds. Everything is `#[inline(always)]`, into functions that
/// enable the level's instructions.
///
/// # Safety
/// All functions need the level's features, and pointers that cover the vector.
pub(super) trait Codes {
    /// The stored format.
    const DTYPE: Dtype;
    /// Outputs in a vector.
    const LEN: usize;
    /// Words that hold four activations: one of bytes, or two of 16 bits.
    const WORDS: usize;
    /// Sums of a block's products.
    type Sums: Copy;
    /// Four inputs of every output, ready for `dot`.
    type Weights: Copy;
    /// Four activations, ready for `dot`.
    type Activations: Copy;
    /// f32.
    type Floats: Copy;

    /// What sums start with.
    unsafe fn start(value: i32) -> Self::Sums;
    /// The `four`-th four inputs that lie in the `4 * LEN` bytes.
    unsafe fn weights(from: *const u8, four: usize) -> Self::Weights;
    /// From `WORDS` words.
    unsafe fn activations(from: *const u32) -> Self::Activations;
    /// Adds the four products of every output.
    unsafe fn dot(sums: Self::Sums, w: Self::Weights, x: Self::Activations) -> Self::Sums;
    /// As floats, times `scale`.
    unsafe fn scaled(sums: Self::Sums, scale: f32) -> Self::Floats;
    unsafe fn splat(value: f32) -> Self::Floats;
    /// From `LEN` bfloat16.
    unsafe fn scales(from: *const u8) -> Self::Floats;
    unsafe fn load(from: *const f32) -> Self::Floats;
    unsafe fn store(to: *mut f32, values: Self::Floats);
    /// `a * b + c`, rounded once.
    unsafe fn multiply_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
}

/// `R` rows, in strips of `V` vectors of outputs; `FETCH`: what comes next.
///
/// # Safety
/// The tile's pointers cover `R` rows, and the machine has the features of `C`.
#[inline(always)]
pub(super) unsafe fn rows<C: Codes, const R: usize, const V: usize, const FETCH: bool>(
    tile: &Tile,
) {
    // Plain loops over indices: iterators are not unrolled reliably.
    #![allow(clippy::needless_range_loop)]
    let [scale_word, sum_word] = [C::WORDS * FOURS, C::WORDS * FOURS + 1];
    let (block_bytes, num_groups) = (unit_bytes(C::DTYPE), block_groups(C::DTYPE));
    let fours_of_group = group_len(C::DTYPE) / 4;
    let scales_at = num_groups * GROUP_BYTES;
    let has_offset = block_bytes > scales_at + SCALES_BYTES;
    for unit in 0..tile.units {
        let w = tile.w.wrapping_add(unit * block_bytes);
        let first_row = tile.x.wrapping_add(unit * block_words(C::WORDS));
        let rows: [*const u32; R] = from_fn(|r| first_row.wrapping_add(r * tile.stride));
        for (strip, first) in (0..PANEL).step_by(V * C::LEN).enumerate() {
            // With several strips the compiler would load the activations of all at once, for which registers lack.
            let x = if V * C::LEN < PANEL { black_box(rows) } else { rows };
            // SAFETY: accumulators are `[R][64]`, a block has its words of every row, and its groups lie one behind the
            // other, then its scales, then its offsets.
            unsafe {
                let mut sums = [[C::start(0); V]; R];
                if C::DTYPE == Dtype::Int8 {
                    for r in 0..R {
                        sums[r] = [C::start(x[r].add(sum_word).read() as i32); V];
                    }
                }
                // Unrolled, a loop over this many sums has more of them loaded than there are registers.
                let groups = if R * V > MAX_UNROLLED { black_box(num_groups) } else { num_groups };
                for group in 0..groups {
                    if FETCH {
                        tile.fetch.share::<V>(unit, group * GROUP_BYTES, strip, C::LEN);
                    }
                    let w = w.wrapping_add(group * GROUP_BYTES + 4 * first);
                    for four in 0..fours_of_group {
                        let mut weights = [C::weights(w, four); V];
                        for v in 1..V {
                            weights[v] = C::weights(w.wrapping_add(4 * v * C::LEN), four);
                        }
                        for r in 0..R {
                            let x = C::activations(
                                x[r].add(C::WORDS * (group * fours_of_group + four)),
                            );
                            for v in 0..V {
                                sums[r][v] = C::dot(sums[r][v], weights[v], x);
                            }
                        }
                    }
                }
                if FETCH {
                    for line in (scales_at..block_bytes).step_by(64) {
                        tile.fetch.line(unit, line);
                    }
                }
                for v in 0..V {
                    let output = first + v * C::LEN;
                    let scales_of_outputs = w.wrapping_add(scales_at + 2 * output);
                    let scales = C::scales(scales_of_outputs);
                    for r in 0..R {
                        let acc = tile.acc.wrapping_add(r * PANEL + output);
                        let scale = f32::from_bits(x[r].add(scale_word).read());
                        let mut sum =
                            C::multiply_add(C::scaled(sums[r][v], scale), scales, C::load(acc));
                        if has_offset {
                            let stored = x[r].add(sum_word).read() as i32 as f32;
                            let offsets = C::scales(scales_of_outputs.wrapping_add(SCALES_BYTES));
                            let inputs = C::splat(stored * (scale * SUM_FACTOR));
                            sum = C::multiply_add(inputs, offsets, sum);
                        }
                        C::store(acc, sum);
                    }
                }
            }
        }
    }
}

/// Plain Rust, eight outputs at a time.
pub(super) struct Portable<F>(PhantomData<F>);

/// How one output's codes of four inputs are read.
pub(super) trait Stored {
    const DTYPE: Dtype;
    fn codes(word: [u8; 4], four: usize) -> [i32; 4];
}

pub(super) struct Int8;
pub(super) struct Int4;

impl Stored for Int8 {
    const DTYPE: Dtype = Dtype::Int8;

    #[inline(always)]
    fn codes(word: [u8; 4], _: usize) -> [i32; 4] {
        word.map(i32::from)
    }
}

impl Stored for Int4 {
    const DTYPE: Dtype = Dtype::Int4;

    #[inline(always)]
    fn codes(word: [u8; 4], four: usize) -> [i32; 4] {
        word.map(|byte| i32::from(byte >> (4 * four) & 0xf))
    }
}

const LEN: usize = 8;

impl<F: Stored> Codes for Portable<F> {
    const DTYPE: Dtype = F::DTYPE;
    const LEN: usize = LEN;
    const WORDS: usize = 1;
    type Sums = [i32; LEN];
    type Weights = [[i32; 4]; LEN];
    type Activations = [i32; 4];
    type Floats = [f32; LEN];

    #[inline(always)]
    unsafe fn start(value: i32) -> Self::Sums {
        [value; LEN]
    }

    #[inline(always)]
    unsafe fn weights(from: *const u8, four: usize) -> Self::Weights {
        // SAFETY: as promised by the caller.
        let words = unsafe { from.cast::<[[u8; 4]; LEN]>().read() };
        words.map(|word| F::codes(word, four))
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
    unsafe fn scaled(sums: Self::Sums, scale: f32) -> Self::Floats {
        sums.map(|sum| sum as f32 * scale)
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Floats {
        [value; LEN]
    }

    #[inline(always)]
    unsafe fn scales(from: *const u8) -> Self::Floats {
        // SAFETY: as promised by the caller.
        unsafe { from.cast::<[[u8; 2]; LEN]>().read() }.map(crate::model::panel::bf16_value)
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self::Floats {
        // SAFETY: as promised by the caller.
        unsafe { from.cast::<[f32; LEN]>().read() }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, values: Self::Floats) {
        // SAFETY: as promised by the caller.
        unsafe { to.cast::<[f32; LEN]>().write(values) };
    }

    #[inline(always)]
    unsafe fn multiply_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
}
