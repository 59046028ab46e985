//! What becomes the input of a product, and what follows one.

use crate::image::Random;
use crate::run::{floats, put, read, run};
use crate::written::{LAYOUTS, Layout, Written};
use half::f16;
use spec_core::testing::cuda::model::many_params::{
    FinishParams, NormaliseParams, Operand, QuantiseParams,
};
use spec_core::testing::cuda::model::params::Scaling;
use spec_emu::Arena;
use spec_kernels::{Epilogue, Format, Variant};

const FORMATS: [Format; 2] = [Format::Fp16, Format::Fp8];
/// Rows, width, stride, blocks: less than a block's threads, a ragged end, several rounds of a block.
const SHAPES: [(usize, usize, usize, u32); 4] =
    [(1, 64, 64, 1), (5, 96, 128, 2), (3, 1100, 1152, 9), (7, 2080, 2112, 3)];
/// What a scaled sum loses in f32, of its magnitude.
const SUM_ERROR: f64 = 1e-6;
/// What a sum of 64 squares may lose in f32, of its value.
const SQUARES_ERROR: f32 = 1e-6;
const EPS: f32 = 1e-3;

fn kinds() -> impl Iterator<Item = (Format, Layout)> {
    FORMATS.into_iter().flat_map(|format| LAYOUTS.map(|layout| (format, layout)))
}

/// Rows of very different size, one of zeros.
fn rows(count: usize, width: usize, random: &mut Random) -> Vec<Vec<f32>> {
    let size = |row: usize| [1.0, 300.0, 0.0, 1e-3][row % 4];
    (0..count).map(|row| random.floats(width, |x| x * size(row))).collect()
}

fn normalised(row: &[f32], weight: &[f32]) -> Vec<f64> {
    let squares: f64 = row.iter().map(|&x| f64::from(x).powi(2)).sum();
    let factor = 1.0 / (squares / row.len() as f64 + f64::from(EPS)).sqrt();
    row.iter().zip(weight).map(|(&x, &w)| f64::from(x) * factor * f64::from(w)).collect()
}

/// The sum of squares of each 64 elements.
fn squares(row: &[f32]) -> Vec<f32> {
    let square = |x: &f32| f64::from(*x).powi(2);
    row.chunks(64).map(|tile| tile.iter().map(square).sum::<f64>() as f32).collect()
}

/// Runs the norm; the rows as they were written.
fn normalise(
    rows: &[Vec<f32>],
    weight: &[f32],
    (format, layout): (Format, Layout),
    (stride, grid): (usize, u32),
    seed: u64,
) -> (Arena, Written) {
    let arena = Arena::new(1 << 26);
    let written = Written::new(&arena, format, rows.len(), stride, layout);
    let params = NormaliseParams {
        input: put(&arena, &rows.concat()),
        squares: put(&arena, &rows.iter().flat_map(|row| squares(row)).collect::<Vec<_>>()),
        weight: put(&arena, weight),
        output: written.params,
        row_index: 0,
        eps: EPS,
        num_rows: rows.len() as u32,
        k: weight.len() as u32,
        unused: 0,
    };
    run(&Variant::plain("normalise"), grid, params, seed);
    (arena, written)
}

#[test]
fn rows_are_normalised() {
    for kind in kinds() {
        for (seed, (count, k, stride, grid)) in (0..).zip(SHAPES) {
            let random = &mut Random(seed);
            let (rows, weight) = (rows(count, k, random), random.floats(k, |x| 1.0 + 0.5 * x));
            let expected: Vec<_> = rows.iter().map(|row| normalised(row, &weight)).collect();
            let (arena, written) = normalise(&rows, &weight, kind, (stride, grid), seed);
            written.check(&arena, &expected);
        }
    }
}

#[test]
fn bits_of_a_normalised_row_depend_on_that_row_alone() {
    let random = &mut Random(5);
    let (all, weight) = (rows(6, 1100, random), random.floats(1100, |x| 1.0 + 0.5 * x));
    for kind in kinds() {
        let (arena, together) = normalise(&all, &weight, kind, (1152, 4), 1);
        let together = together.rows(&arena);
        for (idx, row) in all.iter().enumerate() {
            let row = std::slice::from_ref(row);
            let (arena, alone) = normalise(row, &weight, kind, (1152, 1), idx as u64);
            assert_eq!(alone.rows(&arena)[0].0, together[idx].0, "{kind:?}: row {idx}");
        }
    }
}

#[test]
fn halves_are_quantised() {
    for (format, layout) in kinds() {
        for (seed, (count, k, stride, grid)) in (10..).zip(SHAPES) {
            let halves = |row: Vec<f32>| row.into_iter().map(f16::from_f32).collect::<Vec<_>>();
            let rows: Vec<_> = rows(count, k, &mut Random(seed)).into_iter().map(halves).collect();
            let expected: Vec<Vec<f64>> =
                rows.iter().map(|row| row.iter().map(|x| x.to_f64()).collect()).collect();
            let bytes: Vec<u8> = rows.concat().iter().flat_map(|x| x.to_le_bytes()).collect();
            let arena = Arena::new(1 << 26);
            let written = Written::new(&arena, format, count, stride, layout);
            let (input, output) = (arena.put(&bytes), written.params);
            let params = QuantiseParams { input, output, num_rows: count as u32, k: k as u32 };
            run(&Variant::plain("quantise"), grid, params, seed);
            written.check(&arena, &expected);
        }
    }
}

/// Sums of a product of which nothing has been made yet.
struct Sums {
    n: usize,
    /// Padded rows.
    sums: Vec<Vec<f32>>,
    /// Of outputs and rows, and the bias; each may be missing.
    outputs: Option<Vec<f32>>,
    rows: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
}

impl Sums {
    /// `parts` says by its bits which of the three there are.
    fn random(count: usize, n: usize, parts: usize, random: &mut Random) -> Self {
        let sums = rows(count, n.next_multiple_of(64), random);
        let mut part = |bit: usize, len: usize, base: f32| {
            let values = random.floats(len, |x| base + x);
            (parts >> bit & 1 == 1).then_some(values)
        };
        let (outputs, rows, bias) = (part(0, n, 1.5), part(1, count, 2.0), part(2, n, 0.0));
        Self { n, sums, outputs, rows, bias }
    }

    fn scaling(&self, arena: &Arena) -> Scaling {
        let place = |values: &Option<Vec<f32>>| values.as_ref().map_or(0, |v| put(arena, v));
        let Self { outputs, rows, bias, .. } = self;
        Scaling { outputs: place(outputs), rows: place(rows), bias: place(bias) }
    }

    /// The outputs of a row, in image order.
    fn outputs(&self, row: usize) -> Vec<f64> {
        let part = |values: &Option<Vec<f32>>, i: usize, none: f64| {
            values.as_ref().map_or(none, |values| values[i].into())
        };
        let output = |n: usize| {
            let factor = part(&self.rows, row, 1.0) * part(&self.outputs, n, 1.0);
            f64::from(self.sums[row][n]) * factor + part(&self.bias, n, 0.0)
        };
        (0..self.n).map(output).collect()
    }

    fn params(&self, arena: &Arena) -> FinishParams {
        FinishParams {
            sums: put(arena, &self.sums.concat()),
            scaling: self.scaling(arena),
            residual: 0,
            squares: 0,
            output: Operand::default(),
            num_rows: self.sums.len() as u32,
            n: self.n as u32,
        }
    }
}

#[test]
fn outputs_are_added_to_the_residual_stream() {
    for (parts, (count, n, _, grid)) in (0..8).zip(SHAPES.into_iter().cycle()) {
        let random = &mut Random(20 + parts as u64);
        let sums = Sums::random(count, n, parts, random);
        let old = random.floats(count * n, |x| x);
        let arena = Arena::new(1 << 26);
        let residual = put(&arena, &old);
        let squares = put(&arena, &vec![f32::NAN; count * n.div_ceil(64)]);
        let params = FinishParams { residual, squares, ..sums.params(&arena) };
        run(&Variant::finish(Epilogue::Residual), grid, params, parts as u64);
        let found = floats(&read(&arena, residual, count * n * 4));
        let expected = found.chunks(n).flat_map(self::squares);
        let squares = floats(&read(&arena, squares, count * n.div_ceil(64) * 4));
        for (square, expected) in squares.into_iter().zip(expected) {
            assert!((square - expected).abs() <= SQUARES_ERROR * expected, "{square}, {expected}");
        }
        for row in 0..count {
            for (i, output) in sums.outputs(row).into_iter().enumerate() {
                let (found, old) = (found[row * n + i], f64::from(old[row * n + i]));
                let error = (f64::from(found) - (old + output)).abs();
                let allowed = SUM_ERROR * (old.abs() + output.abs() + 2.0);
                assert!(error <= allowed, "row {row}, {i}: {found} for {old} + {output}");
            }
        }
    }
}

/// Gates and ups take turns in runs of 32.
fn swiglu(outputs: &[f64]) -> Vec<f64> {
    let activated = |k: usize| {
        let (gate, up) = (outputs[k / 32 * 64 + k % 32], outputs[k / 32 * 64 + 32 + k % 32]);
        gate / (1.0 + (-gate).exp()) * up
    };
    (0..outputs.len() / 2).map(activated).collect()
}

#[test]
fn gates_and_ups_become_the_next_input() {
    for (format, layout) in kinds() {
        for (parts, (count, half, grid)) in
            (0..8).zip([(1, 32, 1), (6, 96, 4), (3, 1120, 2)].into_iter().cycle())
        {
            let random = &mut Random(40 + parts as u64);
            let sums = Sums::random(count, 2 * half, parts, random);
            let expected: Vec<_> = (0..count).map(|row| swiglu(&sums.outputs(row))).collect();
            let arena = Arena::new(1 << 26);
            let written = Written::new(&arena, format, count, half.next_multiple_of(128), layout);
            let params = FinishParams { output: written.params, ..sums.params(&arena) };
            run(&Variant::finish(Epilogue::SwiGlu), grid, params, parts as u64);
            written.check(&arena, &expected);
        }
    }
}

#[test]
fn what_is_no_number_stays_none() {
    let mut row = vec![1.0f32; 96];
    row[7] = f32::NAN;
    let weight = vec![1.0; 96];
    for format in FORMATS {
        let (arena, written) =
            normalise(&[row.clone()], &weight, (format, Layout::RowAfterRow), (128, 1), 3);
        let (bytes, _) = &written.rows(&arena)[0];
        let is_nan = match format {
            Format::Fp16 => f16::from_le_bytes([bytes[14], bytes[15]]).is_nan(),
            Format::Fp8 => bytes[7] & 0x7f == 0x7f,
        };
        assert!(is_nan, "{format:?}");
    }
}
