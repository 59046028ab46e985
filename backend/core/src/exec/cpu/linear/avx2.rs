//! The kernels for AVX2 with FMA and F16C, and for the dot product of bytes beside them. Sixteen registers hold
//! few accumulators, so the 64 outputs are worked in strips; beyond a few rows floats of 16 and 8 bits are expanded
//! to f32 a chunk at a time, in cache.
#![allow(unsafe_code)]

use super::blocks::{self, Codes, block_words};
use super::kernel::{self, Expand, Finish, Kernel, Path, Tile, prefetch_share};
use super::prepare::{self, FP8_SCALE_BITS, Form};
use crate::exec::cpu::Isa;
use crate::exec::cpu::isa::Level;
use crate::model::Dtype;
use crate::model::panel::{GROUP_BYTES, PANEL};
use std::arch::x86_64::*;
use std::array::from_fn;
use std::marker::PhantomData;

/// Outputs in a vector.
const LANES: usize = 8;
/// Vectors of a panel.
const VECTORS: usize = PANEL / LANES;

const FP32: [Kernel; 6] = [
    rows::<Fp32, 1, 8, false>,
    rows::<Fp32, 2, 4, true>,
    rows::<Fp32, 3, 4, true>,
    rows::<Fp32, 4, 2, true>,
    rows::<Fp32, 5, 2, true>,
    rows::<Fp32, 6, 2, true>,
];
const FP16: [Kernel; 5] = few::<Fp16>();
const BF16: [Kernel; 5] = few::<Bf16>();
const FP8: [Kernel; 5] = [
    rows::<Fp8, 1, 8, true>,
    rows::<Fp8, 2, 4, true>,
    rows::<Fp8, 3, 2, true>,
    rows::<Fp8, 4, 2, true>,
    rows::<Fp8, 5, 2, true>,
];
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

const fn few<F: Format>() -> [Kernel; 5] {
    [
        rows::<F, 1, 8, false>,
        rows::<F, 2, 4, true>,
        rows::<F, 3, 4, true>,
        rows::<F, 4, 2, true>,
        rows::<F, 5, 2, true>,
    ]
}

pub(super) fn path(isa: Isa, dtype: Dtype, rows: usize) -> Path {
    let direct = |words: usize, kernels: &'static [Kernel]| Path {
        expand: None,
        expansion: 1,
        words,
        kernels,
        once: if matches!(dtype, Dtype::Int8 | Dtype::Int4) { kernels.len() } else { 1 },
        finish,
    };
    let expanded = |words: usize, expand: Expand| Path {
        expand: Some(expand),
        expansion: words,
        once: 0,
        ..direct(words, &FP32)
    };
    match dtype {
        Dtype::Fp32 => direct(1, &FP32),
        Dtype::Fp16 if rows <= FP16.len() => direct(2, &FP16),
        Dtype::Fp16 => expanded(2, expand::<Fp16>),
        Dtype::Bf16 if rows <= BF16.len() => direct(2, &BF16),
        Dtype::Bf16 => expanded(2, expand::<Bf16>),
        Dtype::Fp8 if rows <= FP8.len() => Path { finish: finish_fp8, ..direct(4, &FP8) },
        Dtype::Fp8 => Path { finish: finish_fp8, ..expanded(4, expand::<Fp8>) },
        Dtype::Int8 | Dtype::Int4 => {
            let is_int8 = dtype == Dtype::Int8;
            match isa.level() {
                Level::AvxVnni if is_x86_feature_detected!("avxvnni") => {
                    direct(block_words(1), if is_int8 { &INT8_VNNI } else { &INT4_VNNI })
                }
                Level::AvxVnni => {
                    direct(block_words(1), if is_int8 { &INT8_VNNI_512 } else { &INT4_VNNI_512 })
                }
                _ if is_int8 => direct(block_words(2), &INT8),
                _ => direct(block_words(1), &INT4),
            }
        }
    }
}

/// # Safety
/// The machine has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn finish(f: &Finish<'_>, out: &mut [f32]) {
    kernel::finish(f, out);
}

/// # Safety
/// The machine has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn finish_fp8(f: &Finish<'_>, out: &mut [f32]) {
    // Weights were read as their 2^-120th, activations prepared as their 2^60-fold.
    let acc = f.acc.map(|acc| acc * (1_u64 << FP8_SCALE_BITS) as f32);
    kernel::finish(&Finish { acc: &acc, ..*f }, out);
}

/// # Safety
/// The machine has the level's features.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn encode(form: Form, x: &[f32], words: &mut [u32]) {
    prepare::encode(form, x, words);
}

/// How the kernels read a stored format of floats. All functions need the level's features.
trait Format {
    /// Parts of a group's inputs that are unpacked on their own, one behind the other.
    const PARTS: usize = 1;
    /// The weights of 8 outputs in a part of a group as f32: one vector for each of its inputs.
    type Vectors: AsRef<[__m256]> + Copy;

    /// Reads the `idx`-th 8 outputs of the group at `w`.
    unsafe fn load(w: *const u8, idx: usize, part: usize) -> Self::Vectors;
}

struct Fp32;
struct Fp16;
struct Bf16;
struct Fp8;

impl Format for Fp32 {
    type Vectors = [__m256; 1];

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(w: *const u8, idx: usize, _: usize) -> [__m256; 1] {
        // SAFETY: the caller's group has 256 bytes.
        [unsafe { _mm256_loadu_ps(w.add(32 * idx).cast()) }]
    }
}

impl Format for Fp16 {
    type Vectors = [__m256; 2];

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn load(w: *const u8, idx: usize, _: usize) -> [__m256; 2] {
        // SAFETY: the caller's group has 256 bytes: 64 halves of one k, then of the next.
        let (first, second) = unsafe {
            let w = w.add(16 * idx);
            (_mm_loadu_si128(w.cast()), _mm_loadu_si128(w.add(GROUP_BYTES / 2).cast()))
        };
        [_mm256_cvtph_ps(first), _mm256_cvtph_ps(second)]
    }
}

impl Format for Bf16 {
    type Vectors = [__m256; 2];

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(w: *const u8, idx: usize, _: usize) -> [__m256; 2] {
        // SAFETY: the caller's group has 256 bytes.
        unsafe { split_pairs(_mm256_loadu_si256(w.add(32 * idx).cast())) }
    }
}

/// Pairs of bfloat16, two k of 8 outputs, as f32 of the one and of the other.
#[inline]
#[target_feature(enable = "avx2")]
fn split_pairs(pairs: __m256i) -> [__m256; 2] {
    let first = _mm256_slli_epi32::<16>(pairs);
    let second = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
    [_mm256_castsi256_ps(first), _mm256_castsi256_ps(second)]
}

impl Format for Fp8 {
    const PARTS: usize = 2;
    type Vectors = [__m256; 2];

    /// The codes' bits where an f32 has its sign, the low end of its exponent and the high end of its mantissa:
    /// their values times 2^-120, those without exponent included. Activations and results are scaled to match.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn load(w: *const u8, idx: usize, part: usize) -> [__m256; 2] {
        // SAFETY: the caller's group has 256 bytes.
        let codes = unsafe { _mm256_loadu_si256(w.add(32 * idx).cast()) };
        let pairs = match part {
            0 => _mm256_unpacklo_epi8(codes, codes),
            _ => _mm256_unpackhi_epi8(codes, codes),
        };
        // The shift copies the sign over the exponent's high bits, and the mask takes them and what lies below.
        let pairs = _mm256_srai_epi16::<4>(pairs);
        [_mm256_slli_epi32::<16>(pairs), pairs]
            .map(|codes| _mm256_and_si256(codes, _mm256_set1_epi32(0x87f0_0000_u32 as i32)))
            .map(|bits| _mm256_castsi256_ps(bits))
    }
}

/// `R` rows of floats, in strips of `V` vectors of outputs; `FETCH`: what comes next.
///
/// # Safety
/// The tile's pointers cover `R` rows, and the machine has the level's features.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<F: Format, const R: usize, const V: usize, const FETCH: bool>(tile: &Tile) {
    let inputs = size_of::<F::Vectors>() / size_of::<__m256>();
    for (strip, first) in (0..VECTORS).step_by(V).enumerate() {
        // SAFETY: accumulators are `[R][64]`, activations have a word for every vector of `F::load` of every
        // group, weights have `units` groups.
        unsafe {
            let acc_at = |r: usize, v: usize| tile.acc.add(r * PANEL + (first + v) * LANES);
            let mut acc = [[_mm256_setzero_ps(); V]; R];
            for (r, acc) in acc.iter_mut().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm256_loadu_ps(acc_at(r, v));
                }
            }
            let (mut w, mut x) = (tile.w, tile.x.cast::<f32>());
            for group in 0..tile.units {
                if FETCH {
                    prefetch_share::<V>(tile.next(group), strip, LANES);
                }
                for part in 0..F::PARTS {
                    let x_at =
                        |r: usize, k: usize| _mm256_set1_ps(x.add(r * tile.stride + k).read());
                    if (inputs + R) * V <= 18 {
                        // The part's weights of the strip fit into registers, or nearly: each activation is read once.
                        let vectors: [_; V] = from_fn(|v| F::load(w, first + v, part));
                        for k in 0..inputs {
                            for (r, acc) in acc.iter_mut().enumerate() {
                                let x = x_at(r, k);
                                for (acc, vectors) in acc.iter_mut().zip(&vectors) {
                                    *acc = _mm256_fmadd_ps(vectors.as_ref()[k], x, *acc);
                                }
                            }
                        }
                    } else {
                        for v in 0..V {
                            let vectors = F::load(w, first + v, part);
                            for (k, w) in vectors.as_ref().iter().enumerate() {
                                for (r, acc) in acc.iter_mut().enumerate() {
                                    acc[v] = _mm256_fmadd_ps(*w, x_at(r, k), acc[v]);
                                }
                            }
                        }
                    }
                    x = x.add(inputs);
                }
                w = w.add(GROUP_BYTES);
            }
            for (r, acc) in acc.iter().enumerate() {
                for (v, acc) in acc.iter().enumerate() {
                    _mm256_storeu_ps(acc_at(r, v), *acc);
                }
            }
        }
    }
}

/// Groups to as many of f32 for each as they have inputs.
///
/// # Safety
/// `src` has `groups` groups, `dst` room for the result, and the machine has the level's features.
#[target_feature(enable = "avx2,f16c")]
unsafe fn expand<F: Format>(src: *const u8, groups: usize, dst: *mut u8) {
    let inputs = size_of::<F::Vectors>() / size_of::<__m256>();
    // SAFETY: as promised by the caller.
    unsafe {
        for group in 0..groups {
            for part in 0..F::PARTS {
                let dst = dst.add((F::PARTS * group + part) * inputs * GROUP_BYTES);
                for idx in 0..VECTORS {
                    let vectors = F::load(src.add(GROUP_BYTES * group), idx, part);
                    for (k, vector) in vectors.as_ref().iter().enumerate() {
                        _mm256_storeu_ps(dst.add(k * GROUP_BYTES + 32 * idx).cast(), *vector);
                    }
                }
            }
        }
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
