//! The kernels for AVX2 with FMA and F16C; in `codes` those of formats in blocks, with the dot product of bytes too. Sixteen registers hold
//! few accumulators, so the 64 outputs are worked in strips; beyond a few rows floats of 16 and 8 bits are expanded
//! to f32 a chunk at a time, in cache.
#![allow(unsafe_code)]

mod codes;

use super::fetch::LINE_BYTES;
use super::kernel::{self, Expand, Finish, Kernel, Path, Tile};
use super::prepare::{self, FP8_SCALE_BITS, Form};
use crate::exec::cpu::Isa;
use crate::model::Dtype;
use crate::model::panel::{GROUP_BYTES, PANEL};
use std::arch::x86_64::*;

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
    let in_blocks = matches!(dtype, Dtype::Int8 | Dtype::Int4);
    let direct = |words: usize, kernels: &'static [Kernel]| Path {
        expand: None,
        expansion: 1,
        words,
        kernels,
        once: if in_blocks { kernels.len() } else { 1 },
        light: in_blocks.into(),
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
            let (words, kernels) = codes::kernels(isa, dtype);
            direct(words, kernels)
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

    /// Reads the `idx`-th 8 outputs of the group at `w`. Neither this nor its callers go through `map` or `from_fn` of arrays:
    /// these lack the level's features, and the compiler left this a call in them, which took three times as long.
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
        let mask = _mm256_set1_epi32(0x87f0_0000_u32 as i32);
        let first = _mm256_and_si256(_mm256_slli_epi32::<16>(pairs), mask);
        let second = _mm256_and_si256(pairs, mask);
        [_mm256_castsi256_ps(first), _mm256_castsi256_ps(second)]
    }
}

/// `R` rows of floats, in strips of `V` vectors of outputs; `FETCH`: what comes next.
///
/// # Safety
/// The tile's pointers cover `R` rows, and the machine has the level's features.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<F: Format, const R: usize, const V: usize, const FETCH: bool>(tile: &Tile) {
    // Plain loops over indices: iterators are not unrolled reliably.
    #![allow(clippy::needless_range_loop)]
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
            let fetch = tile.fetch.strip(strip, VECTORS / V, tile.units);
            for group in 0..tile.units {
                if FETCH {
                    for line in 0..GROUP_BYTES * V / VECTORS / LINE_BYTES {
                        fetch.line(group, LINE_BYTES * line);
                    }
                }
                for part in 0..F::PARTS {
                    let x_at =
                        |r: usize, k: usize| _mm256_set1_ps(x.add(r * tile.stride + k).read());
                    // Whichever takes fewer registers beside the accumulators.
                    if V <= R {
                        // The part's weights are held, and each activation is read once.
                        let mut vectors = [F::load(w, first, part); V];
                        for v in 1..V {
                            vectors[v] = F::load(w, first + v, part);
                        }
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
