//! The embedding is the token's row of the matrix, exactly, and comes with its squares.

use crate::image::{Matrix, Random, reorder};
use crate::params::{EmbedParams, ROW_THREADS, float_bytes};
use crate::problem::{NO_SEQUENCE, Row};
use crate::run::{SQUARES_ERROR, UNTOUCHED, floats, read, values};
use crate::twin::squares_of_tiles;
use spec_emu::{Arena, Launch, Schedule, launch};
use spec_kernels::{Format, Variant};

const VOCAB: usize = 150;

fn token_row(token: u32) -> Row {
    Row { token, ..Row::default() }
}

/// Embeds tokens and compares them with the matrix.
fn is_right(weight: Format, k: usize, rows: &[Row], grid: u32) {
    let random = &mut Random(k as u64);
    let matrix = Matrix::random(weight, VOCAB, k, random);
    let scales = random.floats(VOCAB, |x| 0.5 + 0.4 * x);
    let order: Vec<usize> = (0..VOCAB).collect();
    let arena = Arena::new(1 << 26);
    let tiles = k.div_ceil(64);
    let row_bytes: Vec<u8> = rows.iter().flat_map(Row::bytes).collect();
    let params = EmbedParams {
        weights: arena.put(&matrix.pack(&order)),
        scales: match weight {
            Format::Fp8 => arena.put(&float_bytes(&reorder(&scales, &order))),
            Format::Fp16 => 0,
        },
        rows: arena.put(&row_bytes),
        residual: arena.put(&vec![UNTOUCHED; (rows.len() + 1) * k * 4]),
        squares: arena.put(&vec![UNTOUCHED; (rows.len() + 1) * tiles * 4]),
        num_rows: rows.len(),
        k,
    };
    let variant = Variant::embed(weight).to_string();
    let bytes = params.bytes();
    let launched =
        Launch { variant: &variant, grid, block: ROW_THREADS, params: &bytes, ..Launch::default() };
    launch(&launched, &Schedule::seeded(k as u64)).unwrap();
    let residual = read(&arena, params.residual, (rows.len() + 1) * k * 4);
    let squares = read(&arena, params.squares, (rows.len() + 1) * tiles * 4);
    for (bytes, width) in [(&residual, k), (&squares, tiles)] {
        let mut rest = bytes[rows.len() * width * 4..].iter();
        assert!(rest.all(|&byte| byte == UNTOUCHED), "writes beyond the last row");
    }
    let written = residual.chunks(k * 4).zip(squares.chunks(tiles * 4));
    for (row, (found, squares)) in rows.iter().zip(written) {
        for (square, expected) in floats(squares).into_iter().zip(squares_of_tiles(&floats(found)))
        {
            let error = (f64::from(square) - expected).abs();
            assert!(error <= SQUARES_ERROR * expected, "k {k}: {square} for {expected}");
        }
        let token = if row.is_active() { row.token as usize } else { 0 };
        let scale = if weight == Format::Fp8 { scales[token] } else { 1.0 };
        let expected = (0..k).map(|k| f64::from(matrix.value(token, k) as f32 * scale));
        assert!(expected.eq(values(found, 4)), "{weight:?} k {k}: token {token}");
    }
}

#[test]
fn every_token_has_its_row() {
    for weight in [Format::Fp8, Format::Fp16] {
        for k in [64, 576, 2056, 4] {
            let rows: Vec<Row> = (0..VOCAB as u32).rev().map(token_row).collect();
            is_right(weight, k, &rows, 7);
        }
    }
}

#[test]
fn a_row_of_nobody_gets_a_token_that_exists() {
    let nobody = Row { token: u32::MAX, sequence: NO_SEQUENCE, ..Row::default() };
    is_right(Format::Fp8, 192, &[token_row(3), nobody, token_row(149)], 2);
}
