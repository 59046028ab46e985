//! Number formats and the few functions on them that are not Rust's own, written after the text of the PTX ISA and not
//! after the kernels.

use half::f16;

/// What conversions give for what is no number.
const HALF_NAN: u16 = 0x7fff;
const E4M3_NAN: u8 = 0x7f;

/// The largest value of e4m3, and how small steps become below its smallest normal number.
const E4M3_MAX: f32 = 448.0;
const E4M3_LEAST_STEP: f32 = 1.0 / 512.0;

/// To nearest, ties to even.
pub(crate) fn half(value: f32) -> u16 {
    if value.is_nan() { HALF_NAN } else { f16::from_f32(value).to_bits() }
}

/// Four bits of exponent, biased by 7, three of fraction; all ones are no number, nothing is infinite.
pub(crate) fn e4m3_to_half(code: u8) -> u16 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let magnitude = match exponent {
        _ if code & 0x7f == 0x7f => return HALF_NAN,
        0 => fraction * 2f32.powi(-6),
        _ => (1.0 + fraction) * 2f32.powi(exponent - 7),
    };
    f16::from_f32(if code & 0x80 == 0 { magnitude } else { -magnitude }).to_bits()
}

/// To nearest, ties to even; what is too large becomes the largest.
pub(crate) fn e4m3(value: f32) -> u8 {
    if value.is_nan() {
        return E4M3_NAN;
    }
    let magnitude = value.abs().min(E4M3_MAX);
    // Eight steps between powers of two.
    let power = f32::from_bits(magnitude.to_bits() & 0x7f80_0000);
    let step = (power / 8.0).max(E4M3_LEAST_STEP);
    let rounded = (magnitude / step).round_ties_even() * step;
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let codes = (0..E4M3_NAN).find(|&code| f16::from_bits(e4m3_to_half(code)).to_f32() == rounded);
    sign | codes.unwrap_or(E4M3_NAN - 1)
}

/// A number rather than none; zero rather than negative zero.
pub(crate) fn larger(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a == b => {
            if a.is_sign_negative() {
                b
            } else {
                a
            }
        }
        _ => {
            if a > b {
                a
            } else {
                b
            }
        }
    }
}

/// `ex2.approx.ftz`. The instruction may be off by two units in the last place; this is the value of the emulator's twin.
pub(crate) fn power_of_two(value: f32) -> f32 {
    let is_tiny = |value: f32| value.abs() < f32::MIN_POSITIVE;
    let power = if is_tiny(value) { 1.0 } else { value.exp2() };
    if is_tiny(power) { 0.0 } else { power }
}

/// `rcp.approx.ftz.f32`. The instruction may be off by one unit in the last place; this is the value of the emulator's twin.
pub(crate) fn near_reciprocal(value: f32) -> f32 {
    let flushed = |value: f32| {
        if value.abs() < f32::MIN_POSITIVE { 0f32.copysign(value) } else { value }
    };
    flushed(1.0 / flushed(value))
}

/// `rcp.approx.ftz.f64`: only the upper halves of operand and result count; how they are rounded is left open.
pub(crate) fn rough_reciprocal(bits: u64) -> u64 {
    const UPPER: u64 = 0xffff_ffff_0000_0000;
    let value = f64::from_bits(bits & UPPER);
    if value.is_nan() {
        return 0x7fff_ffff_0000_0000;
    }
    let value = if value.abs() < f64::MIN_POSITIVE { 0f64.copysign(value) } else { value };
    let result = 1.0 / value;
    let result = if result.abs() < f64::MIN_POSITIVE { 0f64.copysign(result) } else { result };
    result.to_bits() & UPPER
}

/// A sum of e4m3 products and what was there before. The document leaves open how much of it is kept; measurements on Hopper that
/// were published say: all are aligned to the largest, of which 13 bits behind its first one are kept, and cut there.
pub(crate) fn sum_of_e4m3(before: f32, products: impl Iterator<Item = f32> + Clone) -> f32 {
    const KEPT: f32 = 8192.0;
    const LEAST_ALIGNED: f32 = 1e-18;
    let terms = || std::iter::once(before).chain(products.clone());
    if terms().any(f32::is_nan) {
        return f32::NAN;
    }
    let largest = terms().fold(0f32, |largest, term| largest.max(term.abs()));
    if largest < LEAST_ALIGNED {
        return terms().sum();
    }
    let unit = f32::from_bits(largest.to_bits() & 0x7f80_0000) / KEPT;
    terms().map(|term| (term / unit).trunc()).sum::<f32>() * unit
}

/// `prmt`: each byte of the result is one of eight, or copies of its sign.
pub(crate) fn permute(a: u32, b: u32, selectors: u32) -> u32 {
    let bytes = (u64::from(b) << 32 | u64::from(a)).to_le_bytes();
    let pick = |at: u32| {
        let selector = selectors >> (4 * at) & 15;
        let byte = bytes[(selector & 7) as usize];
        match selector & 8 {
            0 => byte,
            _ => {
                if byte & 0x80 == 0 {
                    0
                } else {
                    0xff
                }
            }
        }
    };
    u32::from_le_bytes([0, 1, 2, 3].map(pick))
}
