//! Sixteen f32 lanes at every instruction set level, so that a kernel is written once.
//!
//! A kernel is a [`Kernel`] whose `run` and everything it calls is `#[inline(always)]`: it is inlined
//! into one function per level that enables the level's instructions. The value of a [`Simd`] type is
//! the proof that the machine has them: only [`dispatch`] makes one.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod math;
mod portable;

use super::isa::{Isa, Level};
pub(super) use math::{exp, pad, prefix, sum};

/// Lanes of a vector.
pub(super) const LANES: usize = 16;

/// Elementwise arithmetic on sixteen f32 lanes. Closures around these calls are not inlined reliably:
/// kernels use plain loops.
pub(super) trait Simd: Copy {
    /// Sixteen f32.
    type F: Copy;
    /// Whether there are registers for 24 accumulators and more (else for 12 half-width ones).
    const WIDE: bool;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, from: &[f32; LANES]) -> Self::F;
    /// IEEE half precision.
    fn load_f16(self, from: &[u16; LANES]) -> Self::F;
    /// e4m3 times 2^-8: the caller folds the power of two into a scale it applies anyway.
    fn load_e4m3(self, from: &[u8; LANES]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; LANES]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, with one rounding where the level has the instruction.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The larger one; `b` where one of them is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `yes` in the lanes where `a < b`, else `no`.
    fn select_lt(self, a: Self::F, b: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// 2^n for the integer n in -126..=127 that stands in the low bits of the f32 bits of `x`.
    fn pow2_of_low_bits(self, x: Self::F) -> Self::F;
}

/// Work that is compiled once per level.
pub(super) trait Kernel {
    type Output;
    /// Implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs the kernel at a level; where an architecture has no such level at all, at the portable one.
pub(super) fn dispatch<K: Kernel>(isa: Isa, kernel: K) -> K::Output {
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa` is proof of the level.
        Level::Avx512 | Level::Amx => unsafe { avx512::run(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a value of `Isa` is proof of the level.
        Level::Avx2 | Level::AvxVnni => unsafe { avx2::run(kernel) },
        _ => kernel.run(portable::Portable),
    }
}
