//! Lanes as one AVX-512 register.
#![allow(unsafe_code)]

use super::{Kernel, LANES, Simd};
use std::arch::x86_64::*;

/// A machine with AVX-512; made by [`run`] only.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Runs the kernel with the level's instructions.
///
/// # Safety
/// The machine has them.
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    #[target_feature(
        enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi,avx2,fma,f16c"
    )]
    fn enabled<K: Kernel>(kernel: K) -> K::Output {
        kernel.run(Avx512(()))
    }
    // SAFETY: the caller's promise; an `Isa` of the level is given for these features only.
    unsafe { enabled(kernel) }
}

/// Calls an intrinsic in a method of [`Avx512`].
macro_rules! call {
    ($call:expr) => {
        // SAFETY: a value of `Avx512` exists on machines that have the instruction only, and
        // pointers come from references to arrays of the size that is read or written.
        unsafe { $call }
    };
}

impl Simd for Avx512 {
    type F = __m512;
    const WIDE: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        call!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        call!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> __m512 {
        call!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_e4m3(self, from: &[u8; LANES]) -> __m512 {
        call!({
            // The mantissa and exponent moved to where f16 has them: 2^-8 of the value.
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
            let moved = _mm256_slli_epi16::<7>(wide);
            _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(0xbf80u16 as i16)))
        })
    }

    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32; LANES]) {
        call!(_mm512_storeu_ps(to.as_mut_ptr(), x))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        call!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        call!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        call!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes))
    }

    #[inline(always)]
    fn pow2_of_low_bits(self, x: __m512) -> __m512 {
        call!({
            let biased = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        })
    }
}
