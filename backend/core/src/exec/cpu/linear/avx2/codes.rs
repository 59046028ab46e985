//! Formats in blocks: bytes and halves of bytes, with the dot product of bytes where there is one.

use super::super::blocks::{self, Codes, block_words};
use super::super::kernel::{Kernel, Tile};
use super::LANES;
use crate::exec::cpu::Isa;
use crate::exec::cpu::isa::Level;
use crate::model::Dtype;
use std::arch::x86_64::*;
use std::array::from_fn;
use std::marker::PhantomData;

const INT8: [Kernel; 5] = [
    pairs::<1, 8, true>,
    pairs::<2, 4, true>,
    pairs::<3, 2, true>,
    pairs::<4, 2, true>,
    pairs::<5, 2, true>,
];
const INT4: [Kernel; 5] = [
    nibbles::<1, 8, true>,
    nibbles::<2, 4, true>,
    nibbles::<3, 2, true>,
    nibbles::<4, 2, true>,
    nibbles::<5, 2, true>,
];
const INT8_VNNI: [Kernel; 4] = with_vnni::<Vnni<Int8>>();
const INT4_VNNI: [Kernel; 4] = with_vnni::<Vnni<Int4>>();
const INT8_VNNI_512: [Kernel; 4] = with_vnni_512::<Vnni512<Int8>>();
const INT4_VNNI_512: [Kernel; 4] = with_vnni_512::<Vnni512<Int4>>();

const fn with_vnni<C: Codes>() -> [Kernel; 4] {
    [vnni::<C, 1, 8, true>, vnni::<C, 2, 4, true>, vnni::<C, 3, 2, true>, vnni::<C, 4, 2, true>]
}

const fn with_vnni_512<C: Codes>() -> [Kernel; 4] {
    [
        vnni_512::<C, 1, 8, true>,
        vnni_512::<C, 2, 4, true>,
        vnni_512::<C, 3, 2, true>,
        vnni_512::<C, 4, 2, true>,
    ]
}

/// Words of a block's activations, and the kernels.
pub(super) fn kernels(isa: Isa, dtype: Dtype) -> (usize, &'static [Kernel]) {
    let is_int8 = dtype == Dtype::Int8;
    match isa.level() {
        Level::AvxVnni if is_x86_feature_detected!("avxvnni") => {
            (block_words(1), if is_int8 { &INT8_VNNI } else { &INT4_VNNI })
        }
        Level::AvxVnni => (block_words(1), if is_int8 { &INT8_VNNI_512 } else { &INT4_VNNI_512 }),
        _ if is_int8 => (block_words(2), &INT8),
        _ => (block_words(1), &INT4),
    }
}

/// `R` rows of int8, in strips of `V` vectors of outputs.
///
/// # Safety
/// The tile's pointers cover `R` rows, and the machine has the level's features.
#[target_feature(enable = "avx2,fma")]
unsafe fn pairs<const R: usize, const V: usize, const FETCH: bool>(tile: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe { blocks::rows::<Pairs, R, V, FETCH>(tile) };
}

/// `R` rows of int4, in strips of `V` vectors of outputs.
///
/// # Safety
/// As for `pairs`.
#[target_feature(enable = "avx2,fma")]
unsafe fn nibbles<const R: usize, const V: usize, const FETCH: bool>(tile: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe { blocks::rows::<Nibbles, R, V, FETCH>(tile) };
}

/// The same for AVX-VNNI.
///
/// # Safety
/// As for `pairs`.
#[target_feature(enable = "avx2,fma,avxvnni")]
unsafe fn vnni<C: Codes, const R: usize, const V: usize, const FETCH: bool>(tile: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe { blocks::rows::<C, R, V, FETCH>(tile) };
}

/// The same for the AVX-512 encoding of the same instruction.
///
/// # Safety
/// As for `pairs`.
#[target_feature(enable = "avx2,fma,avx512vl,avx512vnni")]
unsafe fn vnni_512<C: Codes, const R: usize, const V: usize, const FETCH: bool>(tile: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe { blocks::rows::<C, R, V, FETCH>(tile) };
}

/// How codes of four inputs of 8 outputs are read from 32 bytes.
trait Stored {
    const DTYPE: Dtype;
    /// # Safety
    /// The machine has AVX2.
    unsafe fn codes(words: __m256i, four: usize) -> __m256i;
}

struct Int8;
struct Int4;

impl Stored for Int8 {
    const DTYPE: Dtype = Dtype::Int8;

    #[inline(always)]
    unsafe fn codes(words: __m256i, _: usize) -> __m256i {
        words
    }
}

impl Stored for Int4 {
    const DTYPE: Dtype = Dtype::Int4;

    #[inline(always)]
    unsafe fn codes(words: __m256i, four: usize) -> __m256i {
        // SAFETY: the level's features.
        unsafe {
            let words = if four == 0 { words } else { _mm256_srli_epi16::<4>(words) };
            _mm256_and_si256(words, _mm256_set1_epi8(0xf))
        }
    }
}

/// Bytes multiplied in pairs of 16 bits: the instruction for bytes would saturate at 16.
struct Pairs;
/// Halves of bytes: the instruction for bytes cannot saturate with them, nor can 16 bits hold all of a block's products.
struct Nibbles;
/// The dot product of bytes, AVX-VNNI.
struct Vnni<F>(PhantomData<F>);
/// The same, AVX-512.
struct Vnni512<F>(PhantomData<F>);

/// `Codes` in vectors of 256 bits: `$name` reads `$format` by `$weights` into `$operand`, takes `$words` words for four
/// activations, multiplies by `$dot` and has `$integers` make 32 bits of its sums.
macro_rules! codes_in_256_bits {
    (
        [$($generic:tt)*] $name:ty, $dtype:expr, $words:expr,
        $operand:ty, $weights:expr, $dot:expr, $integers:expr
    ) => {
        impl $($generic)* Codes for $name {
            const DTYPE: Dtype = $dtype;
            const LEN: usize = LANES;
            const WORDS: usize = $words;
            type Sums = __m256i;
            type Weights = $operand;
            type Activations = [__m256i; $words];
            type Floats = __m256;

            #[inline(always)]
            unsafe fn start(value: i32) -> __m256i {
                // SAFETY: the level's features.
                unsafe { _mm256_set1_epi32(value) }
            }

            #[inline(always)]
            unsafe fn weights(from: *const u8, four: usize) -> $operand {
                // SAFETY: as promised by the caller.
                unsafe { $weights(_mm256_loadu_si256(from.cast()), four) }
            }

            #[inline(always)]
            unsafe fn activations(from: *const u32) -> [__m256i; $words] {
                // SAFETY: as promised by the caller.
                unsafe { from_fn(|i| _mm256_set1_epi32(from.add(i).read() as i32)) }
            }

            #[inline(always)]
            unsafe fn dot(sums: __m256i, w: $operand, x: [__m256i; $words]) -> __m256i {
                // SAFETY: the level's features.
                unsafe { $dot(sums, w, x) }
            }

            #[inline(always)]
            unsafe fn scaled(sums: __m256i, scale: f32) -> __m256 {
                // SAFETY: the level's features.
                unsafe { _mm256_mul_ps(_mm256_cvtepi32_ps($integers(sums)), _mm256_set1_ps(scale)) }
            }

            #[inline(always)]
            unsafe fn splat(value: f32) -> __m256 {
                // SAFETY: the level's features.
                unsafe { _mm256_set1_ps(value) }
            }

            #[inline(always)]
            unsafe fn scales(from: *const u8) -> __m256 {
                // SAFETY: as promised by the caller.
                unsafe {
                    let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
                }
            }

            #[inline(always)]
            unsafe fn load(from: *const f32) -> __m256 {
                // SAFETY: as promised by the caller.
                unsafe { _mm256_loadu_ps(from) }
            }

            #[inline(always)]
            unsafe fn store(to: *mut f32, values: __m256) {
                // SAFETY: as promised by the caller.
                unsafe { _mm256_storeu_ps(to, values) }
            }

            #[inline(always)]
            unsafe fn multiply_add(a: __m256, b: __m256, c: __m256) -> __m256 {
                // SAFETY: the level's features.
                unsafe { _mm256_fmadd_ps(a, b, c) }
            }
        }
    };
}

codes_in_256_bits!(
    [] Pairs, Dtype::Int8, 2, [__m256i; 2],
    |words, _| unsigned_pairs(words), dot_pairs, itself
);
codes_in_256_bits!(
    [] Nibbles, Dtype::Int4, 1, __m256i,
    Int4::codes, dot_nibbles, sums_of_pairs
);
codes_in_256_bits!(
    [<F: Stored>] Vnni<F>, F::DTYPE, 1, __m256i,
    F::codes, |sums, w, [x]: [__m256i; 1]| _mm256_dpbusd_avx_epi32(sums, w, x), itself
);
codes_in_256_bits!(
    [<F: Stored>] Vnni512<F>, F::DTYPE, 1, __m256i,
    F::codes, |sums, w, [x]: [__m256i; 1]| _mm256_dpbusd_epi32(sums, w, x), itself
);

#[inline(always)]
unsafe fn itself(vector: __m256i) -> __m256i {
    vector
}

/// The even and the odd bytes, as 16 bits.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn unsigned_pairs(bytes: __m256i) -> [__m256i; 2] {
    [_mm256_and_si256(bytes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(bytes)]
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn dot_pairs(sums: __m256i, w: [__m256i; 2], x: [__m256i; 2]) -> __m256i {
    let sums = _mm256_add_epi32(sums, _mm256_madd_epi16(w[0], x[0]));
    _mm256_add_epi32(sums, _mm256_madd_epi16(w[1], x[1]))
}

/// Sums of 16 bits, two an output: of a block's eight pairs each at most 8 * 2 * 15 * 127.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn dot_nibbles(sums: __m256i, w: __m256i, [x]: [__m256i; 1]) -> __m256i {
    _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x))
}

#[inline]
#[target_feature(enable = "avx2")]
unsafe fn sums_of_pairs(sums: __m256i) -> __m256i {
    _mm256_madd_epi16(sums, _mm256_set1_epi16(1))
}
