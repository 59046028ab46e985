//! The number formats of stored keys and values.

use crate::exec::cpu::simd::{LANES, Simd};
use crate::model::Dtype;
use half::f16;
use half::slice::HalfFloatSliceExt;

/// A stored number. Any bits are a valid one.
pub(in super::super) trait Element:
    Copy + Default + Send + Sync + 'static
{
    const DTYPE: Dtype;
    /// What [`Element::load`] must be multiplied by, a power of two.
    const SCALE: f32;

    /// The nearest numbers to those of `from` times `factor`, ties to even; saturates.
    fn encode(from: &[f32], factor: f32, to: &mut [Self]);

    /// Sixteen numbers divided by [`Element::SCALE`].
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::Fp32;
    const SCALE: f32 = 1.0;

    fn encode(from: &[f32], factor: f32, to: &mut [Self]) {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = from * factor;
        }
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F {
        simd.load(from)
    }
}

/// f16 by its bits.
impl Element for u16 {
    const DTYPE: Dtype = Dtype::Fp16;
    const SCALE: f32 = 1.0;

    fn encode(from: &[f32], factor: f32, to: &mut [Self]) {
        let (least, most) = (f16::MIN.to_f32(), f16::MAX.to_f32());
        let mut part = [0.0; LANES];
        for (from, to) in from.chunks(LANES).zip(to.chunks_mut(LANES)) {
            for (clamped, &x) in part.iter_mut().zip(from) {
                *clamped = (x * factor).clamp(least, most);
            }
            let mut halves = [f16::ZERO; LANES];
            halves.convert_from_f32_slice(&part);
            for (to, half) in to.iter_mut().zip(halves) {
                *to = half.to_bits();
            }
        }
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F {
        simd.load_f16(from)
    }
}

/// e4m3 by its bits. NaN is stored as such but read as 480: who must see it looks before it is stored.
impl Element for u8 {
    const DTYPE: Dtype = Dtype::Fp8;
    const SCALE: f32 = 256.0;

    fn encode(from: &[f32], factor: f32, to: &mut [Self]) {
        for (to, &from) in to.iter_mut().zip(from) {
            *to = encode_e4m3(from * factor);
        }
    }

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F {
        simd.load_e4m3(from)
    }
}

fn encode_e4m3(x: f32) -> u8 {
    /// The largest number, 448.
    const MOST: u32 = 0x7e;
    let bits = x.to_bits();
    let (sign, magnitude) = (bits >> 24 & 0x80, bits & 0x7fff_ffff);
    let rounded = if x.is_nan() {
        0x7f
    } else if magnitude < 0x3c80_0000 {
        // Below 2^-6 the spacing is 2^-9, which is that of f32 just above 2^14.
        (f32::from_bits(magnitude) + 16384.0).to_bits() - 16384f32.to_bits()
    } else {
        let to_even = magnitude + 0x7_ffff + (magnitude >> 20 & 1);
        ((to_even >> 20) - (120 << 3)).min(MOST)
    };
    (sign | rounded) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn e4m3_value(bits: u8) -> f64 {
        let magnitude = f64::from(bits & 7) / 8.0;
        let value = match bits >> 3 & 15 {
            0 => magnitude * 2f64.powi(-6),
            exponent => (1.0 + magnitude) * 2f64.powi(i32::from(exponent) - 7),
        };
        if bits & 0x80 == 0 { value } else { -value }
    }

    proptest! {
        #[test]
        fn e4m3_is_the_nearest_number_with_ties_to_even(x in -500f32..500.0, shrink in 0i32..14) {
            let x = x * 2f32.powi(-shrink);
            let found = encode_e4m3(x);
            let error = (e4m3_value(found) - f64::from(x)).abs();
            for other in (0..=255u8).filter(|bits| bits & 0x7f != 0x7f) {
                let distance = (e4m3_value(other) - f64::from(x)).abs();
                prop_assert!(error <= distance, "{x}: {found:#x}, nearer is {other:#x}");
                if error == distance && e4m3_value(other) != e4m3_value(found) {
                    prop_assert!(found & 1 == 0, "{x}: tie to odd {found:#x}");
                }
            }
        }
    }

    #[test]
    fn every_finite_e4m3_survives_a_round_trip() {
        for bits in (0..=255u8).filter(|bits| bits & 0x7f != 0x7f) {
            assert_eq!(encode_e4m3(e4m3_value(bits) as f32), bits);
        }
        // Halfway between two numbers: to the even one.
        assert_eq!(encode_e4m3(1.0625), encode_e4m3(1.0));
        assert_eq!(encode_e4m3(1.1875), encode_e4m3(1.25));
    }

    #[test]
    fn what_is_too_large_saturates_and_nan_stays_nan() {
        assert_eq!(encode_e4m3(1e9), 0x7e);
        assert_eq!(encode_e4m3(f32::NEG_INFINITY), 0xfe);
        assert_eq!(encode_e4m3(f32::NAN) & 0x7f, 0x7f);
        let mut halves = [0u16; 3];
        Element::encode(&[1e9, -1e9, f32::NAN], 1.0, &mut halves);
        assert_eq!(f16::from_bits(halves[0]), f16::MAX);
        assert_eq!(f16::from_bits(halves[1]), f16::MIN);
        assert!(f16::from_bits(halves[2]).is_nan());
    }
}
