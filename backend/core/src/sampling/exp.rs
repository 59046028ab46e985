//! A vectorisable `exp` for arguments that are not positive: weights relative to the likeliest token.

/// Smallest argument whose result is a normal number; below it the result is 0.
const LOWEST: f32 = -87.0;

/// `e^x` for `x <= 0`, within 2 units in the last place; exactly 1 at 0, and 0 below -87 and for NaN.
#[inline]
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > LOWEST { x } else { LOWEST };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    // ln 2 in two parts: the first has few enough bits that its product with `power` is exact.
    let r = clamped - power * 0.693_359_4 - power * -2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let value = p * (r * r) + r + 1.0;
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    if x >= LOWEST { value * scale } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_exact_value() {
        for step in 0..870_000 {
            let x = -step as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            // Two units in the last place of f32.
            assert!(error < 2.4e-7, "exp({x}) is off by {error:e}");
        }
    }

    #[test]
    fn exp_keeps_its_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-87.5), 0.0);
        assert_eq!(exp(f32::MIN), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::NAN), 0.0);
    }
}
