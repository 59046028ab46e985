//! Decoders of plain number formats and of ggml's blocks of 32, to f32.
//! Every product and sum is rounded to f32 in the order in which ggml states it, so results are
//! those of the reference bit for bit. Loops run over fixed-size arrays so that they vectorise.

/// Runs `decode` over each block of `BYTES` bytes and `LEN` values.
pub(super) fn each_block<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    for (block, values) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, values);
    }
}

/// The value of a half-precision number, without a branch: a half's bits, shifted into place, are a
/// float 2^112 too small, subnormals included; only infinities and NaN need their exponent filled.
#[inline(always)]
pub(super) fn half_to_f32(bits: u16) -> f32 {
    const TWO_POW_112: f32 = f32::from_bits(0x7780_0000);
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    let value = (f32::from_bits(magnitude) * TWO_POW_112).to_bits() | special;
    f32::from_bits(value | u32::from(bits & 0x8000) << 16)
}

/// The half-precision number at byte `at` of a block.
#[inline(always)]
pub(super) fn half_at(block: &[u8], at: usize) -> f32 {
    half_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

pub(super) fn f32(bytes: &[u8], out: &mut [f32]) {
    each_block::<4, 1>(bytes, out, |b, y| y[0] = f32::from_le_bytes(*b));
}

pub(super) fn f16(bytes: &[u8], out: &mut [f32]) {
    each_block::<2, 1>(bytes, out, |b, y| y[0] = half_to_f32(u16::from_le_bytes(*b)));
}

pub(super) fn bf16(bytes: &[u8], out: &mut [f32]) {
    each_block::<2, 1>(bytes, out, |b, y| {
        y[0] = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
    });
}

pub(super) fn fp8(bytes: &[u8], out: &mut [f32]) {
    for (byte, y) in bytes.iter().zip(out) {
        *y = FP8[usize::from(*byte)];
    }
}

pub(super) fn int8(bytes: &[u8], out: &mut [f32]) {
    for (byte, y) in bytes.iter().zip(out) {
        *y = f32::from(*byte as i8);
    }
}

/// Every e4m3fn value: 4 exponent bits of bias 7, 3 mantissa bits, no infinities, NaN at 0x7f.
static FP8: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let exponent = (byte >> 3 & 15) as u32;
        let mantissa = (byte & 7) as f32;
        let magnitude = if byte & 0x7f == 0x7f {
            f32::NAN
        } else if exponent == 0 {
            mantissa / 512.0
        } else {
            (1.0 + mantissa / 8.0) * f32::from_bits((exponent + 120) << 23)
        };
        table[byte] = if byte & 0x80 == 0 { magnitude } else { -magnitude };
        byte += 1;
    }
    table
};

/// `f16 d; u8 qs[16]`: value j is in the low nibble of byte j, value j + 16 in the high one.
pub(super) fn q4_0(bytes: &[u8], out: &mut [f32]) {
    each_block::<18, 32>(bytes, out, |b, y| {
        let d = half_at(b, 0);
        for j in 0..16 {
            let q = b[2 + j];
            y[j] = d * (f32::from(q & 15) - 8.0);
            y[j + 16] = d * (f32::from(q >> 4) - 8.0);
        }
    });
}

/// `f16 d, m; u8 qs[16]`: nibbles as in Q4_0.
pub(super) fn q4_1(bytes: &[u8], out: &mut [f32]) {
    each_block::<20, 32>(bytes, out, |b, y| {
        let (d, m) = (half_at(b, 0), half_at(b, 2));
        for j in 0..16 {
            let q = b[4 + j];
            y[j] = d * f32::from(q & 15) + m;
            y[j + 16] = d * f32::from(q >> 4) + m;
        }
    });
}

/// Five-bit values: nibbles at `qs` as in Q4_0, the fifth bit of value j is bit j of the word at `qh`.
#[inline(always)]
fn five_bits(b: &[u8], qh: usize, qs: usize) -> [u8; 32] {
    let high = u32::from_le_bytes([b[qh], b[qh + 1], b[qh + 2], b[qh + 3]]);
    let mut values = [0; 32];
    for j in 0..16 {
        values[j] = b[qs + j] & 15 | ((high >> j) as u8 & 1) << 4;
        values[j + 16] = b[qs + j] >> 4 | ((high >> (j + 16)) as u8 & 1) << 4;
    }
    values
}

/// `f16 d; u32 qh; u8 qs[16]`.
pub(super) fn q5_0(bytes: &[u8], out: &mut [f32]) {
    each_block::<22, 32>(bytes, out, |b, y| {
        let d = half_at(b, 0);
        for (q, y) in five_bits(b, 2, 6).into_iter().zip(y) {
            *y = d * (f32::from(q) - 16.0);
        }
    });
}

/// `f16 d, m; u32 qh; u8 qs[16]`.
pub(super) fn q5_1(bytes: &[u8], out: &mut [f32]) {
    each_block::<24, 32>(bytes, out, |b, y| {
        let (d, m) = (half_at(b, 0), half_at(b, 2));
        for (q, y) in five_bits(b, 4, 8).into_iter().zip(y) {
            *y = d * f32::from(q) + m;
        }
    });
}

/// `f16 d; i8 qs[32]`.
pub(super) fn q8_0(bytes: &[u8], out: &mut [f32]) {
    each_block::<34, 32>(bytes, out, |b, y| {
        let d = half_at(b, 0);
        for (q, y) in b[2..].iter().zip(y) {
            *y = d * f32::from(*q as i8);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_has_its_value() {
        for bits in 0..=u16::MAX {
            let (ours, want) = (half_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == want.to_bits() || ours.is_nan() && want.is_nan(),
                "{bits:#06x}: {ours} against {want}"
            );
        }
    }

    #[test]
    fn every_fp8_byte_has_its_value() {
        for byte in 0..=u8::MAX {
            let bits = i32::from(byte);
            let (sign, exponent, mantissa) = (bits >> 7, bits >> 3 & 15, bits & 7);
            let want = match (exponent, mantissa) {
                (15, 7) => f64::NAN,
                (0, m) => f64::from(m) * 2f64.powi(-9),
                (e, m) => f64::from(8 + m) * 2f64.powi(e - 10),
            } * f64::from(1 - 2 * sign);
            let mut ours = [0.0];
            fp8(&[byte], &mut ours);
            let same = f64::from(ours[0]) == want || ours[0].is_nan() && want.is_nan();
            assert!(same, "{byte:#04x}: {} against {want}", ours[0]);
        }
        assert_eq!(FP8[0x7e], 448.0);
    }
}
