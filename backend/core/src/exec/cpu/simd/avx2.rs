//! Lanes as two AVX2 registers.
#![allow(unsafe_code)]

use super::{Kernel, LANES, Simd};
use std::arch::x86_64::*;

/// A machine with AVX2, fma and f16c; made by [`run`] only.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// The low and the high eight lanes.
#[derive(Clone, Copy)]
pub(in super::super) struct Pair(__m256, __m256);

/// Runs the kernel with the level's instructions.
///
/// # Safety
/// The machine has them.
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn enabled<K: Kernel>(kernel: K) -> K::Output {
        kernel.run(Avx2(()))
    }
    // SAFETY: the caller's promise; an `Isa` of the level is given for these features only.
    unsafe { enabled(kernel) }
}

/// Calls intrinsics in a method of [`Avx2`].
macro_rules! call {
    ($call:expr) => {
        // SAFETY: a value of `Avx2` exists on machines that have the instruction only, and
        // pointers come from references to arrays of the size that is read or written.
        unsafe { $call }
    };
}

impl Simd for Avx2 {
    type F = Pair;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Pair {
        let half = call!(_mm256_set1_ps(x));
        Pair(half, half)
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Pair {
        let at = from.as_ptr();
        call!(Pair(_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> Pair {
        let at: *const __m128i = from.as_ptr().cast();
        call!(Pair(
            _mm256_cvtph_ps(_mm_loadu_si128(at)),
            _mm256_cvtph_ps(_mm_loadu_si128(at.add(1)))
        ))
    }

    #[inline(always)]
    fn load_e4m3(self, from: &[u8; LANES]) -> Pair {
        call!({
            // The mantissa and exponent moved to where f16 has them: 2^-8 of the value.
            let wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(from.as_ptr().cast()));
            let moved = _mm256_slli_epi16::<7>(wide);
            let half = _mm256_and_si256(moved, _mm256_set1_epi16(0xbf80u16 as i16));
            Pair(
                _mm256_cvtph_ps(_mm256_castsi256_si128(half)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half)),
            )
        })
    }

    #[inline(always)]
    fn store(self, x: Pair, to: &mut [f32; LANES]) {
        let at = to.as_mut_ptr();
        call!({
            _mm256_storeu_ps(at, x.0);
            _mm256_storeu_ps(at.add(8), x.1);
        })
    }

    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        call!(Pair(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        call!(Pair(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        call!(Pair(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn div(self, a: Pair, b: Pair) -> Pair {
        call!(Pair(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn mul_add(self, a: Pair, b: Pair, c: Pair) -> Pair {
        call!(Pair(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)))
    }

    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        call!(Pair(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)))
    }

    #[inline(always)]
    fn select_lt(self, a: Pair, b: Pair, yes: Pair, no: Pair) -> Pair {
        call!({
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0);
            let high = _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1);
            Pair(_mm256_blendv_ps(no.0, yes.0, low), _mm256_blendv_ps(no.1, yes.1, high))
        })
    }

    #[inline(always)]
    fn pow2_of_low_bits(self, x: Pair) -> Pair {
        call!({
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_add_epi32(_mm256_castps_si256(x.0), bias);
            let high = _mm256_add_epi32(_mm256_castps_si256(x.1), bias);
            Pair(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            )
        })
    }
}
