//! The kernels for AVX2 with FMA and F16C. Weights of 16 and 8-bit floats are expanded to f32 a chunk at a
//! time, in cache; 16 registers hold 8 to 12 accumulators, so the 64 outputs are worked in strips.
#![allow(unsafe_code)]

use super::kernel::{self, Block, Finish, Kernel, Path};
use super::prepare::{self, Form};
use crate::model::Dtype;
use crate::model::panel::{GROUP_BYTES, PANEL, e4m3_to_f32, group_len};
use std::arch::x86_64::*;

/// Outputs in a vector.
const LANES: usize = 8;

const F32: [Kernel; 6] = [
    rows::<F32Dot, 1, 8>,
    rows::<F32Dot, 2, 4>,
    rows::<F32Dot, 3, 4>,
    rows::<F32Dot, 4, 2>,
    rows::<F32Dot, 5, 2>,
    rows::<F32Dot, 6, 2>,
];
const INT8: [Kernel; 4] =
    [rows::<Int8Dot, 1, 8>, rows::<Int8Dot, 2, 4>, rows::<Int8Dot, 3, 2>, rows::<Int8Dot, 4, 2>];

pub(super) fn path(dtype: Dtype) -> Path {
    let expand: Option<unsafe fn(*const u8, usize, *mut u8)> = match dtype {
        Dtype::Fp32 | Dtype::Int8 => None,
        Dtype::Fp16 => Some(expand_fp16),
        Dtype::Bf16 => Some(expand_bf16),
        Dtype::Fp8 => Some(expand_fp8),
    };
    let expansion = if expand.is_some() { group_len(dtype) } else { 1 };
    let kernels: &'static [Kernel] = if dtype == Dtype::Int8 { &INT8 } else { &F32 };
    Path { expand, expansion, words: expansion, is_streamed: false, kernels, finish }
}

/// # Safety
/// The machine has AVX2.
#[target_feature(enable = "avx2")]
unsafe fn finish(f: &Finish<'_>, out: &mut [f32]) {
    kernel::finish(f, out);
}

/// # Safety
/// The machine has the level's features.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn encode(form: Form, x: &[f32], words: &mut [u32]) {
    prepare::encode(form, x, words);
}

/// acc + w * x in every lane. All functions need the level's features.
trait Dot {
    /// A word of activations, ready for `dot`.
    type X: Copy;
    unsafe fn x(word: u32) -> Self::X;
    unsafe fn dot(acc: __m256i, w: __m256i, x: Self::X) -> __m256i;
}

struct F32Dot;
struct Int8Dot;

impl Dot for F32Dot {
    type X = __m256;

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn x(word: u32) -> __m256 {
        _mm256_set1_ps(f32::from_bits(word))
    }

    #[inline]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn dot(acc: __m256i, w: __m256i, x: __m256) -> __m256i {
        let (acc, w) = (_mm256_castsi256_ps(acc), _mm256_castsi256_ps(w));
        _mm256_castps_si256(_mm256_fmadd_ps(w, x, acc))
    }
}

impl Dot for Int8Dot {
    /// The even and the odd bytes, as 16 bits.
    type X = [__m256i; 2];

    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn x(word: u32) -> [__m256i; 2] {
        let bytes = _mm256_set1_epi32(word as i32);
        [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(bytes)), _mm256_srai_epi16::<8>(bytes)]
    }

    /// Products of bytes are summed in 32 bits: the byte instruction would saturate at 16.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn dot(acc: __m256i, w: __m256i, x: [__m256i; 2]) -> __m256i {
        let even = _mm256_and_si256(w, _mm256_set1_epi16(0xff));
        let odd = _mm256_srli_epi16::<8>(w);
        let (even, odd) = (_mm256_madd_epi16(even, x[0]), _mm256_madd_epi16(odd, x[1]));
        _mm256_add_epi32(acc, _mm256_add_epi32(even, odd))
    }
}

/// `R` rows, in strips of `V` vectors of outputs.
///
/// # Safety
/// The block's pointers cover `R` rows, and the machine has the level's features.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn rows<D: Dot, const R: usize, const V: usize>(block: &Block) {
    for first in (0..PANEL).step_by(V * LANES) {
        // SAFETY: accumulators are `[R][64]`, activations have a word for every group, weights have
        // `groups` groups; a prefetch may be of any address.
        unsafe {
            let acc_at = |r: usize, v: usize| block.acc.add(r * PANEL + first + v * LANES);
            let mut acc = [[_mm256_setzero_si256(); V]; R];
            for (r, acc) in acc.iter_mut().enumerate() {
                for (v, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm256_loadu_si256(acc_at(r, v).cast());
                }
            }
            for group in 0..block.groups {
                if first == 0 {
                    let next = block.next.wrapping_add(group * block.next_step);
                    for line in 0..4 {
                        _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(64 * line).cast());
                    }
                }
                let w = block.w.add(group * GROUP_BYTES + first * 4);
                let mut weights = [_mm256_setzero_si256(); V];
                for (v, weights) in weights.iter_mut().enumerate() {
                    *weights = _mm256_loadu_si256(w.add(v * LANES * 4).cast());
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = D::x(block.x.add(r * block.stride + group).read());
                    for (acc, w) in acc.iter_mut().zip(weights) {
                        *acc = D::dot(*acc, w, x);
                    }
                }
            }
            for (r, acc) in acc.iter().enumerate() {
                for (v, acc) in acc.iter().enumerate() {
                    _mm256_storeu_si256(acc_at(r, v).cast(), *acc);
                }
            }
        }
    }
}

/// # Safety
/// `src` has `groups` groups, `dst` room for twice as many, and the machine has the level's features.
#[target_feature(enable = "avx2,f16c")]
unsafe fn expand_fp16(src: *const u8, groups: usize, dst: *mut u8) {
    // A stored group is the halves of two k one after the other, as is its expansion.
    for i in 0..groups * GROUP_BYTES / 16 {
        // SAFETY: as promised by the caller.
        unsafe {
            let halves = _mm_loadu_si128(src.add(16 * i).cast());
            _mm256_storeu_ps(dst.add(32 * i).cast(), _mm256_cvtph_ps(halves));
        }
    }
}

/// Pairs of bfloat16, two k of 8 outputs, to f32 in the expanded groups of the two k.
///
/// # Safety
/// `dst` has room for 32 bytes there and a group on.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store_pairs(pairs: __m256i, dst: *mut u8) {
    // SAFETY: as promised by the caller.
    unsafe {
        _mm256_storeu_si256(dst.cast(), _mm256_slli_epi32::<16>(pairs));
        let second = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        _mm256_storeu_si256(dst.add(GROUP_BYTES).cast(), second);
    }
}

/// # Safety
/// `src` has `groups` groups, `dst` room for twice as many, and the machine has the level's features.
#[target_feature(enable = "avx2")]
unsafe fn expand_bf16(src: *const u8, groups: usize, dst: *mut u8) {
    for group in 0..groups {
        for offset in (0..GROUP_BYTES).step_by(32) {
            // SAFETY: as promised by the caller.
            unsafe {
                let pairs = _mm256_loadu_si256(src.add(group * GROUP_BYTES + offset).cast());
                store_pairs(pairs, dst.add(2 * group * GROUP_BYTES + offset));
            }
        }
    }
}

/// Bytes of bfloat16, twice 16 for the two lanes of a lookup: the low and high bytes of the codes 0 to 15,
/// and the high bytes of the codes 0, 16, ..., 112. From code 16 on the low byte is the code's low four bits, moved up.
static LOW_OF_FIRST: [u8; 16] = lookup(2, 1);
static HIGH_OF_FIRST: [u8; 16] = lookup(3, 1);
static HIGH_BY_UPPER: [u8; 16] = lookup(3, 16);

const fn lookup(byte: usize, step: usize) -> [u8; 16] {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 && i * step < 128 {
        table[i] = e4m3_to_f32((i * step) as u8).to_le_bytes()[byte];
        i += 1;
    }
    table
}

/// # Safety
/// `src` has `groups` groups, `dst` room for four times as many, and the machine has the level's features.
#[target_feature(enable = "avx2")]
unsafe fn expand_fp8(src: *const u8, groups: usize, dst: *mut u8) {
    let both_lanes = |table: &[u8; 16]| {
        // SAFETY: 16 bytes, no alignment needed.
        _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
    };
    let low_of_first = both_lanes(&LOW_OF_FIRST);
    let high_of_first = both_lanes(&HIGH_OF_FIRST);
    let high_by_upper = both_lanes(&HIGH_BY_UPPER);
    let (nibble, sign) = (_mm256_set1_epi8(15), _mm256_set1_epi8(-128));
    let nan = _mm256_set1_epi8(0x7f);
    for group in 0..groups {
        for part in 0..GROUP_BYTES / 32 {
            // SAFETY: as promised by the caller.
            let codes =
                unsafe { _mm256_loadu_si256(src.add(group * GROUP_BYTES + 32 * part).cast()) };
            let magnitude = _mm256_andnot_si256(sign, codes);
            let lower = _mm256_and_si256(codes, nibble);
            let upper = _mm256_and_si256(_mm256_srli_epi16::<4>(magnitude), nibble);
            let is_first = _mm256_cmpeq_epi8(upper, _mm256_setzero_si256());
            let is_nan = _mm256_cmpeq_epi8(magnitude, nan);
            let low = _mm256_blendv_epi8(
                _mm256_slli_epi16::<4>(lower),
                _mm256_shuffle_epi8(low_of_first, lower),
                is_first,
            );
            let high = _mm256_blendv_epi8(
                _mm256_shuffle_epi8(high_by_upper, upper),
                _mm256_shuffle_epi8(high_of_first, lower),
                is_first,
            );
            let high = _mm256_or_si256(high, _mm256_and_si256(is_nan, nan));
            let high = _mm256_or_si256(high, _mm256_and_si256(codes, sign));
            // SAFETY: as promised by the caller; 32 codes are four k of 8 outputs.
            unsafe {
                let dst = dst.add(4 * group * GROUP_BYTES + 32 * part);
                store_pairs(_mm256_unpacklo_epi8(low, high), dst);
                store_pairs(_mm256_unpackhi_epi8(low, high), dst.add(2 * GROUP_BYTES));
            }
        }
    }
}
