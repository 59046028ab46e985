//! What was packed against the definitions of the formats.

use super::*;
use half::bf16;
use proptest::prelude::*;

/// What storing a value in a format makes of it, from the definitions; `absmax` is of all values that share
/// the scale.
fn stored(dtype: Dtype, x: f32, absmax: f32) -> f32 {
    match dtype {
        Dtype::Fp32 => x,
        Dtype::Fp16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        Dtype::Fp8 => e4m3_to_f32(f32_to_e4m3(x * (448.0 / absmax))) * (absmax / 448.0),
        Dtype::Int8 => {
            let nearest = bf16::from_f32(absmax / 127.0);
            let is_short = nearest.to_f32() < absmax / 127.0;
            let scale = bf16::from_bits(nearest.to_bits() + u16::from(is_short)).to_f32();
            (x * (1.0 / scale)).round_ties_even() * scale
        }
        Dtype::Int4 => unreachable!("a block's scale follows from all of its values"),
    }
}

fn pack_matrix(dtype: Dtype, rows: &[f32], k: usize) -> (Vec<u8>, Vec<f32>) {
    let n = rows.len() / k;
    let mut packed = vec![0xaa; packed_bytes(dtype, n, k)];
    let mut scales = vec![0.0; n];
    let panels = packed.chunks_exact_mut(panel_bytes(dtype, k));
    for ((rows, out), scales) in rows.chunks(PANEL * k).zip(panels).zip(scales.chunks_mut(PANEL)) {
        let scales = if dtype.has_output_scales() { scales } else { &mut [][..] };
        pack_panel(dtype, rows, k, out, scales);
    }
    (packed, scales)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn what_was_packed_comes_back_rounded(
        n in 1_usize..150,
        k in 1_usize..140,
        seed in any::<u32>(),
    ) {
        let value = |i: usize| {
            let mixed = (i as u32 ^ seed).wrapping_mul(2654435761).rotate_left(15);
            mixed.wrapping_mul(2246822519) as i32 as f32 / 2e9
        };
        let rows: Vec<f32> = (0..n * k).map(value).collect();
        for dtype in Dtype::ALL.into_iter().filter(|dtype| *dtype != Dtype::Int4) {
            let (packed, scales) = pack_matrix(dtype, &rows, k);
            for (o, row) in rows.chunks(k).enumerate() {
                let sharing = if dtype == Dtype::Int8 { BLOCK } else { k };
                let stored_run = |run: &[f32]| {
                    let absmax = run.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
                    run.iter().map(|&x| stored(dtype, x, absmax)).collect::<Vec<f32>>()
                };
                let expected: Vec<f32> = row.chunks(sharing).flat_map(stored_run).collect();
                let mut out = vec![0.0; k];
                let scale = dtype.has_output_scales().then_some(scales[o]);
                unpack_row(dtype, &packed, k, o, scale, &mut out);
                prop_assert_eq!(out, expected, "{} output {}", dtype, o);
            }
        }
    }
}

#[test]
fn fp8_bytes_come_back_as_they_were() {
    let (n, k) = (70, 37);
    let rows: Vec<u8> = (0..n * k).map(|i| (i % 251) as u8 & 0xfe).collect();
    let mut packed = vec![0xaa; packed_bytes(Dtype::Fp8, n, k)];
    let panels = packed.chunks_exact_mut(panel_bytes(Dtype::Fp8, k));
    rows.chunks(PANEL * k).zip(panels).for_each(|(rows, out)| pack_panel_fp8(rows, k, out));
    for (o, row) in rows.chunks(k).enumerate() {
        let mut out = vec![0.0; k];
        unpack_row(Dtype::Fp8, &packed, k, o, None, &mut out);
        let expected: Vec<f32> = row.iter().map(|&b| e4m3_to_f32(b)).collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn a_zero_row_has_scale_zero_and_stays_zero() {
    for dtype in [Dtype::Fp8, Dtype::Int8, Dtype::Int4] {
        let (packed, scales) = pack_matrix(dtype, &[0.0; 3 * 10], 10);
        assert_eq!(scales, [0.0; 3]);
        let mut out = [1.0; 10];
        let scale = dtype.has_output_scales().then_some(scales[1]);
        unpack_row(dtype, &packed, 10, 1, scale, &mut out);
        assert_eq!(out, [0.0; 10]);
    }
}

#[test]
fn sizes_count_the_padding() {
    assert_eq!(packed_bytes(Dtype::Bf16, 1, 1), 256);
    assert_eq!(packed_bytes(Dtype::Bf16, 65, 3), 2 * 2 * 256);
    assert_eq!(packed_bytes(Dtype::Fp8, 64, 896), 64 * 896);
    assert_eq!(packed_bytes(Dtype::Fp32, 128, 5), 128 * 5 * 4);
    assert_eq!(packed_bytes(Dtype::Int8, 65, 33), 128 * 2 * (32 + 2));
    assert_eq!(packed_bytes(Dtype::Int4, 65, 33), 128 * 2 * (16 + 2 + 2));
}

#[test]
fn bf16_rounds_like_the_half_crate() {
    for high in 0..=u16::MAX {
        for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff_u32] {
            let x = f32::from_bits(u32::from(high) << 16 | low);
            assert_eq!(bf16_bits(x) as u16, bf16::from_f32(x).to_bits(), "{x:e}");
        }
    }
}

#[test]
fn integers_round_to_even_and_saturate() {
    for (x, code) in [(0.5, 0), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (1e9, 127), (-1e9, -127)]
    {
        assert_eq!(round_i8(x), code);
    }
}

/// What came back of blocks that were packed as int4, one an output.
fn int4_blocks(blocks: &[[f32; BLOCK]]) -> Vec<[f32; BLOCK]> {
    let (packed, _) = pack_matrix(Dtype::Int4, blocks.as_flattened(), BLOCK);
    let unpacked = |row| {
        let mut out = [0.0; BLOCK];
        unpack_row(Dtype::Int4, &packed, BLOCK, row, None, &mut out);
        out
    };
    (0..blocks.len()).map(unpacked).collect()
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

/// Codes of the whole range of a block, without a search: what a fit has to be at least as good as.
fn cut_evenly(values: &[f32; BLOCK]) -> [f32; BLOCK] {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let round = |value: f32| bf16::from_f32(value).to_f32();
    let (scale, offset) = (round((high - low) / 15.0), round(low));
    values.map(|v| ((v - offset) / scale).round().clamp(0.0, 15.0) * scale + offset)
}

proptest! {
    #[test]
    fn int4_is_no_worse_than_a_range_cut_evenly(
        values in prop::collection::vec(-1.0_f32..1.0, BLOCK),
        centre in -2.0_f32..2.0,
        exponent in -20_i32..20,
        outlier in 1.0_f32..8.0,
    ) {
        let mut block = [0.0; BLOCK];
        for (i, (to, value)) in block.iter_mut().zip(&values).enumerate() {
            let value = if i == 5 { value * outlier } else { *value };
            *to = (value + centre) * 2.0_f32.powi(exponent);
        }
        let error = squared_error(&int4_blocks(&[block])[0], &block);
        let plain = squared_error(&cut_evenly(&block), &block);
        prop_assert!(error <= plain * 1.001 + 1e-30, "{} where an even cut has {}", error, plain);
    }

    /// As checkpoints have them that were of 4 bits before.
    #[test]
    fn int4_meets_values_of_a_grid_of_up_to_sixteen_steps(
        codes in prop::collection::vec(0_u8..16, BLOCK),
        max_code in 1_u8..16,
        scale in 0x3c00_u16..0x3d00,
        offset in 0xbc00_u16..0xbe00,
    ) {
        let [scale, offset] = [scale, offset].map(|bits| bf16::from_bits(bits).to_f32());
        let mut block = [0.0; BLOCK];
        for (to, code) in block.iter_mut().zip(&codes) {
            *to = f32::from((*code).min(max_code)) * scale + offset;
        }
        (block[3], block[17]) = (offset, f32::from(max_code) * scale + offset);
        let error = squared_error(&int4_blocks(&[block])[0], &block);
        // Of the 0.08 squared steps a value that rounding evenly spread values costs.
        let step = f64::from(scale).powi(2) * BLOCK as f64;
        prop_assert!(error <= 2e-3 * step, "{} of a squared step a value", error / step);
    }
}

#[test]
fn int4_blocks_of_one_number_or_of_the_largest_stay_near() {
    for value in [0.0, 1.0, -3.5, 1e-35, 1e-3] {
        let [block] = int4_blocks(&[[value; BLOCK]])[..] else { panic!("one block") };
        assert_eq!(block, [bf16::from_f32(value).to_f32(); BLOCK]);
    }
    let mut wide = [3e38; BLOCK];
    wide[7] = -3e38;
    let [block] = int4_blocks(&[wide])[..] else { panic!("one block") };
    assert!(block.iter().all(|v| v.is_finite()), "{block:?}");
}
