//! Functions on lanes that are built from the elementwise ones.

use super::{LANES, Simd};

/// Below this the exponential is 0: the results would be subnormal.
const EXP_UNDERFLOW: f32 = -87.336_54;
/// 1.5 * 2^23: adding it to an f32 of small magnitude leaves the nearest integer in the low bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has so few bits that its product with an exponent is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Minimax polynomial of (e^r - 1 - r) / r^2 on -ln 2 / 2 ..= ln 2 / 2, highest power first.
const EXP_POLY: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// e^x for x up to 88, within 2 ulp. 0 below -87.34, exactly 0 at negative infinity, NaN at NaN.
#[inline(always)]
pub(in super::super) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // x = n ln 2 + r; the low bits of `shifted` hold n.
    let shifted = s.mul_add(x, s.splat(std::f32::consts::LOG2_E), s.splat(ROUND));
    let n = s.sub(shifted, s.splat(ROUND));
    let r = s.mul_add(n, s.splat(-LN2_HIGH), x);
    let r = s.mul_add(n, s.splat(-LN2_LOW), r);
    let mut poly = s.splat(EXP_POLY[0]);
    for &coefficient in &EXP_POLY[1..] {
        poly = s.mul_add(poly, r, s.splat(coefficient));
    }
    let tail = s.mul_add(poly, s.mul(r, r), r);
    let power = s.pow2_of_low_bits(shifted);
    let value = s.mul(s.add(tail, s.splat(1.0)), power);
    s.select_lt(x, s.splat(EXP_UNDERFLOW), s.splat(0.0), value)
}

/// `x` in the first `len` lanes, `fill` in the others whatever `x` has there.
#[inline(always)]
pub(in super::super) fn prefix<S: Simd>(s: S, len: usize, x: S::F, fill: f32) -> S::F {
    const LANE: [f32; LANES] =
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
    s.select_lt(s.load(&LANE), s.splat(len as f32), x, s.splat(fill))
}

/// The sum of the lanes, always in the same order.
#[inline(always)]
pub(in super::super) fn sum<S: Simd>(s: S, x: S::F) -> f32 {
    let mut lanes = [0.0; LANES];
    s.store(x, &mut lanes);
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Fewer than sixteen values, zeros behind them.
#[inline(always)]
pub(in super::super) fn pad(values: &[f32]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    lanes[..values.len()].copy_from_slice(values);
    lanes
}

#[cfg(test)]
mod tests {
    use super::super::{Kernel, dispatch};
    use super::*;
    use crate::exec::cpu::isa::Isa;

    struct Exp([f32; LANES]);

    impl Kernel for Exp {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Output {
            let mut out = [0.0; LANES];
            s.store(exp(s, s.load(&self.0)), &mut out);
            out
        }
    }

    /// Distance in units of the last place of the exact value.
    fn ulps(found: f32, exact: f64) -> f64 {
        let ulp = f64::from(f32::EPSILON) * 2f64.powi(exact.log2().floor() as i32);
        (f64::from(found) - exact).abs() / ulp
    }

    #[test]
    fn exp_is_within_two_ulps_over_its_range() {
        for isa in Isa::supported() {
            let mut worst = 0f64;
            let mut step = 0;
            while step < 400_000 {
                let mut x = [0.0; LANES];
                for (lane, value) in x.iter_mut().enumerate() {
                    *value = -87.33 + (step + lane) as f32 * (175.33 / 400_000.0);
                }
                for (&x, found) in x.iter().zip(dispatch(isa, Exp(x))) {
                    worst = worst.max(ulps(found, f64::from(x).exp()));
                }
                step += LANES;
            }
            assert!(worst <= 2.0, "{isa:?}: {worst} ulps");
        }
    }

    #[test]
    fn exp_is_exact_at_the_edges() {
        let mut x = [0.0f32; LANES];
        x[1] = f32::NEG_INFINITY;
        x[2] = f32::NAN;
        x[3] = -1e30;
        x[4] = -0.0;
        x[5] = -87.4;
        x[6] = f32::MIN;
        for isa in Isa::supported() {
            let out = dispatch(isa, Exp(x));
            assert_eq!(out[0].to_bits(), 1f32.to_bits(), "{isa:?}");
            assert_eq!(out[4].to_bits(), 1f32.to_bits(), "{isa:?}");
            assert!(out[2].is_nan(), "{isa:?}");
            for zero in [1, 3, 5, 6] {
                assert_eq!(out[zero].to_bits(), 0, "{isa:?}: exp({})", x[zero]);
            }
        }
    }

    struct Prefix(usize, [f32; LANES]);

    impl Kernel for Prefix {
        type Output = f32;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> f32 {
            sum(s, prefix(s, self.0, s.load(&self.1), 0.0))
        }
    }

    #[test]
    fn a_prefix_hides_what_lies_behind_it() {
        for isa in Isa::supported() {
            for len in 0..=LANES {
                let mut x = [f32::NAN; LANES];
                x[..len].fill(1.0);
                assert_eq!(dispatch(isa, Prefix(len, x)), len as f32, "{isa:?}");
            }
        }
    }

    struct Decode([u16; LANES], [u8; LANES]);

    impl Kernel for Decode {
        type Output = ([f32; LANES], [f32; LANES]);

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Self::Output {
            let (mut half, mut e4m3) = ([0.0; LANES], [0.0; LANES]);
            s.store(s.load_f16(&self.0), &mut half);
            s.store(s.load_e4m3(&self.1), &mut e4m3);
            (half, e4m3)
        }
    }

    #[test]
    fn every_f16_and_every_finite_e4m3_is_decoded_exactly() {
        for isa in Isa::supported() {
            for base in (0..=u16::MAX).step_by(LANES) {
                let (mut half, mut e4m3) = ([0; LANES], [0; LANES]);
                for lane in 0..LANES {
                    half[lane] = base + lane as u16;
                    e4m3[lane] = half[lane] as u8;
                }
                let (f, g) = dispatch(isa, Decode(half, e4m3));
                for lane in 0..LANES {
                    let exact = half::f16::from_bits(half[lane]).to_f32();
                    assert!(
                        f[lane].to_bits() == exact.to_bits() || f[lane].is_nan() && exact.is_nan(),
                        "{isa:?}: {:#x} is {}, not {exact}",
                        half[lane],
                        f[lane]
                    );
                    if e4m3[lane] & 0x7f != 0x7f {
                        assert_eq!(f64::from(g[lane]) * 256.0, e4m3_value(e4m3[lane]), "{isa:?}");
                    }
                }
            }
        }
    }

    /// The definition: sign, exponent with bias 7, three mantissa bits, no infinities.
    fn e4m3_value(bits: u8) -> f64 {
        let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
        let exponent = i32::from(bits >> 3 & 15);
        let mantissa = f64::from(bits & 7) / 8.0;
        sign * match exponent {
            0 => mantissa * 2f64.powi(-6),
            _ => (1.0 + mantissa) * 2f64.powi(exponent - 7),
        }
    }
}
