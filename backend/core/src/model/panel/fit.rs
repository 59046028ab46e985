//! The scale and the offset of a block of 4-bit codes: those, of several tried, whose values are nearest to the block's.

use super::{BLOCK, bf16_bits};

/// The largest code.
pub(super) const MAX_CODE: f32 = 15.0;

/// Steps that a block's range is cut into. More than there are codes: what lies at its end is cut off, and the rest is
/// finer. Fewer: values that came from a grid which the block does not fill are met exactly.
const STEPS: [f32; 14] =
    [15.0, 17.5, 16.5, 16.0, 15.5, 14.5, 14.0, 13.0, 12.0, 11.0, 10.0, 9.0, 8.0, 7.0];

/// Each value as `code * scale + offset`, both bfloat16.
pub(super) struct Fit {
    pub codes: [u8; BLOCK],
    pub scale: f32,
    pub offset: f32,
}

/// The best of all tried, by the sum of squared differences.
pub(super) fn fit(values: &[f32; BLOCK]) -> Fit {
    let (low, high) = values
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &v| (low.min(v), high.max(v)));
    // Of half of all numbers at most: all codes stay finite where both are rounded up.
    let range = (high - low).min(f32::MAX / 2.0);
    // Below this the inverse of a step would overflow; the block is one number for every purpose.
    if range < 1e-30 {
        return Fit { codes: [0; BLOCK], scale: 0.0, offset: bf16(low) };
    }
    let mut best = (f32::INFINITY, 0.0, 0.0);
    for steps in STEPS {
        for (scale, offset) in candidates(values, low, range / steps) {
            let error = squared_error(values, scale, offset);
            if error < best.0 {
                best = (error, scale, offset);
            }
        }
    }
    let (_, scale, offset) = match best.0.is_finite() {
        true => best,
        // Squares overflow.
        false => (0.0, bf16(range / MAX_CODE), bf16(low)),
    };
    let mut codes = [0; BLOCK];
    let inverse = inverse(scale);
    for (code, value) in codes.iter_mut().zip(values) {
        *code = nearest_code(*value, inverse, offset) as u8;
    }
    Fit { codes, scale, offset }
}

/// A scale and an offset as they are, and those that fit its codes best.
fn candidates(values: &[f32; BLOCK], low: f32, step: f32) -> [(f32, f32); 2] {
    let plain = (bf16(step), bf16(low));
    let inverse = inverse(step);
    let (mut sum, mut sum_squares, mut sum_values, mut products) =
        ([0.0; 8], [0.0; 8], [0.0; 8], [0.0; 8]);
    for values in values.as_chunks::<8>().0 {
        for (i, value) in values.iter().enumerate() {
            let code = nearest_code(*value, inverse, low);
            sum[i] += code;
            sum_squares[i] += code * code;
            // From `low`, so that no digits are lost where a block lies far from zero.
            sum_values[i] += value - low;
            products[i] += code * (value - low);
        }
    }
    let [sum, sum_squares, sum_values, products] =
        [sum, sum_squares, sum_values, products].map(|lanes| lanes.iter().sum::<f32>());
    let len = BLOCK as f32;
    let spread = len * sum_squares - sum * sum;
    if spread <= 0.0 {
        return [plain; 2];
    }
    let scale = bf16((len * products - sum * sum_values) / spread);
    let offset = bf16(low + (sum_values - scale * sum) / len);
    [plain, (scale, offset)]
}

fn squared_error(values: &[f32; BLOCK], scale: f32, offset: f32) -> f32 {
    let inverse = inverse(scale);
    let mut lanes = [0.0_f32; 8];
    for values in values.as_chunks::<8>().0 {
        for (lane, value) in lanes.iter_mut().zip(values) {
            let error = value - (nearest_code(*value, inverse, offset) * scale + offset);
            *lane += error * error;
        }
    }
    lanes.iter().sum()
}

/// 0 where there is none.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// Ties to even.
#[inline(always)]
fn nearest_code(value: f32, inverse: f32, offset: f32) -> f32 {
    /// Added and taken off again, it leaves whole numbers.
    const ROUNDER: f32 = 12_582_912.0;
    ((value - offset) * inverse).clamp(0.0, MAX_CODE) + ROUNDER - ROUNDER
}

fn bf16(value: f32) -> f32 {
    f32::from_bits(bf16_bits(value) << 16)
}
