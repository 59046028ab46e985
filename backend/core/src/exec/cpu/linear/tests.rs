//! Every level and format against a naive twin in f64, and against itself: the bits of a row must not
//! depend on the other rows, the threads or the order of work.

use super::*;
use crate::Result;
use crate::exec::cpu::Arena;
use crate::model::panel::BLOCK;
use half::{bf16, f16};

/// Accumulating k products in f32 in one chain is off by at most about k ulps of the sum of magnitudes;
/// in practice by its root. This allows a few times the root for the lengths used here.
const TOLERANCE: f64 = 4e-6;

/// A small generator with a fixed start, so that a failure repeats.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn values(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.next() * scale).collect()
    }
}

impl Weight {
    /// Packs `values`, `[n][k]`, into an arena of their own.
    fn pack(
        dtype: Dtype,
        n: usize,
        k: usize,
        values: &[f32],
        bias: Option<Vec<f32>>,
    ) -> Result<Self> {
        assert_eq!(values.len(), n * k, "values of [{n}, {k}]");
        let mut packed = vec![0; panel::packed_bytes(dtype, n, k)];
        let mut scales = vec![0.0; if dtype.has_output_scales() { n } else { 0 }];
        let panels = packed.chunks_exact_mut(panel::panel_bytes(dtype, k));
        for (i, (rows, out)) in values.chunks(PANEL * k).zip(panels).enumerate() {
            let first = (i * PANEL).min(scales.len());
            let last = (first + PANEL).min(scales.len());
            panel::pack_panel(dtype, rows, k, out, &mut scales[first..last]);
        }
        let bytes = Arena::new(packed.len())?.push(&Pool::new(1), &packed);
        Ok(Self::new(dtype, n, k, bytes, scales, bias))
    }
}

fn weight(dtype: Dtype, n: usize, k: usize, bias: bool) -> Weight {
    let mut noise = Noise((n * 1000 + k) as u64);
    let values = noise.values(n * k, 0.1);
    let bias = bias.then(|| noise.values(n, 0.5));
    Weight::pack(dtype, n, k, &values, bias).unwrap()
}

fn product(isa: Isa, pool: &Pool, w: &Weight, x: &[f32]) -> Vec<f32> {
    let rows = x.len() / w.k;
    let mut prepared = Prepared::default();
    prepare(isa, w.dtype, x, rows, w.k, &mut prepared, pool);
    let mut out = vec![f32::NAN; rows * w.n];
    linear(isa, pool, w, &prepared, rows, &mut out);
    out
}

/// The same from the definitions: each product with the bound that its error may have.
fn naive(w: &Weight, x: &[f32]) -> Vec<(f64, f64)> {
    let rows: Vec<Vec<f32>> = (0..w.n)
        .map(|o| {
            let mut row = vec![0.0; w.k];
            w.row(o, &mut row);
            row
        })
        .collect();
    let mut out = Vec::new();
    for x in x.chunks(w.k) {
        let x = rounded(w.dtype, x);
        for (o, row) in rows.iter().enumerate() {
            let bias = f64::from(w.bias.get(o).copied().unwrap_or(0.0));
            let terms = row.iter().zip(&x).map(|(w, x)| f64::from(*w) * x);
            let (sum, size) = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
            out.push((sum + bias, TOLERANCE * (size + bias.abs()) + 1e-30));
        }
    }
    out
}

fn rounded(dtype: Dtype, x: &[f32]) -> Vec<f64> {
    match dtype {
        Dtype::Fp32 | Dtype::Fp16 => x.iter().map(|&x| f64::from(x)).collect(),
        Dtype::Bf16 | Dtype::Fp8 => x.iter().map(|&x| bf16::from_f32(x).to_f64()).collect(),
        Dtype::Int8 | Dtype::Int4 => x.chunks(BLOCK).flat_map(quantised).collect(),
    }
}

fn quantised(block: &[f32]) -> Vec<f64> {
    let absmax = block.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let code = |x: f32| f64::from((x * (127.0 / absmax)).round_ties_even());
    let value = |&x: &f32| if absmax == 0.0 { 0.0 } else { code(x) * f64::from(absmax) / 127.0 };
    block.iter().map(value).collect()
}

fn assert_close(out: &[f32], expected: &[(f64, f64)], what: &str) {
    assert_eq!(out.len(), expected.len());
    for (i, (y, (expected, bound))) in out.iter().zip(expected).enumerate() {
        let error = (f64::from(*y) - expected).abs();
        assert!(error <= *bound, "{what}: [{i}] is {y}, expected {expected} within {bound:e}");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn cases() -> impl Iterator<Item = (Isa, Dtype)> {
    Isa::supported().flat_map(|isa| Dtype::ALL.map(|dtype| (isa, dtype)))
}

#[test]
fn products_agree_with_the_naive_twin_for_odd_shapes() {
    let pool = Pool::new(2);
    for (n, k) in [(1, 1), (3, 7), (64, 64), (65, 33), (130, 515), (200, 1023)] {
        for (isa, dtype) in cases() {
            let w = weight(dtype, n, k, n % 2 == 1);
            let x = Noise(7).values(3 * k, 2.0);
            let out = product(isa, &pool, &w, &x);
            assert_close(&out, &naive(&w, &x), &format!("{isa} {dtype} [{n}, {k}]"));
        }
    }
}

#[test]
fn products_agree_with_the_naive_twin_for_any_number_of_rows() {
    let pool = Pool::new(2);
    let (n, k) = (70, 301);
    let x = Noise(8).values(300 * k, 2.0);
    for (isa, dtype) in cases() {
        let w = weight(dtype, n, k, true);
        let expected = naive(&w, &x);
        for rows in (1..=20).chain([64, 65, 100, 300]) {
            let out = product(isa, &pool, &w, &x[..rows * k]);
            assert_close(&out, &expected[..rows * n], &format!("{isa} {dtype} {rows} rows"));
        }
    }
}

#[test]
fn a_rows_bits_depend_on_nothing_but_the_row() {
    let pools = [Pool::new(1), Pool::new(2), Pool::new(5)];
    // More than one chunk of k for every format.
    let (n, k) = (150, 1111);
    let x = Noise(9).values(300 * k, 2.0);
    for (isa, dtype) in cases() {
        let w = weight(dtype, n, k, true);
        let alone: Vec<u32> =
            x.chunks(k).flat_map(|x| bits(&product(isa, &pools[0], &w, x))).collect();
        for rows in (2..=20).chain([31, 64, 257, 300]) {
            for pool in &pools {
                let first = 300 - rows;
                let together = bits(&product(isa, pool, &w, &x[first * k..]));
                assert!(together == alone[first * n..], "{isa} {dtype}: {rows} rows");
            }
        }
    }
}

#[test]
fn whole_numbers_give_the_same_bits_at_every_level() {
    let pool = Pool::new(2);
    for dtype in [Dtype::Int8, Dtype::Int4] {
        for (n, k, rows) in [(64, 64, 1), (70, 301, 3), (150, 1111, 9), (33, 3, 40)] {
            let w = weight(dtype, n, k, true);
            let x = Noise(10).values(rows * k, 3.0);
            let mut levels = Isa::supported().map(|isa| bits(&product(isa, &pool, &w, &x)));
            let first = levels.next().unwrap();
            assert!(levels.all(|level| level == first), "{dtype} [{n}, {k}], {rows} rows");
        }
    }
}

#[test]
fn int4_is_exact_to_the_last_integer() {
    // The largest codes and activations in all of a block but its first input, whose code is 0 and makes them the largest.
    let (n, k) = (64, 32 * 30);
    let values: Vec<f32> = (0..n * k).map(|i| if i % 32 == 0 { 0.0 } else { 15.0 }).collect();
    let w = Weight::pack(Dtype::Int4, n, k, &values, None).unwrap();
    for isa in Isa::supported() {
        for sign in [1.0, -1.0] {
            for rows in 1..7 {
                let x = vec![127.0 * sign; rows * k];
                let out = product(isa, &Pool::new(1), &w, &x);
                let expected = sign * 127.0 * (15 * 31 * k / 32) as f32;
                assert!(out.iter().all(|&y| y == expected), "{isa} {} for {expected}", out[0]);
            }
        }
    }
}

#[test]
fn int8_is_exact_to_the_last_integer() {
    // The largest magnitudes everywhere: where a saturating 16-bit step would show.
    let (n, k) = (64, 1000);
    let w = Weight::pack(Dtype::Int8, n, k, &vec![127.0; n * k], None).unwrap();
    for isa in Isa::supported() {
        for sign in [1.0, -1.0] {
            let out = product(isa, &Pool::new(1), &w, &vec![127.0 * sign; 2 * k]);
            assert!(out.iter().all(|&y| y == sign * 127.0 * 127.0 * k as f32), "{isa} {}", out[0]);
        }
    }
}

#[test]
fn every_fp8_code_is_multiplied_exactly() {
    let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f != 0x7f).collect();
    // Output o holds code o at one k and zeros elsewhere, at every place in a group.
    for (isa, place) in Isa::supported().flat_map(|isa| (0..4).map(move |place| (isa, place))) {
        let (n, k) = (codes.len(), 8);
        let mut rows = vec![0; n * k];
        codes.iter().enumerate().for_each(|(o, code)| rows[o * k + 4 + place] = *code);
        let mut packed = vec![0; panel::packed_bytes(Dtype::Fp8, n, k)];
        let panels = packed.chunks_exact_mut(panel::panel_bytes(Dtype::Fp8, k));
        rows.chunks(PANEL * k).zip(panels).for_each(|(r, out)| panel::pack_panel_fp8(r, k, out));
        let pool = Pool::new(1);
        let bytes = Arena::new(packed.len()).unwrap().push(&pool, &packed);
        let w = Weight::new(Dtype::Fp8, n, k, bytes, vec![1.0; n], None);
        for num_rows in [1, 4, 9] {
            let out = product(isa, &pool, &w, &vec![1.0; num_rows * k]);
            for (i, y) in out.iter().enumerate() {
                assert_eq!(*y, panel::e4m3_to_f32(codes[i % n]), "{isa} code {:#x}", codes[i % n]);
            }
        }
    }
}

#[test]
fn every_finite_half_is_multiplied_exactly() {
    let halves: Vec<f32> = (0..=u16::MAX).map(|b| f16::from_bits(b).to_f32()).collect();
    let halves: Vec<f32> = halves.into_iter().filter(|v| v.is_finite()).collect();
    let w = Weight::pack(Dtype::Fp16, halves.len(), 1, &halves, None).unwrap();
    for isa in Isa::supported() {
        assert_eq!(product(isa, &Pool::new(2), &w, &[1.0]), halves, "{isa}");
    }
}

#[test]
fn a_zero_row_gives_the_bias() {
    for (isa, dtype) in cases() {
        let w = weight(dtype, 70, 100, true);
        let out = product(isa, &Pool::new(1), &w, &[0.0; 100]);
        assert_eq!(out, w.bias[..70], "{isa} {dtype}");
    }
}

#[test]
fn an_outlier_is_carried_through() {
    let k = 300;
    let mut x = Noise(11).values(2 * k, 1.0);
    x[17] = 1e6;
    x[k + 3] = -3e4;
    for (isa, dtype) in cases() {
        let w = weight(dtype, 70, k, false);
        let out = product(isa, &Pool::new(1), &w, &x);
        assert_close(&out, &naive(&w, &x), &format!("{isa} {dtype}"));
    }
}

#[test]
fn tiny_activations_stay_finite() {
    for (isa, dtype) in cases() {
        let w = weight(dtype, 64, 32, false);
        for size in [1e-45, 1e-38, 1e-30, 1e-20] {
            let out = product(isa, &Pool::new(1), &w, &[size; 32]);
            assert!(out.iter().all(|y| y.abs() <= 32.0 * size), "{isa} {dtype} {size:e}");
        }
    }
}

#[test]
fn a_row_with_nan_or_infinity_spoils_no_other_row() {
    let k = 130;
    for (isa, dtype) in cases() {
        let w = weight(dtype, 70, k, true);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = Noise(12).values(7 * k, 1.0);
            let clean = product(isa, &Pool::new(1), &w, &x);
            x[3 * k + 5] = bad;
            let out = product(isa, &Pool::new(1), &w, &x);
            assert!(out[3 * 70..4 * 70].iter().all(|y| !y.is_finite()), "{isa} {dtype} {bad}");
            assert!(out[..3 * 70] == clean[..3 * 70] && out[4 * 70..] == clean[4 * 70..]);
        }
    }
}

#[test]
fn fewer_rows_than_prepared_may_be_multiplied() {
    let (isa, pool) = (Isa::detect(), Pool::new(2));
    let w = weight(Dtype::Bf16, 70, 40, false);
    let x = Noise(13).values(5 * 40, 1.0);
    let mut prepared = Prepared::default();
    prepare(isa, Dtype::Bf16, &x, 5, 40, &mut prepared, &pool);
    let mut out = vec![0.0; 2 * 70];
    linear(isa, &pool, &w, &prepared, 2, &mut out);
    assert_eq!(out, product(isa, &pool, &w, &x[..2 * 40]));
}

#[test]
fn a_buffer_keeps_nothing_of_its_last_use() {
    let (isa, pool) = (Isa::detect(), Pool::new(1));
    for dtype in Dtype::ALL {
        let mut prepared = Prepared::default();
        prepare(isa, dtype, &[9.0; 500], 5, 100, &mut prepared, &pool);
        let x = Noise(14).values(2 * 37, 1.0);
        prepare(isa, dtype, &x, 2, 37, &mut prepared, &pool);
        let w = weight(dtype, 64, 37, false);
        let mut out = vec![0.0; 2 * 64];
        linear(isa, &pool, &w, &prepared, 2, &mut out);
        assert_eq!(out, product(isa, &pool, &w, &x), "{dtype}");
    }
}

#[test]
fn rows_begin_with_a_cache_line() {
    for (isa, dtype) in cases() {
        let mut prepared = Prepared::default();
        prepare(isa, dtype, &[1.0; 3 * 37], 3, 37, &mut prepared, &Pool::new(1));
        for row in 0..3 {
            assert!(prepared.row(row).addr().is_multiple_of(64), "{isa} {dtype}: row {row}");
        }
    }
}

#[test]
#[should_panic(expected = "prepared for another format")]
fn activations_of_another_format_are_refused() {
    let (isa, pool) = (Isa::detect(), Pool::new(1));
    let mut prepared = Prepared::default();
    prepare(isa, Dtype::Int8, &[0.0; 8], 1, 8, &mut prepared, &pool);
    linear(isa, &pool, &weight(Dtype::Bf16, 64, 8, false), &prepared, 1, &mut [0.0; 64]);
}
