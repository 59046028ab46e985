//! Products as a library makes them, on the emulated GPU: as strict as the library is.

use crate::image::{Random, e4m3_value};
use half::f16;
use spec_core::model::Dtype;
use spec_core::testing::cuda::device::{Device as _, Op, Product, ProductShape};
use spec_emu::{Emulator, Schedule};

const M: usize = 5;
const N: usize = 128;
const K: usize = 64;
/// What a sum of [`K`] terms loses in f32, of their magnitudes.
const SUM_ERROR: f64 = 64.0 * 6e-8;

fn gpu(capability: (u32, u32)) -> Emulator {
    Emulator::new(capability, 1, Schedule::PLAIN)
}

fn shape(format: Dtype) -> ProductShape {
    ProductShape { format, m: M, n: N, k: K }
}

/// Elements as they are stored, and their values.
fn elements(format: Dtype, count: usize, random: &mut Random) -> (Vec<u8>, Vec<f64>) {
    let halves = random.floats(count, |x| x).into_iter().map(f16::from_f32);
    match format {
        Dtype::Fp8 => {
            // Neither of the two that are no number.
            let bytes: Vec<u8> = halves.map(|x| x.to_bits() as u8 & 0xbf).collect();
            (bytes.clone(), bytes.into_iter().map(e4m3_value).collect())
        }
        _ => {
            let bytes = halves.clone().flat_map(|x| x.to_le_bytes()).collect();
            (bytes, halves.map(|x| x.to_f64()).collect())
        }
    }
}

/// A product on a GPU, of nothing yet.
fn product(gpu: &mut Emulator, shape: ProductShape) -> Product {
    let ProductShape { format, m, n, k } = shape;
    let mut array = |elements: usize, bytes: usize| gpu.alloc(elements * bytes).expect("memory");
    let (weights, input) = (array(n * k, format.bytes()), array(m * k, format.bytes()));
    Product { shape, weights, input, output: array(m * n, 4) }
}

#[test]
fn rows_are_multiplied_with_each_output() {
    for format in [Dtype::Fp16, Dtype::Fp8] {
        let (mut gpu, random) = (gpu((9, 0)), &mut Random(3));
        gpu.enable_products(&[shape(format)]).expect("it multiplies both");
        let product = product(&mut gpu, shape(format));
        let (weights, w) = elements(format, N * K, random);
        let (input, x) = elements(format, M * K, random);
        gpu.write(product.weights, &weights).expect("written");
        gpu.write(product.input, &input).expect("written");
        gpu.issue(&Op::Product(product)).expect("multiplied");
        let mut bytes = vec![0; M * N * 4];
        gpu.read(product.output, &mut bytes).expect("read");
        for (idx, four) in bytes.as_chunks().0.iter().enumerate() {
            let (row, output) = (idx / N, idx % N);
            let terms = || (0..K).map(|i| x[row * K + i] * w[output * K + i]);
            let (wanted, found) = (terms().sum::<f64>(), f64::from(f32::from_le_bytes(*four)));
            let allowed = SUM_ERROR * terms().map(f64::abs).sum::<f64>();
            assert!((found - wanted).abs() <= allowed, "{format}: row {row}, {output}: {found}");
        }
    }
}

/// It sees what was written before its turn, and who comes after it sees its sums.
#[test]
fn a_recorded_product_runs_when_its_turn_comes() {
    let (mut gpu, random) = (gpu((9, 0)), &mut Random(4));
    gpu.enable_products(&[shape(Dtype::Fp16)]).expect("enabled");
    let product = product(&mut gpu, shape(Dtype::Fp16));
    let graph = gpu.record(&[Op::Product(product)]).expect("recorded");
    let (weights, _) = elements(Dtype::Fp16, N * K, random);
    gpu.write(product.weights, &weights).expect("written");
    let mut sums = |gpu: &mut Emulator| {
        let (input, _) = elements(Dtype::Fp16, M * K, random);
        gpu.write(product.input, &input).expect("written");
        gpu.replay(graph).expect("replayed");
        let mut bytes = vec![0; M * N * 4];
        gpu.read(product.output, &mut bytes).expect("read");
        bytes
    };
    let (first, second) = (sums(&mut gpu), sums(&mut gpu));
    assert!(first != second && first.iter().any(|&byte| byte != 0));
}

#[test]
#[should_panic(expected = "was not enabled")]
fn a_shape_that_nobody_asked_for_is_a_mistake() {
    let mut gpu = gpu((9, 0));
    gpu.enable_products(&[shape(Dtype::Fp16)]).expect("enabled");
    let product = product(&mut gpu, ProductShape { m: M + 1, ..shape(Dtype::Fp16) });
    let _ = gpu.issue(&Op::Product(product));
}

#[test]
#[should_panic(expected = "an array of a product is at")]
fn an_array_between_the_places_for_arrays_is_a_mistake() {
    let mut gpu = gpu((9, 0));
    gpu.enable_products(&[shape(Dtype::Fp16)]).expect("enabled");
    let product = product(&mut gpu, shape(Dtype::Fp16));
    let _ = gpu.issue(&Op::Product(Product { input: product.input + 16, ..product }));
}

#[test]
fn fp8_is_refused_where_nothing_multiplies_it() {
    let error = gpu((8, 0)).enable_products(&[shape(Dtype::Fp8)]).unwrap_err().to_string();
    assert!(error.contains("8.0 does not multiply fp8"), "{error}");
    gpu((8, 9)).enable_products(&[shape(Dtype::Fp8)]).expect("it does");
}
