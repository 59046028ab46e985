//! The small operations on one row: norms, rotation, the MLP's gate and sums. Results depend on the
//! row and the level only.

use super::isa::Isa;
use super::simd::{Kernel, LANES, Simd, dispatch, exp, pad, sum};

/// Sums of squares that run side by side.
const CHAINS: usize = 4;

/// `out = x / sqrt(mean(x^2) + eps) * weight`.
pub(crate) fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!((x.len(), x.len()), (weight.len(), out.len()), "elements of a norm");
    out.copy_from_slice(x);
    dispatch(isa, Heads { x: out, head_dim: x.len(), norm: Some((weight, eps)), rotation: None });
}

/// Makes queries or keys `[head][head_dim]` of one row ready for attention, in place: the RMS norm
/// of each head with its weight and epsilon, if the model has one, then the rotation of elements
/// `i` and `i + head_dim / 2` by the angle whose cos and sin are given.
pub(crate) fn qk_norm_rope(
    isa: Isa,
    x: &mut [f32],
    norm: Option<(&[f32], f32)>,
    cos: &[f32],
    sin: &[f32],
) {
    let head_dim = 2 * cos.len();
    assert_eq!(cos.len(), sin.len(), "angles");
    assert!(x.len().is_multiple_of(head_dim), "{} elements in heads of {head_dim}", x.len());
    assert!(norm.is_none_or(|(weight, _)| weight.len() == head_dim), "elements of a norm");
    dispatch(isa, Heads { x, head_dim, norm, rotation: Some((cos, sin)) });
}

/// `out = silu(gate) * up` for the halves of `gate_up`, where silu(g) = g / (1 + exp(-g)).
pub(crate) fn silu_mul(isa: Isa, gate_up: &[f32], out: &mut [f32]) {
    assert_eq!(gate_up.len(), 2 * out.len(), "elements of gate and up");
    dispatch(isa, SiluMul { gate_up, out });
}

/// `x += y`.
pub(crate) fn add(isa: Isa, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "terms of a sum");
    dispatch(isa, Add { x, y });
}

/// Norm and rotation of every head.
struct Heads<'a> {
    x: &'a mut [f32],
    head_dim: usize,
    norm: Option<(&'a [f32], f32)>,
    rotation: Option<(&'a [f32], &'a [f32])>,
}

impl Kernel for Heads<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for head in self.x.chunks_exact_mut(self.head_dim) {
            if let Some((weight, eps)) = self.norm {
                let mean = sum_of_squares(s, head) / self.head_dim as f32;
                scale(s, head, 1.0 / (mean + eps).sqrt(), weight);
            }
            if let Some((cos, sin)) = self.rotation {
                rotate(s, head, cos, sin);
            }
        }
    }
}

#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let (vectors, rest) = x.as_chunks::<LANES>();
    let mut acc = [s.splat(0.0); CHAINS];
    let (groups, last) = vectors.as_chunks::<CHAINS>();
    for group in groups {
        for chain in 0..CHAINS {
            let x = s.load(&group[chain]);
            acc[chain] = s.mul_add(x, x, acc[chain]);
        }
    }
    for (chain, vector) in last.iter().enumerate() {
        let x = s.load(vector);
        acc[chain] = s.mul_add(x, x, acc[chain]);
    }
    let x = s.load(&pad(rest));
    acc[CHAINS - 1] = s.mul_add(x, x, acc[CHAINS - 1]);
    sum(s, s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
}

/// `x *= factor`, then `x *= weight`.
#[inline(always)]
fn scale<S: Simd>(s: S, x: &mut [f32], factor: f32, weight: &[f32]) {
    let (vectors, rest) = x.as_chunks_mut::<LANES>();
    let (weights, weights_rest) = weight.as_chunks::<LANES>();
    let factors = s.splat(factor);
    for (x, weight) in vectors.iter_mut().zip(weights) {
        s.store(s.mul(s.mul(s.load(x), factors), s.load(weight)), x);
    }
    for (x, weight) in rest.iter_mut().zip(weights_rest) {
        *x = *x * factor * weight;
    }
}

#[inline(always)]
fn rotate<S: Simd>(s: S, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = head.split_at_mut(cos.len());
    let ((low, low_rest), (high, high_rest)) = (low.as_chunks_mut(), high.as_chunks_mut());
    let ((cos, cos_rest), (sin, sin_rest)) = (cos.as_chunks(), sin.as_chunks());
    for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (a, b, cos, sin) = (s.load(low), s.load(high), s.load(cos), s.load(sin));
        s.store(s.sub(s.mul(a, cos), s.mul(b, sin)), low);
        s.store(s.add(s.mul(b, cos), s.mul(a, sin)), high);
    }
    for (((low, high), cos), sin) in low_rest.iter_mut().zip(high_rest).zip(cos_rest).zip(sin_rest)
    {
        (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
    }
}

struct SiluMul<'a> {
    gate_up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (gate, up) = self.gate_up.split_at(self.out.len());
        let ((gate, gate_rest), (up, up_rest)) = (gate.as_chunks(), up.as_chunks());
        let (out, out_rest) = self.out.as_chunks_mut();
        for ((gate, up), out) in gate.iter().zip(up).zip(out) {
            s.store(silu_times(s, s.load(gate), s.load(up)), out);
        }
        let mut lanes = [0.0; LANES];
        s.store(silu_times(s, s.load(&pad(gate_rest)), s.load(&pad(up_rest))), &mut lanes);
        out_rest.copy_from_slice(&lanes[..out_rest.len()]);
    }
}

/// The exponential is taken of -|g|, so that it never overflows.
#[inline(always)]
fn silu_times<S: Simd>(s: S, gate: S::F, up: S::F) -> S::F {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let e = exp(s, s.select_lt(gate, zero, gate, s.sub(zero, gate)));
    let share = s.div(s.select_lt(gate, zero, e, one), s.add(one, e));
    s.mul(s.mul(gate, share), up)
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ((x, x_rest), (y, y_rest)) = (self.x.as_chunks_mut(), self.y.as_chunks());
        for (x, y) in x.iter_mut().zip(y) {
            s.store(s.add(s.load(x), s.load(y)), x);
        }
        for (x, y) in x_rest.iter_mut().zip(y_rest) {
            *x += y;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::cpu::isa::Isa;

    /// f32 rounding of a few operations on numbers of size 1.
    const TOLERANCE: f64 = 2e-6;

    /// Deterministic numbers in -1..1.
    fn noise(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    fn naive_rms_norm(x: &[f32], weight: &[f32], eps: f64) -> Vec<f64> {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + eps).sqrt();
        x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * factor * f64::from(w)).collect()
    }

    fn assert_close(found: &[f32], exact: &[f64], what: &str) {
        assert_eq!(found.len(), exact.len());
        for (idx, (&found, &exact)) in found.iter().zip(exact).enumerate() {
            let error = (f64::from(found) - exact).abs();
            assert!(error <= TOLERANCE * exact.abs().max(1.0), "{what} {idx}: {found} {exact}");
        }
    }

    #[test]
    fn rms_norm_matches_its_definition_at_every_length() {
        for isa in Isa::supported() {
            for len in (1..70).chain([576, 1536, 4096]) {
                let (x, weight) = (noise(len, 1), noise(len, 2));
                let mut out = vec![0.0; len];
                rms_norm(isa, &x, &weight, 1e-6, &mut out);
                assert_close(&out, &naive_rms_norm(&x, &weight, 1e-6), &format!("{isa:?} {len}"));
            }
        }
    }

    #[test]
    fn heads_are_normalised_one_by_one_and_rotated_in_halves() {
        for isa in Isa::supported() {
            for (head_dim, heads) in [(2, 3), (64, 4), (80, 2), (96, 1), (128, 12)] {
                let (mut x, weight) = (noise(heads * head_dim, 3), noise(head_dim, 4));
                let angles = noise(head_dim / 2, 5);
                let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
                let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
                let mut exact = Vec::new();
                for head in x.chunks(head_dim) {
                    let head = naive_rms_norm(head, &weight, 1e-5);
                    let half = head_dim / 2;
                    exact.extend((0..head_dim).map(|idx| {
                        let (cos, sin) = (f64::from(cos[idx % half]), f64::from(sin[idx % half]));
                        if idx < half {
                            head[idx] * cos - head[idx + half] * sin
                        } else {
                            head[idx] * cos + head[idx - half] * sin
                        }
                    }));
                }
                qk_norm_rope(isa, &mut x, Some((&weight, 1e-5)), &cos, &sin);
                assert_close(&x, &exact, &format!("{isa:?} {head_dim}"));
            }
        }
    }

    #[test]
    fn a_rotation_by_a_quarter_turn_swaps_the_halves() {
        for isa in Isa::supported() {
            let x = noise(64, 6);
            let mut turned = x.clone();
            qk_norm_rope(isa, &mut turned, None, &[0.0; 32], &[1.0; 32]);
            let exact: Vec<f32> =
                x[32..].iter().map(|x| -x).chain(x[..32].iter().copied()).collect();
            assert_eq!(turned, exact, "{isa:?}");
        }
    }

    #[test]
    fn silu_is_within_a_millionth_wherever_it_is_a_normal_number() {
        for isa in Isa::supported() {
            for len in [1, 15, 16, 33, 20_000] {
                let gate: Vec<f32> = noise(len, 7).iter().map(|x| x * 87.0).collect();
                let up: Vec<f32> = noise(len, 8).iter().map(|x| x + 2.0).collect();
                let mut out = vec![0.0; len];
                silu_mul(isa, &[gate.clone(), up.clone()].concat(), &mut out);
                for idx in 0..len {
                    let (gate, up) = (f64::from(gate[idx]), f64::from(up[idx]));
                    let exact = gate / (1.0 + (-gate).exp()) * up;
                    let error = (f64::from(out[idx]) - exact).abs();
                    assert!(error < 1e-6 * exact.abs(), "{isa:?}: silu({gate}) * {up}: {error}");
                }
            }
        }
    }

    #[test]
    fn silu_has_its_limits_at_extreme_gates() {
        let gate = [f32::MIN, -1000.0, -0.0, 0.0, 1000.0, f32::NAN];
        for isa in Isa::supported() {
            let mut out = [9.0; 6];
            silu_mul(isa, &[gate, [1.0; 6]].concat(), &mut out);
            assert_eq!(out[..5], [0.0, 0.0, 0.0, 0.0, 1000.0], "{isa:?}");
            assert!(out[5].is_nan(), "{isa:?}");
        }
    }

    #[test]
    fn add_is_exact_at_every_length() {
        for isa in Isa::supported() {
            for len in 0..50 {
                let (mut x, y) = (noise(len, 9), noise(len, 10));
                let exact: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
                add(isa, &mut x, &y);
                assert_eq!(x, exact, "{isa:?}");
            }
        }
    }
}
