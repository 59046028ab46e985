//! Packed matrices row by row: exact.

use crate::image::{Matrix, Random, TILE, e4m3_value};
use crate::run::{UNTOUCHED, read, run};
use crate::written::{bytes_of, code_of};
use half::f16;
use spec_core::testing::cuda::model::many_params::UnpackParams;
use spec_emu::Arena;
use spec_kernels::{Format, Variant};

/// Ragged in n, in k, in neither; one unit.
const SHAPES: [(usize, usize); 5] = [(64, 64), (200, 576), (128, 640), (65, 96), (130, 1088)];

fn is_unpacked(packed: Format, to: Format, n: usize, k: usize, grid: u32) {
    let matrix = Matrix::random(packed, n, k, &mut Random(n as u64));
    let image = matrix.pack(&(0..n).collect::<Vec<_>>());
    let unit_k = 128 / bytes_of(packed);
    let (rows, k_units) = (n.next_multiple_of(TILE), k.div_ceil(unit_k));
    let (stride, arena) = (k_units * unit_k, Arena::new(1 << 26));
    let len = rows * stride * bytes_of(to);
    let output = arena.put(&vec![UNTOUCHED; len + 1]);
    let params = UnpackParams {
        weights: arena.put(&image),
        output,
        num_units: (rows / TILE * k_units) as u32,
        k_units: k_units as u32,
        format: code_of(to),
        unused: 0,
    };
    run(&Variant::unpack(packed), grid, params, n as u64);
    let found = read(&arena, output, len + 1);
    assert_eq!(found[len], UNTOUCHED, "a byte too many");
    for (idx, bytes) in found[..len].chunks(bytes_of(to)).enumerate() {
        let (row, column) = (idx / stride, idx % stride);
        let value = match to {
            Format::Fp8 => e4m3_value(bytes[0]),
            Format::Fp16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        };
        let wanted = if row < n && column < k { matrix.value(row, column) } else { 0.0 };
        assert_eq!(value, wanted, "{packed:?} to {to:?}, {n} x {k}: row {row}, column {column}");
    }
}

#[test]
fn a_packed_matrix_is_what_was_packed() {
    let formats =
        [(Format::Fp16, Format::Fp16), (Format::Fp8, Format::Fp8), (Format::Fp8, Format::Fp16)];
    for (packed, to) in formats {
        for (i, (n, k)) in SHAPES.into_iter().enumerate() {
            is_unpacked(packed, to, n, k, 1 + 3 * i as u32);
        }
    }
}
