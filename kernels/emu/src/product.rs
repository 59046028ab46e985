//! What a library of products computes: every sum in f32, its terms in an order of its own for each row, since no library
//! promises more than that a row at its place has the same bits again. The terms themselves are exact in f32.

use crate::arena::Arena;
use half::f16;
use spec_core::model::Dtype;
use spec_core::testing::cuda::device::{Address, Product, ProductShape};

/// What a library takes for granted of arrays.
const ALIGNMENT: Address = 256;

/// A library would not compute it otherwise.
pub(crate) fn check(product: &Product) {
    let Product { shape: ProductShape { n, k, .. }, weights, input, output } = *product;
    assert!(n % 64 == 0 && k % 64 == 0, "{n} outputs of {k} inputs are not whole tiles");
    for address in [weights, input, output] {
        assert_eq!(address % ALIGNMENT, 0, "an array of a product is at {address:#x}");
    }
}

/// Reads both matrices, writes their product.
pub(crate) fn multiply(arena: &Arena, product: &Product) {
    let Product { shape, weights, input, output } = *product;
    let ProductShape { format, m, n, k } = shape;
    let read = |address, len: usize| {
        let mut bytes = vec![0; len * format.bytes()];
        arena.read(address, &mut bytes);
        values(&bytes, format)
    };
    let (weights, input) = (read(weights, n * k), read(input, m * k));
    let mut sums = Vec::with_capacity(m * n * size_of::<f32>());
    for (place, row) in input.chunks_exact(k).enumerate() {
        let (behind, first) = row.split_at(place % k);
        for of_output in weights.chunks_exact(k) {
            let (of_behind, of_first) = of_output.split_at(place % k);
            let terms = first.iter().zip(of_first).chain(behind.iter().zip(of_behind));
            let sum = terms.fold(0f32, |sum, (x, w)| sum + x * w);
            sums.extend(sum.to_le_bytes());
        }
    }
    arena.write(output, &sums);
}

fn values(bytes: &[u8], format: Dtype) -> Vec<f32> {
    match format {
        Dtype::Fp8 => bytes.iter().map(|&code| e4m3(code)).collect(),
        Dtype::Fp16 => {
            bytes.as_chunks().0.iter().map(|&two| f16::from_le_bytes(two).to_f32()).collect()
        }
        other => panic!("no library multiplies {other}"),
    }
}

/// Four bits of exponent, three of fraction, one NaN and no infinity.
fn e4m3(code: u8) -> f32 {
    let fraction = f32::from(code & 7) / 8.0;
    let magnitude = match code >> 3 & 15 {
        _ if code & 0x7f == 0x7f => f32::NAN,
        0 => fraction * 2f32.powi(-6),
        exponent => (1.0 + fraction) * 2f32.powi(i32::from(exponent) - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}
