//! How near the matrix products come to the machine's memory bandwidth and arithmetic.
//!
//! `cargo run --release -p spec-core --example linear_bench [-- [0.5b|1.5b] [dtype ...] [instruction set]]`
//!
//! A sample is one layer, short enough to fit between the doings of others on a shared machine; the layers
//! take turns and are far more bytes than the caches hold. The read bandwidth is measured in turns with
//! the products, because both drift. Figures are of the fastest tenth of the samples,
//! for many rows of the fastest.
#![allow(unsafe_code)]

use spec_core::exec::Pool;
use spec_core::model::Dtype;
use spec_core::model::panel::packed_bytes;
use spec_core::runtime::{Isa, Pinning};
use spec_core::testing::cpu::{Arena, Prepared, Weight, linear, prepare, quiet, read_all, time};
use std::hint::black_box;

/// Outputs and inputs of the matrices of a layer: qkv, o, gate and up, down.
type Layer = [(usize, usize); 4];
const MODELS: [(&str, Layer); 2] = [
    ("0.5b", [(1152, 896), (896, 896), (9728, 896), (896, 4864)]),
    ("1.5b", [(2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)]),
];
/// Weights in all, at least: many times the last-level cache.
const BYTES: usize = 600 << 20;
const FEW_ROWS: [usize; 10] = [1, 2, 3, 4, 5, 6, 8, 9, 12, 16];
const MANY_ROWS: usize = 512;
/// Outputs a thread of the matrices for many rows: few, to keep the samples short, and enough for activations to be read again
/// from a near cache.
const SLICE: usize = 512;
const ROUNDS: usize = 200;
const DOTS: usize = 24 * 20_000;
const MEMORY: &str = "the benchmark needs about 2 GB";

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let wanted = |name: &str, all: &[&str]| {
        let named = args.iter().any(|arg| all.contains(&arg.as_str()));
        !named || args.iter().any(|arg| arg == name)
    };
    let pool = Pool::on_machine(None, Pinning::Auto);
    let _pinned = pool.pin_caller();
    let isa = args.iter().find_map(|arg| arg.parse().ok()).unwrap_or_else(Isa::detect);
    println!("{isa} with {} threads", pool.threads());
    for (name, layer) in MODELS.iter().filter(|(name, _)| wanted(name, &["0.5b", "1.5b"])) {
        for dtype in
            Dtype::ALL.into_iter().filter(|d| wanted(d.name(), &Dtype::ALL.map(Dtype::name)))
        {
            bench(name, layer, dtype, isa, &pool);
        }
    }
}

fn bench(name: &str, layer: &Layer, dtype: Dtype, isa: Isa, pool: &Pool) {
    let layer_bytes: usize = layer.iter().map(|&(n, k)| packed_bytes(dtype, n, k)).sum();
    let num_layers = BYTES.div_ceil(layer_bytes);
    let mut arena = Arena::new(2 * num_layers * layer_bytes + BYTES / 4).expect(MEMORY);
    let layers: Vec<_> = (0..num_layers).map(|_| weights(layer, dtype, &mut arena, pool)).collect();
    let plain = arena.push(pool, &vec![1; num_layers * layer_bytes]);
    let slices = weights(&layer.map(|(_, k)| (SLICE * pool.threads(), k)), dtype, &mut arena, pool);
    let mut runner = Runner::new(layer, isa, pool);
    let mut seconds = vec![Vec::new(); FEW_ROWS.len()];
    let mut many = vec![Vec::new(); slices.len()];
    let (mut read, mut peak) = (Vec::new(), Vec::new());
    let mut turns = (0..num_layers).cycle();
    for round in 0..ROUNDS {
        for (rows, seconds) in FEW_ROWS.iter().zip(&mut seconds) {
            let turn = turns.next().unwrap_or(0);
            seconds.push(time(|| runner.pass(&layers[turn], *rows)));
        }
        let part = plain.chunks_exact(layer_bytes).nth(turns.next().unwrap_or(0));
        read.push(time(|| read_all(pool, part.unwrap_or_default())));
        peak.push(time(arithmetic));
        let slice = round % slices.len();
        many[slice].push(runner.product(&slices[slice], MANY_ROWS));
    }
    let gigabytes = layer_bytes as f64 / 1e9;
    let (one, read) = (quiet(&mut seconds[0]), quiet(&mut read));
    print!("{name} {dtype}: read {:.1} GB/s; 1 row {:.1}", gigabytes / read, gigabytes / one);
    print!(" = {:.0} %; times it", 100.0 * read / one);
    for (rows, seconds) in FEW_ROWS.iter().zip(&mut seconds).skip(1) {
        print!(" {rows}: {:.2}", quiet(seconds) / one);
    }
    let k: usize = layer.iter().map(|m| m.1).sum();
    let of_each: f64 = many.iter().map(|seconds| best(seconds)).sum();
    let rate = (SLICE * pool.threads() * k * MANY_ROWS) as f64 / of_each / 1e9;
    let peak = pool.threads() as f64 * (DOTS * macs_of_a_dot(dtype)) as f64 / best(&peak) / 1e9;
    println!("; {MANY_ROWS} rows: {rate:.0} GMAC/s = {:.0} % of {peak:.0}", 100.0 * rate / peak);
}

/// A layer of matrices whose values are ordinary numbers in every format.
fn weights(layer: &Layer, dtype: Dtype, arena: &mut Arena, pool: &Pool) -> Vec<Weight> {
    let mut matrix = |&(n, k): &(usize, usize)| {
        let packed = vec![0x3c_u8; packed_bytes(dtype, n, k)];
        let scales = if dtype.has_output_scales() { vec![1e-3; n] } else { Vec::new() };
        Weight::new(dtype, n, k, arena.push(pool, &packed), scales, None)
    };
    layer.iter().map(&mut matrix).collect()
}

struct Runner<'a> {
    isa: Isa,
    pool: &'a Pool,
    x: Vec<f32>,
    prepared: Prepared,
    out: Vec<f32>,
}

impl<'a> Runner<'a> {
    fn new(layer: &Layer, isa: Isa, pool: &'a Pool) -> Self {
        let widest = |f: fn(&(usize, usize)) -> usize| layer.iter().map(f).max().unwrap_or(0);
        let x = (0..MANY_ROWS * widest(|m| m.1)).map(|i| (i % 97) as f32 / 97.0 - 0.5).collect();
        let out = vec![0.0; MANY_ROWS * widest(|m| m.0)];
        Self { isa, pool, x, prepared: Prepared::default(), out }
    }

    fn pass(&mut self, layer: &[Weight], rows: usize) {
        for w in layer {
            self.product(w, rows);
        }
    }

    /// Prepares and multiplies; returns the seconds of the product alone.
    fn product(&mut self, w: &Weight, rows: usize) -> f64 {
        let (x, out) = (&self.x[..rows * w.k()], &mut self.out[..rows * w.n()]);
        prepare(self.isa, w.dtype(), x, rows, w.k(), &mut self.prepared, self.pool);
        time(|| linear(self.isa, self.pool, w, &self.prepared, rows, out))
    }
}

/// Multiply-adds of one vector instruction of 64 bytes.
fn macs_of_a_dot(dtype: Dtype) -> usize {
    match dtype {
        Dtype::Fp32 | Dtype::Fp16 => 16,
        Dtype::Bf16 | Dtype::Fp8 => 32,
        Dtype::Int8 | Dtype::Int4 => 64,
    }
}

/// Vector instructions as fast as one thread can issue them. All kinds of dot product take as long as a
/// multiply-add.
#[cfg(target_arch = "x86_64")]
fn arithmetic() {
    use std::arch::x86_64::*;
    #[target_feature(enable = "avx512f")]
    fn dots() {
        let one = black_box(_mm512_set1_ps(1.0));
        let mut acc = [one; 24];
        for _ in 0..DOTS / 24 {
            for acc in &mut acc {
                *acc = _mm512_fmadd_ps(one, one, *acc);
            }
        }
        black_box(acc);
    }
    if Isa::supported().any(|isa| isa.to_string() == "avx512") {
        // SAFETY: the machine has it.
        unsafe { dots() };
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn arithmetic() {}

fn best(seconds: &[f64]) -> f64 {
    seconds.iter().copied().fold(f64::INFINITY, f64::min)
}
