//! The kernels for AVX-512 with BF16, VNNI and VBMI: 64 outputs are four vectors, so a block of six rows
//! keeps 24 accumulators in registers and reads every weight once.
#![allow(unsafe_code)]

use super::blocks::{self, Codes, block_words};
use super::kernel::{self, Expand, Finish, Kernel, Path, Tile};
use super::prepare::{self, Form};
use crate::model::Dtype;
use crate::model::panel::{GROUP_BYTES, PANEL, e4m3_to_f32};
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// From six rows on the lookup tables leave registers for half of the outputs at a time. Beyond ten rows a
/// chunk is expanded once into cache instead.
const FP8: [Kernel; 10] = [
    rows::<Fp8, 1, 4>,
    rows::<Fp8, 2, 4>,
    rows::<Fp8, 3, 4>,
    rows::<Fp8, 4, 4>,
    rows::<Fp8, 5, 4>,
    rows::<Fp8, 6, 2>,
    rows::<Fp8, 7, 2>,
    rows::<Fp8, 8, 2>,
    rows::<Fp8, 9, 2>,
    rows::<Fp8, 10, 2>,
];
/// Rows of FP8 whose chunk is read once.
const FP8_ONCE: usize = 5;
const INT8: [Kernel; 6] = [
    block_rows::<Int8, 1, 4, false>,
    block_rows::<Int8, 2, 4, true>,
    block_rows::<Int8, 3, 4, true>,
    block_rows::<Int8, 4, 4, true>,
    block_rows::<Int8, 5, 4, true>,
    block_rows::<Int8, 6, 4, true>,
];
/// From five rows on sums, codes and what they are made of leave registers for half of the outputs at a time.
const INT4: [Kernel; 6] = [
    block_rows::<Int4, 1, 4, true>,
    block_rows::<Int4, 2, 4, true>,
    block_rows::<Int4, 3, 4, true>,
    block_rows::<Int4, 4, 4, true>,
    block_rows::<Int4, 5, 2, true>,
    block_rows::<Int4, 6, 2, true>,
];

const fn kernels<F: Format>() -> [Kernel; 6] {
    [
        rows::<F, 1, 4>,
        rows::<F, 2, 4>,
        rows::<F, 3, 4>,
        rows::<F, 4, 4>,
        rows::<F, 5, 4>,
        rows::<F, 6, 4>,
    ]
}

pub(super) fn path(dtype: Dtype, rows: usize) -> Path {
    match dtype {
        Dtype::Fp32 => direct(1, const { &kernels::<Fp32>() }),
        Dtype::Fp16 if rows <= 6 => Path { light: 3, ..direct(2, const { &kernels::<Fp16>() }) },
        Dtype::Fp16 => expanded(expand::<Fp16>, const { &kernels::<Fp32>() }),
        Dtype::Bf16 => direct(1, const { &kernels::<Bf16>() }),
        Dtype::Fp8 if rows <= FP8.len() => Path { once: FP8_ONCE, light: 2, ..direct(2, &FP8) },
        Dtype::Fp8 => expanded_fp8(const { &kernels::<Bf16>() }),
        Dtype::Int8 => direct(block_words(1), &INT8),
        Dtype::Int4 => Path { light: 2, ..direct(block_words(1), &INT4) },
    }
}

/// Kernels that read the stored form, with `words` words of activations a unit.
pub(super) fn direct(words: usize, kernels: &'static [Kernel]) -> Path {
    Path {
        expand: None,
        expansion: 1,
        words,
        kernels,
        once: kernels.len(),
        light: kernels.len(),
        finish,
    }
}

/// Kernels that read each word's weights as a group of its own.
fn expanded(expand: Expand, kernels: &'static [Kernel]) -> Path {
    Path { expand: Some(expand), expansion: 2, words: 2, kernels, once: 0, light: 0, finish }
}

/// Fp8 by kernels for bfloat16.
pub(super) fn expanded_fp8(kernels: &'static [Kernel]) -> Path {
    expanded(expand_fp8, kernels)
}

/// # Safety
/// The machine has the level's features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn finish(f: &Finish<'_>, out: &mut [f32]) {
    kernel::finish(f, out);
}

/// # Safety
/// The machine has the level's features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn encode(form: Form, x: &[f32], words: &mut [u32]) {
    prepare::encode(form, x, words);
}

/// How the kernels read a stored format. All functions need the level's features.
trait Format {
    /// Constants kept in registers.
    type Tables: Copy;
    /// The weights of 16 outputs in a group: one vector for each word of activations.
    type Vectors: AsRef<[__m512i]>;

    unsafe fn tables() -> Self::Tables;
    /// Reads the `quarter`-th 16 outputs of the group at `w`.
    unsafe fn load(tables: Self::Tables, w: *const u8, quarter: usize) -> Self::Vectors;
    /// acc + w * x in every lane.
    unsafe fn dot(acc: __m512i, w: __m512i, x: i32) -> __m512i;
}

struct Fp32;
struct Fp16;
struct Bf16;
struct Fp8;
impl Format for Fp32 {
    type Tables = ();
    type Vectors = [__m512i; 1];

    #[inline]
    unsafe fn tables() {}

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(_: (), w: *const u8, quarter: usize) -> [__m512i; 1] {
        // SAFETY: the caller's group has 256 bytes.
        [unsafe { _mm512_loadu_si512(w.add(64 * quarter).cast()) }]
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn dot(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        let (acc, w) = (_mm512_castsi512_ps(acc), _mm512_castsi512_ps(w));
        _mm512_castps_si512(_mm512_fmadd_ps(w, _mm512_set1_ps(f32::from_bits(x as u32)), acc))
    }
}

impl Format for Fp16 {
    type Tables = ();
    type Vectors = [__m512i; 2];

    #[inline]
    unsafe fn tables() {}

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(_: (), w: *const u8, quarter: usize) -> [__m512i; 2] {
        // SAFETY: the caller's group has 256 bytes: 64 halves of one k, then of the next.
        let (even, odd) = unsafe {
            let w = w.add(32 * quarter);
            (_mm256_loadu_si256(w.cast()), _mm256_loadu_si256(w.add(GROUP_BYTES / 2).cast()))
        };
        [even, odd].map(|half| _mm512_castps_si512(_mm512_cvtph_ps(half)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn dot(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        // SAFETY: same features.
        unsafe { Fp32::dot(acc, w, x) }
    }
}

impl Format for Bf16 {
    type Tables = ();
    type Vectors = [__m512i; 1];

    #[inline]
    unsafe fn tables() {}

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn load(_: (), w: *const u8, quarter: usize) -> [__m512i; 1] {
        // SAFETY: same contract.
        unsafe { Fp32::load((), w, quarter) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn dot(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        // SAFETY: both are 512 bits without invalid values.
        let pairs = |words: __m512i| unsafe { std::mem::transmute::<__m512i, __m512bh>(words) };
        let (w, x) = (pairs(w), pairs(_mm512_set1_epi32(x)));
        _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(acc), w, x))
    }
}

/// How codes of four inputs of 16 outputs are read from 64 bytes.
trait Stored {
    const DTYPE: Dtype;
    /// # Safety
    /// The machine has the level's features.
    unsafe fn codes(words: __m512i, four: usize) -> __m512i;
}

struct Int8;
struct Int4;

impl Stored for Int8 {
    const DTYPE: Dtype = Dtype::Int8;

    #[inline(always)]
    unsafe fn codes(words: __m512i, _: usize) -> __m512i {
        words
    }
}

impl Stored for Int4 {
    const DTYPE: Dtype = Dtype::Int4;

    #[inline(always)]
    unsafe fn codes(words: __m512i, four: usize) -> __m512i {
        // SAFETY: the level's features.
        unsafe {
            let words = if four == 0 { words } else { _mm512_srli_epi16::<4>(words) };
            _mm512_and_si512(words, _mm512_set1_epi8(0xf))
        }
    }
}

/// Codes in vectors of 512 bits.
struct Wide<F>(PhantomData<F>);

impl<F: Stored> Codes for Wide<F> {
    const DTYPE: Dtype = F::DTYPE;
    const LEN: usize = 16;
    const WORDS: usize = 1;
    type Sums = __m512i;
    type Weights = __m512i;
    type Activations = __m512i;
    type Floats = __m512;

    #[inline(always)]
    unsafe fn start(value: i32) -> __m512i {
        // SAFETY: the level's features.
        unsafe { _mm512_set1_epi32(value) }
    }

    #[inline(always)]
    unsafe fn weights(from: *const u8, four: usize) -> __m512i {
        // SAFETY: as promised by the caller.
        unsafe { F::codes(_mm512_loadu_si512(from.cast()), four) }
    }

    #[inline(always)]
    unsafe fn activations(from: *const u32) -> __m512i {
        // SAFETY: as promised by the caller.
        unsafe { _mm512_set1_epi32(from.read() as i32) }
    }

    #[inline(always)]
    unsafe fn dot(sums: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: the level's features.
        unsafe { _mm512_dpbusd_epi32(sums, w, x) }
    }

    #[inline(always)]
    unsafe fn scaled(sums: __m512i, scale: f32) -> __m512 {
        // SAFETY: the level's features.
        unsafe { _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(scale)) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> __m512 {
        // SAFETY: the level's features.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn scales(from: *const u8) -> __m512 {
        // SAFETY: as promised by the caller.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        // SAFETY: as promised by the caller.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(to: *mut f32, values: __m512) {
        // SAFETY: as promised by the caller.
        unsafe { _mm512_storeu_ps(to, values) }
    }

    #[inline(always)]
    unsafe fn multiply_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: the level's features.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
}

/// `R` rows of a format in blocks, `Q` quarters of the outputs at a time.
///
/// # Safety
/// The tile's pointers cover `R` rows, and the machine has the level's features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn block_rows<F: Stored, const R: usize, const Q: usize, const FETCH: bool>(tile: &Tile) {
    // SAFETY: as promised by the caller.
    unsafe { blocks::rows::<Wide<F>, R, Q, FETCH>(tile) };
}

/// The low and the high bytes of the bfloat16 of every e4m3 code without sign.
static BF16_BYTES: [[u8; 128]; 2] = {
    let mut bytes = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        let [_, _, low, high] = e4m3_to_f32(code as u8).to_le_bytes();
        (bytes[0][code], bytes[1][code]) = (low, high);
        code += 1;
    }
    bytes
};

#[derive(Clone, Copy)]
struct Fp8Tables {
    low: [__m512i; 2],
    high: [__m512i; 2],
    sign: __m512i,
}

impl Format for Fp8 {
    type Tables = Fp8Tables;
    type Vectors = [__m512i; 2];

    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn tables() -> Fp8Tables {
        let half = |table: &[u8; 128], i: usize| {
            // SAFETY: the table has two vectors.
            unsafe { _mm512_loadu_si512(table.as_ptr().add(64 * i).cast()) }
        };
        let [low, high] = &BF16_BYTES;
        Fp8Tables {
            low: [half(low, 0), half(low, 1)],
            high: [half(high, 0), half(high, 1)],
            sign: _mm512_set1_epi8(-128),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    unsafe fn load(t: Fp8Tables, w: *const u8, quarter: usize) -> [__m512i; 2] {
        // SAFETY: the caller's group has 256 bytes.
        let codes = unsafe { _mm512_loadu_si512(w.add(64 * quarter).cast()) };
        // The lookup takes the low seven bits of an index.
        let low = _mm512_permutex2var_epi8(t.low[0], codes, t.low[1]);
        let high = _mm512_permutex2var_epi8(t.high[0], codes, t.high[1]);
        // high | (codes & sign)
        let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, t.sign);
        [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn dot(acc: __m512i, w: __m512i, x: i32) -> __m512i {
        // SAFETY: same features.
        unsafe { Bf16::dot(acc, w, x) }
    }
}

/// `R` rows, `Q` quarters of the outputs at a time.
///
/// # Safety
/// The tile's pointers cover `R` rows, and the machine has the level's features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi")]
unsafe fn rows<F: Format, const R: usize, const Q: usize>(tile: &Tile) {
    for first in (0..4).step_by(Q) {
        // SAFETY: as promised by the caller.
        unsafe { strip::<F, R, Q>(tile, first) };
    }
}

/// The quarters `first..first + Q` of the outputs.
///
/// # Safety
/// As for `rows`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi")]
unsafe fn strip<F: Format, const R: usize, const Q: usize>(tile: &Tile, first: usize) {
    let zero = _mm512_setzero_si512();
    let mut acc = [[zero; Q]; R];
    // SAFETY: accumulators are `[R][64]`, activations have a word for every vector of `F::load` of every
    // group, weights have `units` groups.
    unsafe {
        let acc_at = |r: usize, quarter: usize| tile.acc.add(r * PANEL + (first + quarter) * 16);
        for (r, acc) in acc.iter_mut().enumerate() {
            for (quarter, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_loadu_si512(acc_at(r, quarter).cast());
            }
        }
        let tables = F::tables();
        let (mut w, mut x) = (tile.w, tile.x.cast::<i32>());
        for group in 0..tile.units {
            for quarter in 0..Q {
                tile.fetch.line(group, 64 * (first + quarter));
                let vectors = F::load(tables, w, first + quarter);
                for (word, w) in vectors.as_ref().iter().enumerate() {
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let x = x.add(r * tile.stride + word).read();
                        acc[quarter] = F::dot(acc[quarter], *w, x);
                    }
                }
            }
            w = w.add(GROUP_BYTES);
            x = x.add(size_of::<F::Vectors>() / size_of::<__m512i>());
        }
        for (r, acc) in acc.iter().enumerate() {
            for (quarter, acc) in acc.iter().enumerate() {
                _mm512_storeu_si512(acc_at(r, quarter).cast(), *acc);
            }
        }
    }
}

/// Groups of fp8 to twice as many of bfloat16.
///
/// # Safety
/// As for `expand`.
pub(super) unsafe fn expand_fp8(src: *const u8, groups: usize, dst: *mut u8) {
    // SAFETY: as promised by the caller.
    unsafe { expand::<Fp8>(src, groups, dst) };
}

/// Groups to twice as many of those that the format's vectors are.
///
/// # Safety
/// `src` has `groups` groups, `dst` room for the result, and the machine has the level's features.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
unsafe fn expand<F: Format<Vectors = [__m512i; 2]>>(src: *const u8, groups: usize, dst: *mut u8) {
    // SAFETY: as promised by the caller.
    unsafe {
        let tables = F::tables();
        for group in 0..groups {
            let dst = dst.add(2 * GROUP_BYTES * group);
            for quarter in 0..4 {
                let [first, second] = F::load(tables, src.add(GROUP_BYTES * group), quarter);
                _mm512_storeu_si512(dst.add(64 * quarter).cast(), first);
                _mm512_storeu_si512(dst.add(GROUP_BYTES + 64 * quarter).cast(), second);
            }
        }
    }
}
