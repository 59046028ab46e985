//! The image against its definition, byte by byte, and the orders of the rows.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Values between about -1 and 1 that depend on their index and on a seed.
fn values(len: usize, seed: u32) -> Vec<f32> {
    let value = |i: usize| {
        let mixed = (i as u32 ^ seed).wrapping_mul(2654435761).rotate_left(15);
        mixed.wrapping_mul(2246822519) as i32 as f32 / 2e9
    };
    (0..len).map(value).collect()
}

fn pack_matrix(dtype: Dtype, rows: &[f32], k: usize) -> (Vec<u8>, Vec<f32>) {
    let n = rows.len() / k;
    let mut image = vec![0xaa; image_bytes(dtype, n, k)];
    let mut scales = vec![0.0; n];
    let tiles = image.chunks_exact_mut(tile_bytes(dtype, k));
    for ((rows, out), scales) in rows.chunks(TILE * k).zip(tiles).zip(scales.chunks_mut(TILE)) {
        pack_tile(dtype, rows, k, out, if dtype.has_output_scales() { scales } else { &mut [] });
    }
    (image, scales)
}

/// The byte at (row, byte of the row) of a matrix of `row_bytes`, by the definition in the design.
fn byte_at(image: &[u8], row_bytes: usize, row: usize, byte: usize) -> u8 {
    let units = row_bytes.div_ceil(128);
    let unit = row / 64 * units + byte / 128;
    let chunk = (byte % 128 / 16) ^ (row % 8);
    image[unit * 8192 + row % 64 * 128 + chunk * 16 + byte % 16]
}

/// Which byte of a row an FP8 input is.
fn lane_order(input: usize) -> usize {
    let word = [0, 1, 8, 9];
    let of_chunk = (0..16).find(|at| at / 4 * 2 + word[at % 4] == input % 16).unwrap();
    input / 16 * 16 + of_chunk
}

/// What a row's scale follows from.
fn absmax(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |most, value| most.max(value.abs()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_byte_stands_where_the_definition_puts_it(
        n in 1_usize..150,
        k in 1_usize..300,
        seed in any::<u32>(),
    ) {
        let rows = values(n * k, seed);
        for dtype in [Dtype::Fp8, Dtype::Fp16] {
            let (image, scales) = pack_matrix(dtype, &rows, k);
            let size = dtype.bytes();
            let mut expected_zeros = image.len();
            for row in 0..n {
                let absmax = absmax(&rows[row * k..][..k]);
                for input in 0..k {
                    let value = rows[row * k + input];
                    let bytes = match dtype {
                        Dtype::Fp8 => vec![f32_to_e4m3(value * (448.0 / absmax))],
                        _ => f16::from_f32(value).to_le_bytes().to_vec(),
                    };
                    for (idx, byte) in bytes.into_iter().enumerate() {
                        let at = if size == 1 { lane_order(input) } else { input * size + idx };
                        let found = byte_at(&image, k * size, row, at);
                        prop_assert_eq!(found, byte, "{} row {} input {}", dtype, row, input);
                        expected_zeros -= usize::from(byte != 0);
                    }
                }
                if dtype.has_output_scales() {
                    prop_assert_eq!(scales[row], absmax / 448.0);
                }
            }
            let zeros = image.iter().filter(|&&byte| byte == 0).count();
            prop_assert_eq!(zeros, expected_zeros, "padding that is not zero");
        }
    }

    #[test]
    fn what_was_packed_comes_back_rounded(
        n in 1_usize..150,
        k in 1_usize..300,
        seed in any::<u32>(),
    ) {
        let rows = values(n * k, seed);
        for dtype in [Dtype::Fp8, Dtype::Fp16] {
            let (image, scales) = pack_matrix(dtype, &rows, k);
            for (row, values) in rows.chunks(k).enumerate() {
                let absmax = absmax(values);
                let stored = |&x: &f32| match dtype {
                    Dtype::Fp8 => e4m3_to_f32(f32_to_e4m3(x * (448.0 / absmax))) * (absmax / 448.0),
                    _ => f16::from_f32(x).to_f32(),
                };
                let expected: Vec<f32> = values.iter().map(stored).collect();
                let mut out = vec![0.0; k];
                let scale = dtype.has_output_scales().then_some(scales[row]);
                unpack_row(dtype, &image, k, row, scale, &mut out);
                prop_assert_eq!(out, expected, "{} row {}", dtype, row);
            }
        }
    }

    #[test]
    fn every_source_row_stands_in_exactly_one_place(
        heads in 1_usize..9,
        kv_heads in 1_usize..5,
        wide in any::<bool>(),
        intermediate in 1_usize..20,
    ) {
        let head_dim = if wide { 128 } else { 64 };
        let orders = [
            (RowOrder::Natural, 100 * heads + 7),
            (
                RowOrder::Qkv { rotated_heads: heads + kv_heads, head_dim },
                (heads + 2 * kv_heads) * head_dim,
            ),
            (RowOrder::GateUp { intermediate_size: 32 * intermediate }, 64 * intermediate),
        ];
        for (order, n) in orders {
            let sources: Vec<_> = (0..padded_len(n)).map(|row| order.source(row, n)).collect();
            let seen: BTreeSet<usize> = sources.iter().flatten().copied().collect();
            prop_assert!(seen.into_iter().eq(0..n), "{:?} loses or repeats rows", order);
            prop_assert_eq!(sources.iter().flatten().count(), n);
            for run in sources.chunks(RUN) {
                let is_run = run.windows(2).all(|pair| match *pair {
                    [Some(first), Some(second)] => second == first + 1,
                    [first, second] => second.is_none() && first.is_none_or(|last| last == n - 1),
                    _ => unreachable!("windows of two"),
                });
                prop_assert!(is_run, "{:?}: {:?} is no run", order, run);
            }
        }
    }

    #[test]
    fn rotated_elements_are_32_rows_apart_in_one_tile(
        heads in 1_usize..9,
        kv_heads in 1_usize..5,
        wide in any::<bool>(),
    ) {
        let head_dim = if wide { 128 } else { 64 };
        let order = RowOrder::Qkv { rotated_heads: heads + kv_heads, head_dim };
        let n = (heads + 2 * kv_heads) * head_dim;
        for row in (0..(heads + kv_heads) * head_dim).filter(|row| row % 64 < 32) {
            let (first, second) = (order.source(row, n).unwrap(), order.source(row + 32, n).unwrap());
            prop_assert_eq!(first / head_dim, row / head_dim);
            prop_assert_eq!(second, first + head_dim / 2);
        }
    }
}

#[test]
fn the_orders_are_those_of_the_design() {
    let order = RowOrder::Qkv { rotated_heads: 3, head_dim: 128 };
    let sources = [0, 31, 32, 63, 64, 96, 127, 128, 384, 511].map(|row| order.source(row, 512));
    assert_eq!(sources, [0, 31, 64, 95, 32, 96, 127, 128, 384, 511].map(Some));
    let narrow = RowOrder::Qkv { rotated_heads: 2, head_dim: 64 };
    assert!((0..192).all(|row| narrow.source(row, 192) == Some(row)), "pairs lie apart already");
    let order = RowOrder::GateUp { intermediate_size: 96 };
    let sources = [0, 31, 32, 63, 64, 96, 191, 192].map(|row| order.source(row, 192));
    assert_eq!(
        sources,
        [Some(0), Some(31), Some(96), Some(127), Some(32), Some(128), Some(191), None]
    );
}

#[test]
fn fp8_bytes_come_back_as_they_were() {
    let (n, k) = (70, 137);
    let rows: Vec<u8> = (0..n * k).map(|i| (i % 251) as u8 & 0xfe).collect();
    let mut image = vec![0xaa; image_bytes(Dtype::Fp8, n, k)];
    let tiles = image.chunks_exact_mut(tile_bytes(Dtype::Fp8, k));
    rows.chunks(TILE * k).zip(tiles).for_each(|(rows, out)| pack_tile_fp8(rows, k, out));
    for (row, bytes) in rows.chunks(k).enumerate() {
        let mut out = vec![0.0; k];
        unpack_row(Dtype::Fp8, &image, k, row, None, &mut out);
        let expected: Vec<f32> = bytes.iter().map(|&b| e4m3_to_f32(b)).collect();
        assert_eq!(out, expected);
    }
}

#[test]
fn a_zero_row_has_scale_zero_and_stays_zero() {
    let (image, scales) = pack_matrix(Dtype::Fp8, &[0.0; 3 * 10], 10);
    assert_eq!(scales, [0.0; 3]);
    assert!(image.iter().all(|&byte| byte == 0));
}

#[test]
fn sizes_count_the_padding() {
    assert_eq!(image_bytes(Dtype::Fp8, 1, 1), 8192);
    assert_eq!(image_bytes(Dtype::Fp8, 65, 129), 4 * 8192);
    assert_eq!(image_bytes(Dtype::Fp16, 64, 576), 64 * 576 * 2);
    assert_eq!(padded_len(129), 192);
}
