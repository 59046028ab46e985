//! The product with whole blocks of a prompt and what follows it: close to its twin in f64, and the same bits however it is
//! cut.

use crate::image::{Matrix, Random, TILE, image_order, reorder};
use crate::run::{UNTOUCHED, floats, put, read};
use crate::written::bytes_of;
use half::f16;
use spec_core::testing::cuda::device::bytes_of as bytes_of_params;
use spec_core::testing::cuda::model::many_params::MultiplyParams;
use spec_core::testing::cuda::model::params::Scaling;
use spec_core::testing::cuda::model::{MULTIPLY_CLUSTER, MULTIPLY_SHARED_BYTES, MULTIPLY_THREADS};
use spec_emu::{Arena, Launch, Schedule, run};
use spec_kernels::{Epilogue, Format, MULTIPLY_EPILOGUES, MULTIPLY_ROWS, Variant};
use std::ops::Range;

mod order;

/// What a sum loses, of the magnitudes of its terms: in f32, and where each product of warpgroups of e4m3 keeps 13 bits of the
/// largest term; and what becomes of it, of its own.
const SUM_ERROR: f64 = 1e-5;
const E4M3_SUM_ERROR: f64 = 2e-3;
const F16_ERROR: f64 = 1.0 / 2048.0 + 1e-4;

/// Places of whole tiles and a matrix, both packed.
struct Problem {
    format: Format,
    epilogue: Epilogue,
    places: usize,
    n: usize,
    k: usize,
    inputs: Matrix,
    weights: Matrix,
    /// Of the outputs, in their own order, of the places, and of the outputs again.
    scales: Vec<f32>,
    place_scales: Vec<f32>,
    bias: Vec<f32>,
    residual: Vec<f32>,
}

/// Tiles of how many rows, which places have rows, and how many clusters of blocks there are.
#[derive(Clone, Debug)]
struct Cut {
    tile: usize,
    places: Range<usize>,
    clusters: u32,
}

/// What rounding both factors to e4m3 costs a sum of many products, of its size: half of a sixteenth at most each.
const ROUNDING_ERROR: f64 = 0.025;

/// Where a sum has hundreds of instructions, each of which cuts it.
#[test]
fn deep_sums_of_e4m3_lose_less_than_the_rounding_of_their_factors() {
    let problem = Problem::random(Format::Fp8, Epilogue::Raw, 128, 64, 14_336);
    let found = problem.run_here(&Cut { tile: 128, places: 0..128, clusters: 1 }, 1).values;
    let (mut lost, mut size) = (0.0, 0.0);
    for (i, &found) in found.iter().enumerate() {
        let (sum, _) = problem.sum(i / 64, i % 64);
        lost += (f64::from(found) - sum).powi(2);
        size += sum.powi(2);
    }
    let share = (lost / size).sqrt();
    println!("sums of 14336 products lose {share:.4} of their size");
    assert!(share < ROUNDING_ERROR / 4.0, "{share} of a sum is lost");
}

/// What is left behind: `[row][width]`, and where the residual stream grows its squares.
#[derive(Clone, Debug, PartialEq)]
struct Left {
    values: Vec<f32>,
    squares: Vec<f32>,
}

/// Runs launches, in this process or in a program of its own.
type Runner<'a> = &'a dyn Fn(&Arena, &[Launch<'_>]) -> Result<(), String>;

impl Problem {
    fn random(format: Format, epilogue: Epilogue, places: usize, n: usize, k: usize) -> Self {
        let random = &mut Random((n + k) as u64);
        let inputs = Matrix::random(format, places, k, random);
        let weights = Matrix::random(format, n, k, random);
        let scales = random.floats(n, |x| 1.5 + x);
        let place_scales = random.floats(places, |x| 0.02 * (1.5 + x));
        let bias = random.floats(n, |x| x);
        let residual = random.floats(places * n, |x| 10.0 * x);
        Self {
            format,
            epilogue,
            places,
            n,
            k,
            inputs,
            weights,
            scales,
            place_scales,
            bias,
            residual,
        }
    }

    /// Elements of a row that is left behind.
    fn width(&self) -> usize {
        match self.epilogue {
            Epilogue::Raw => self.n.next_multiple_of(TILE),
            Epilogue::SwiGlu => self.n / 2,
            _ => self.n,
        }
    }

    fn element_bytes(&self) -> usize {
        if self.epilogue == Epilogue::SwiGlu { 2 } else { 4 }
    }

    fn run(&self, cut: &Cut, runner: Runner<'_>) -> Result<Left, String> {
        let arena = Arena::new(1 << 26);
        let (num_rows, tiles) = (cut.places.len(), self.n.div_ceil(TILE));
        let order = image_order(self.epilogue, self.n, 0);
        let places: Vec<_> = (0..self.places).collect();
        let is_fp8 = self.format == Format::Fp8;
        let scales = |values: &[f32]| if is_fp8 { put(&arena, values) } else { 0 };
        let len = num_rows * self.width() * self.element_bytes();
        let mut before = vec![UNTOUCHED; len + 1];
        if self.epilogue == Epilogue::Residual {
            let rows = &self.residual[cut.places.start * self.n..cut.places.end * self.n];
            before[..len].copy_from_slice(bytes_of_params(rows));
        }
        let params = [MultiplyParams {
            weights: arena.put(&self.weights.pack(&order)),
            rows: arena.put(&self.inputs.pack(&places)),
            scaling: Scaling {
                outputs: scales(&reorder(&self.scales, &order)),
                rows: scales(&self.place_scales),
                bias: put(&arena, &reorder(&self.bias, &order)),
            },
            output: arena.put(&before),
            squares: put(&arena, &vec![f32::NAN; num_rows * tiles + 1]),
            n: self.n as u32,
            k_units: self.k.div_ceil(128 / bytes_of(self.format)) as u32,
            first: cut.places.start as u32,
            num_rows: num_rows as u32,
        }];
        let launch = Launch {
            variant: &Variant::multiply(self.format, cut.tile, self.epilogue).to_string(),
            grid: cut.clusters * MULTIPLY_CLUSTER,
            block: MULTIPLY_THREADS,
            shared_bytes: MULTIPLY_SHARED_BYTES,
            params: bytes_of_params(&params),
            overlap: true,
            ..Launch::default()
        };
        runner(&arena, &[launch])?;
        let found = read(&arena, params[0].output, len + 1);
        assert_eq!(found[len], UNTOUCHED, "a byte too many");
        let values = match self.epilogue {
            Epilogue::SwiGlu => {
                let halves = found[..len].as_chunks().0.iter();
                halves.map(|&two| f16::from_le_bytes(two).to_f32()).collect()
            }
            _ => floats(&found[..len]),
        };
        let mut squares = floats(&read(&arena, params[0].squares, (num_rows * tiles + 1) * 4));
        assert!(squares.pop().is_some_and(f32::is_nan), "a sum of squares too many");
        if self.epilogue != Epilogue::Residual {
            assert!(squares.iter().all(|x| x.is_nan()), "squares of what is no residual stream");
            squares.clear();
        }
        Ok(Left { values, squares })
    }

    fn run_here(&self, cut: &Cut, seed: u64) -> Left {
        let schedule = Schedule::seeded(seed);
        let found = self.run(cut, &|_, launches| run(launches, &schedule));
        found.unwrap_or_else(|error| {
            panic!("{:?}, {:?}, {cut:?}: {error}", self.format, self.epilogue)
        })
    }

    fn sum_error(&self) -> f64 {
        match self.format {
            Format::Fp8 => E4M3_SUM_ERROR,
            Format::Fp16 => SUM_ERROR,
        }
    }

    /// A sum of the product, and the magnitude of what was added up.
    fn sum(&self, place: usize, n: usize) -> (f64, f64) {
        let term = |k| self.inputs.value(place, k) * self.weights.value(n, k);
        (0..self.k).map(term).fold((0.0, 0.0), |(sum, size), x| (sum + x, size + x.abs()))
    }

    /// The same with scales and bias.
    fn output(&self, place: usize, n: usize) -> (f64, f64) {
        let (sum, size) = self.sum(place, n);
        let scale = match self.format {
            Format::Fp8 => f64::from(self.place_scales[place]) * f64::from(self.scales[n]),
            Format::Fp16 => 1.0,
        };
        (sum * scale + f64::from(self.bias[n]), size * scale + 1.0)
    }

    fn check(&self, left: &Left, places: Range<usize>) {
        let width = self.width();
        for (i, &found) in left.values.iter().enumerate() {
            let (place, n) = (places.start + i / width, i % width);
            let (wanted, allowed) = match self.epilogue {
                Epilogue::Raw if n >= self.n => (0.0, 0.0),
                Epilogue::Raw => {
                    let (sum, size) = self.sum(place, n);
                    (sum, self.sum_error() * size)
                }
                Epilogue::Residual => {
                    let (output, size) = self.output(place, n);
                    let old = f64::from(self.residual[place * self.n + n]);
                    (old + output, self.sum_error() * size + SUM_ERROR * old.abs())
                }
                _ => {
                    let ((gate, gate_size), (up, up_size)) =
                        (self.output(place, n), self.output(place, self.n / 2 + n));
                    let half = gate / (1.0 + (-gate).exp()) * up;
                    let error = self.sum_error() * 2.0;
                    let error = error * (gate_size * (up.abs() + up_size) + up_size * gate.abs());
                    (half.clamp(-65504.0, 65504.0), error + F16_ERROR * half.abs() + 1e-6)
                }
            };
            let error = (f64::from(found) - wanted).abs();
            assert!(error <= allowed, "place {place}, {n}: {found} for {wanted}");
        }
        let tiles = self.n.div_ceil(TILE);
        for (i, &found) in left.squares.iter().enumerate() {
            let row = &left.values[i / tiles * self.n..][..self.n];
            let tile = row.chunks(TILE).nth(i % tiles).expect("one of its tiles");
            let wanted: f64 = tile.iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!((f64::from(found) - wanted).abs() <= 1e-5 * wanted, "{found} for {wanted}");
        }
    }
}

/// Outputs and inputs: an odd number of tiles; half a tile at the end, ragged inputs; more units than stages; one unit.
const SHAPES: [(usize, usize); 4] = [(192, 640), (160, 200), (64, 1200), (320, 64)];

#[test]
fn rows_in_units_are_multiplied_with_a_packed_matrix() {
    for format in [Format::Fp8, Format::Fp16] {
        for epilogue in MULTIPLY_EPILOGUES {
            for (seed, (n, k)) in (0..).zip(SHAPES) {
                // Gates and ups come in whole tiles.
                let n = if epilogue == Epilogue::SwiGlu { n.next_multiple_of(TILE) } else { n };
                let problem = Problem::random(format, epilogue, 256, n, k);
                for tile in MULTIPLY_ROWS {
                    let cut = Cut { tile, places: 0..256, clusters: 1 + seed as u32 % 3 };
                    problem.check(&problem.run_here(&cut, seed), 0..256);
                }
            }
        }
    }
}

#[test]
fn what_becomes_of_a_row_does_not_depend_on_the_cut() {
    for epilogue in MULTIPLY_EPILOGUES {
        let problem = Problem::random(Format::Fp8, epilogue, 512, 192, 700);
        let whole = problem.run_here(&Cut { tile: 256, places: 0..512, clusters: 3 }, 1);
        for (seed, cut) in (2..).zip([
            Cut { tile: 128, places: 0..512, clusters: 5 },
            Cut { tile: 256, places: 256..512, clusters: 1 },
            Cut { tile: 128, places: 130..300, clusters: 9 },
            Cut { tile: 256, places: 250..251, clusters: 2 },
        ]) {
            let part = problem.run_here(&cut, seed);
            let of = |all: &[f32]| {
                let width = all.len() / 512;
                let rows = &all[cut.places.start * width..cut.places.end * width];
                rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            let bits = |part: &[f32]| part.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&part.values) == of(&whole.values), "{epilogue:?}, {cut:?}");
            assert!(bits(&part.squares) == of(&whole.squares), "squares, {cut:?}");
        }
    }
}
