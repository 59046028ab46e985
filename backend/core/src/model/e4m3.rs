//! The 8-bit float e4m3fn: sign, four exponent bits (bias 7), three of mantissa; no infinities, and NaN
//! is all ones under the sign. The largest value is 448, the smallest above zero 2^-9.

/// The largest finite value.
pub const E4M3_MAX: f32 = 448.0;

/// The nearest e4m3 value, ties to even; what is beyond ±448 becomes ±448, NaN stays NaN.
#[inline(always)]
pub fn f32_to_e4m3(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs().min(E4M3_MAX);
    let bits = magnitude.to_bits();
    // Normal: round the mantissa to three bits in place, then move the exponent bias from 127 to 7.
    let rounded = bits.wrapping_add(0x7ffff + ((bits >> 20) & 1)) >> 20;
    let normal = rounded.wrapping_sub(120 << 3);
    // Subnormal: 2^14 has an ulp of 2^-9, so the addition rounds to the subnormal step.
    let subnormal = (magnitude + 16384.0).to_bits().wrapping_sub(16384f32.to_bits());
    let code = if magnitude < 0.015625 { subnormal } else { normal };
    let code = if x.is_nan() { 0x7f } else { code };
    sign | code as u8
}

/// The value of an e4m3 byte, exactly.
pub(crate) const fn e4m3_to_f32(b: u8) -> f32 {
    let sign = (b as u32 & 0x80) << 24;
    let exponent = (b as u32 >> 3) & 15;
    let mantissa = b as u32 & 7;
    let magnitude = if b & 0x7f == 0x7f {
        f32::NAN
    } else if exponent == 0 {
        mantissa as f32 / 512.0
    } else {
        f32::from_bits((exponent + 120) << 23 | mantissa << 20)
    };
    f32::from_bits(magnitude.to_bits() | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition, in f64: the nearest of all finite codes, ties to the even code.
    fn naive(x: f32) -> u8 {
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        if x.is_nan() {
            return sign | 0x7f;
        }
        let distance = |code: u8| (f64::from(e4m3_to_f32(code)) - f64::from(x.abs())).abs();
        let best = (0..0x7f_u8)
            .min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
            .expect("the range is not empty");
        sign | best
    }

    #[test]
    fn every_code_survives_a_round_trip() {
        for code in 0..=255_u8 {
            assert_eq!(f32_to_e4m3(e4m3_to_f32(code)), code, "code {code:#x}");
        }
    }

    #[test]
    fn known_values_decode() {
        for (code, value) in
            [(0x7e, 448.0), (0x08, 0.015625), (0x01, 0.001953125), (0x38, 1.0), (0xb8, -1.0)]
        {
            assert_eq!(e4m3_to_f32(code), value);
        }
        assert!(e4m3_to_f32(0x7f).is_nan() && e4m3_to_f32(0xff).is_nan());
    }

    #[test]
    fn every_16_bit_pattern_and_its_neighbours_round_like_the_definition() {
        for high in 0..=u16::MAX {
            for low in [0, 1, 0x7fff, 0x8000, 0xffff_u32] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                // Far out the distances are all alike; saturation has a test of its own.
                if x.is_nan() || x.abs() > 1e6 {
                    continue;
                }
                assert_eq!(f32_to_e4m3(x), naive(x), "{x:e}");
            }
        }
    }

    #[test]
    fn ties_go_to_the_even_code_at_every_midpoint() {
        for code in 0..0x7e_u8 {
            let middle = (e4m3_to_f32(code) + e4m3_to_f32(code + 1)) / 2.0;
            let even = if code & 1 == 0 { code } else { code + 1 };
            assert_eq!(f32_to_e4m3(middle), even);
            assert_eq!(f32_to_e4m3(middle.next_down()), code);
            assert_eq!(f32_to_e4m3(middle.next_up()), code + 1);
            assert_eq!(f32_to_e4m3(-middle), even | 0x80);
        }
    }

    #[test]
    fn out_of_range_saturates_and_nan_stays_nan() {
        for x in [449.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!(f32_to_e4m3(x), 0x7e);
            assert_eq!(f32_to_e4m3(-x), 0xfe);
        }
        assert_eq!(f32_to_e4m3(f32::NAN) & 0x7f, 0x7f);
    }
}
