//! Lanes as arrays: correct everywhere, and of a form that compilers vectorise.

use super::{LANES, Simd};

/// No instruction set assumed.
#[derive(Clone, Copy)]
pub(super) struct Portable;

#[derive(Clone, Copy)]
#[repr(align(64))]
pub(in super::super) struct Lanes([f32; LANES]);

/// Whether `f32::mul_add` is an instruction here and not a library call.
const FUSED: bool = cfg!(target_feature = "fma") || cfg!(target_arch = "aarch64");

macro_rules! lanewise {
    (|$($name:ident),+| $value:expr) => {{
        let mut out = [0.0; LANES];
        for lane in 0..LANES {
            $(let $name = $name.0[lane];)+
            out[lane] = $value;
        }
        Lanes(out)
    }};
}

impl Simd for Portable {
    type F = Lanes;
    const WIDE: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        Lanes([x; LANES])
    }

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Lanes {
        Lanes(*from)
    }

    #[inline(always)]
    fn load_f16(self, from: &[u16; LANES]) -> Lanes {
        let mut out = [0.0; LANES];
        for lane in 0..LANES {
            out[lane] = half_to_single(from[lane]);
        }
        Lanes(out)
    }

    #[inline(always)]
    fn load_e4m3(self, from: &[u8; LANES]) -> Lanes {
        let mut out = [0.0; LANES];
        for lane in 0..LANES {
            // The mantissa and exponent moved to where f16 has them: 2^-8 of the value.
            let wide = u16::from(from[lane]);
            out[lane] = half_to_single((wide & 0x80) << 8 | (wide & 0x7f) << 7);
        }
        Lanes(out)
    }

    #[inline(always)]
    fn store(self, x: Lanes, to: &mut [f32; LANES]) {
        *to = x.0;
    }

    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        lanewise!(|a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        lanewise!(|a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        lanewise!(|a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        lanewise!(|a, b| a / b)
    }

    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        lanewise!(|a, b, c| if FUSED { a.mul_add(b, c) } else { a * b + c })
    }

    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        lanewise!(|a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn select_lt(self, a: Lanes, b: Lanes, yes: Lanes, no: Lanes) -> Lanes {
        lanewise!(|a, b, yes, no| if a < b { yes } else { no })
    }

    #[inline(always)]
    fn pow2_of_low_bits(self, x: Lanes) -> Lanes {
        lanewise!(|x| f32::from_bits(x.to_bits().wrapping_add(127) << 23))
    }
}

#[inline(always)]
fn half_to_single(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    // Moves the exponent's bias from 15 to 127, subnormals included; infinity and NaN need their own.
    let finite = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let special = magnitude << 13 | 0x7f80_0000;
    let value = if magnitude < 0x7c00 { finite.to_bits() } else { special };
    f32::from_bits(value | u32::from(bits & 0x8000) << 16)
}
