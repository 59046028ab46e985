//! What puts the rows of heads on hidden states together, against its naive twin in f64, under disturbed schedules; and that
//! a row's bits depend on that row alone.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, reason = "shared with the tests of the few-row product")]
#[path = "../gemm/image.rs"]
mod image;
mod mutation;
#[path = "../many/run.rs"]
mod run;
mod spread;

use half::f16;
use image::{HalfUnits, Random};
use run::{UNTOUCHED, floats, put, read, run};
use spec_core::testing::cuda::model::params::{JoinParams, MOST_PIECES, Piece};
use spec_emu::Arena;
use spec_kernels::Variant;

const EPS: f32 = 1e-3;
/// What a norm loses in f32, of its value.
const NORM_ERROR: f64 = 1e-5;
/// What a half loses of a value, and of the smallest ones.
const HALF_ERROR: f64 = 1.0 / 2048.0;
const TINY_ERROR: f64 = 1.0 / 33_554_432.0;

/// A part of each row, as a test states it.
#[derive(Clone)]
struct Part {
    rows: Vec<Vec<f32>>,
    /// Elements behind each row.
    gap: usize,
    norm: Option<Vec<f32>>,
}

impl Part {
    fn random(count: usize, len: usize, gap: usize, has_norm: bool, random: &mut Random) -> Self {
        let size = |row: usize| [1.0, 300.0, 0.0, 1e-3][row % 4];
        let rows = (0..count).map(|row| random.floats(len, |x| x * size(row))).collect();
        let norm = has_norm.then(|| random.floats(len, |x| 1.0 + 0.5 * x));
        Self { rows, gap, norm }
    }

    fn len(&self) -> usize {
        self.rows[0].len()
    }

    fn piece(&self, arena: &Arena) -> Piece {
        let behind = vec![f32::NAN; self.gap];
        let rows: Vec<f32> =
            self.rows.iter().flat_map(|row| [&row[..], &behind].concat()).collect();
        let norm = self.norm.as_ref().map_or(0, |norm| put(arena, norm));
        let (len, stride) = (self.len() as u32, (self.len() + self.gap) as u32);
        Piece { rows: put(arena, &rows), norm, stride, len }
    }
}

/// What is asked for.
#[derive(Clone)]
struct Case {
    parts: Vec<Part>,
    /// Rows of the parts, in the order of the result.
    order: Option<Vec<u32>>,
    /// What the last part grows by is silu of these.
    sums: Option<Vec<Vec<f32>>>,
    is_together: bool,
    keeps_normed: bool,
    cleared_len: usize,
    grid: u32,
    /// Whether joined rows lie in units.
    in_units: bool,
}

/// What came of it: f16 rows, kept rows, cleared ones.
type Joined = (Vec<u16>, Vec<f32>, Vec<f32>);

/// What goes to where the first piece comes from, or that the sums are what is cleared.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InPlace {
    Nothing,
    Kept,
    Cleared,
    Sums,
}

impl Case {
    fn new(parts: Vec<Part>) -> Self {
        let (order, sums, is_together, keeps_normed) = (None, None, false, false);
        let (cleared_len, grid, in_units) = (0, 2, false);
        Self { parts, order, sums, is_together, keeps_normed, cleared_len, grid, in_units }
    }

    fn num_rows(&self) -> usize {
        self.order.as_ref().map_or(self.parts[0].rows.len(), Vec::len)
    }

    fn from(&self, row: usize) -> usize {
        self.order.as_ref().map_or(row, |order| order[row] as usize)
    }

    /// The rows of all parts in f64, normed or as they are.
    fn row(&self, row: usize, normed: bool) -> Vec<Vec<f64>> {
        let from = self.from(row);
        let mut rows: Vec<Vec<f64>> = self
            .parts
            .iter()
            .map(|part| part.rows[from].iter().map(|&x| x.into()).collect())
            .collect();
        let mean = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
        let of_all = mean(&rows.concat());
        // Such a part has no norm.
        if let (Some(sums), Some(last)) = (&self.sums, rows.last_mut()) {
            for (x, &sum) in last.iter_mut().zip(&sums[row]) {
                let sum = f64::from(sum);
                *x += sum / (1.0 + (-sum).exp());
            }
        }
        let part = |(part, row): (&Part, &Vec<f64>)| {
            let Some(norm) = part.norm.as_ref().filter(|_| normed) else { return row.clone() };
            let mean = if self.is_together { of_all } else { mean(row) };
            let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
            row.iter().zip(norm).map(|(x, &w)| x * factor * f64::from(w)).collect()
        };
        self.parts.iter().zip(&rows).map(part).collect()
    }

    /// Runs the kernel.
    fn run(&self, in_place: InPlace, seed: u64) -> Joined {
        let arena = Arena::new(1 << 26);
        let (count, last) = (self.num_rows(), &self.parts[self.parts.len() - 1]);
        let width: usize = self.parts.iter().map(Part::len).sum();
        let mut pieces = [Piece::default(); MOST_PIECES];
        for (piece, part) in pieces.iter_mut().zip(&self.parts) {
            *piece = part.piece(&arena);
        }
        let room = |bytes: usize| arena.put(&vec![UNTOUCHED; bytes + 16]);
        let kept_len = count * last.len();
        let cleared_len = count * self.cleared_len;
        let first = pieces[0].rows;
        let sums = self.sums.as_ref().map_or(0, |sums| put(&arena, &sums.concat()));
        let place = |is_first: bool, len: usize| if is_first { first } else { room(4 * len) };
        let kept = place(in_place == InPlace::Kept, kept_len);
        let cleared = match in_place {
            InPlace::Sums => sums,
            _ => place(in_place == InPlace::Cleared, cleared_len),
        };
        let units = HalfUnits { len: width };
        let joined_len = if self.in_units { units.bytes(count) } else { 2 * count * width };
        let joined = room(joined_len);
        let params = JoinParams {
            pieces,
            row_index: self.order.as_ref().map_or(0, |order| {
                arena.put(&order.iter().flat_map(|row| row.to_le_bytes()).collect::<Vec<_>>())
            }),
            joined,
            sums,
            kept,
            cleared,
            eps: EPS,
            num_rows: count as u32,
            num_pieces: self.parts.len() as u32,
            is_together: self.is_together.into(),
            keeps_normed: self.keeps_normed.into(),
            cleared_len: self.cleared_len as u32,
            joined_units: if self.in_units { units.of_tile() as u32 } else { 0 },
            unused: 0,
        };
        run(&Variant::plain("join"), self.grid, params, seed);
        let bytes = |address, len| {
            if address == first || address == sums {
                return read(&arena, address, len);
            }
            let found = read(&arena, address, len + 16);
            assert!(found[len..].iter().all(|&byte| byte == UNTOUCHED), "written behind");
            found[..len].to_vec()
        };
        let mut halves = bytes(joined, joined_len);
        if self.in_units {
            // Each with zeros up to what its units have.
            let padded = HalfUnits { len: units.of_tile() * 64 };
            let rows = padded.unpack(&halves, count, UNTOUCHED);
            let rows = rows.chunks(2 * padded.len).map(|row| row.split_at(2 * width));
            let is_padded = |(_, zeros): (&[u8], &[u8])| zeros.iter().all(|&byte| byte == 0);
            assert!(rows.clone().all(is_padded), "what is behind a row");
            halves = rows.flat_map(|(row, _)| row).copied().collect();
        }
        let halves = halves.as_chunks().0.iter().map(|&two| u16::from_le_bytes(two)).collect();
        (halves, floats(&bytes(kept, 4 * kept_len)), floats(&bytes(cleared, 4 * cleared_len)))
    }

    /// What a part may lose that grows: sums of a few, whose exponentials are approximate.
    fn silu_error(&self) -> f64 {
        if self.sums.is_some() { 1e-5 } else { 0.0 }
    }

    fn check(&self, (halves, kept, cleared): &Joined) {
        let width: usize = self.parts.iter().map(Part::len).sum();
        for row in 0..self.num_rows() {
            let expected = self.row(row, true);
            for (i, (&found, expected)) in
                halves[row * width..].iter().zip(expected.concat()).enumerate()
            {
                let expected = expected.clamp(-65_504.0, 65_504.0);
                let error = (f16::from_bits(found).to_f64() - expected).abs();
                let allowed =
                    (HALF_ERROR + NORM_ERROR) * expected.abs() + TINY_ERROR + self.silu_error();
                assert!(error <= allowed, "row {row}, {i}: off by {error}, {expected}");
            }
            let last = self.row(row, self.keeps_normed).pop().unwrap();
            for (&found, &expected) in kept[row * last.len()..].iter().zip(&last) {
                let error = (f64::from(found) - expected).abs();
                let allowed = NORM_ERROR * expected.abs() + self.silu_error();
                assert!(error <= allowed, "row {row}: {found}, {expected}");
            }
        }
        assert!(cleared.iter().all(|x| x.to_bits() == 0), "not cleared");
        assert_eq!(cleared.len(), self.num_rows() * self.cleared_len);
    }
}

/// A token and a state, as the first layer takes them; the hidden states of three layers; one row more of some.
fn cases() -> Vec<Case> {
    let random = &mut Random(7);
    let mut part = |len, gap, has_norm| Part::random(5, len, gap, has_norm, random);
    let both = vec![part(96, 0, true), part(96, 0, true)];
    let wide = vec![part(1100, 0, true), part(1100, 4, true)];
    let taps = vec![part(64, 128, true), part(64, 128, true), part(64, 128, true)];
    let plain = vec![part(2080, 0, false), part(64, 8, false)];
    let some = vec![part(160, 0, true)];
    vec![
        Case { cleared_len: 64, ..Case::new(both.clone()) },
        Case { keeps_normed: true, cleared_len: 1284, grid: 1, ..Case::new(wide) },
        Case { is_together: true, keeps_normed: true, grid: 3, ..Case::new(taps.clone()) },
        Case { grid: 9, ..Case::new(taps) },
        Case::new(plain),
        Case { order: Some(vec![4, 0, 3]), keeps_normed: true, ..Case::new(some) },
    ]
}

#[test]
fn pieces_are_put_together() {
    for (idx, case) in cases().iter().enumerate() {
        for seed in 0..3 {
            eprintln!("case {idx}, seed {seed}");
            case.check(&case.run(InPlace::Nothing, seed));
        }
    }
}

#[test]
fn rows_may_lie_in_units() {
    for case in cases() {
        let (expected, ..) = case.run(InPlace::Nothing, 0);
        let case = Case { in_units: true, ..case };
        assert_eq!(case.run(InPlace::Nothing, 1).0, expected);
    }
}

#[test]
fn the_last_piece_may_take_the_place_of_the_first() {
    for case in cases().iter().take(1) {
        for keeps_normed in [false, true] {
            let case = Case { keeps_normed, ..case.clone() };
            for seed in 0..4 {
                case.check(&case.run(InPlace::Kept, seed));
            }
        }
    }
}

#[test]
fn a_piece_grows_by_silu_of_sums_that_are_cleared() {
    let random = &mut Random(9);
    for len in [96, 2080] {
        let parts = vec![Part::random(5, len, 0, false, random)];
        let sums = (0..5).map(|_| random.floats(len, |x| 4.0 * x)).collect();
        let case = Case { sums: Some(sums), cleared_len: len, ..Case::new(parts) };
        for in_place in [InPlace::Nothing, InPlace::Kept, InPlace::Sums] {
            (0..3).for_each(|seed| case.check(&case.run(in_place, seed)));
        }
    }
}

#[test]
fn what_is_cleared_may_take_the_place_of_the_first() {
    // A thread has more than one vector of a row.
    let random = &mut Random(8);
    let parts =
        vec![Part::random(5, 2080, 0, false, random), Part::random(5, 64, 8, false, random)];
    let case = Case { cleared_len: 2080, ..Case::new(parts) };
    for seed in 0..4 {
        case.check(&case.run(InPlace::Cleared, seed));
    }
}

#[test]
fn bits_of_a_row_depend_on_that_row_alone() {
    for case in cases() {
        let (halves, kept, _) = case.run(InPlace::Nothing, 0);
        let (width, kept_width) = (halves.len() / case.num_rows(), kept.len() / case.num_rows());
        for row in 0..case.num_rows() {
            let from = case.from(row);
            let parts = case
                .parts
                .iter()
                .map(|part| Part { rows: vec![part.rows[from].clone()], ..part.clone() });
            let alone = Case { parts: parts.collect(), order: None, grid: 1, ..case.clone() };
            let (own, own_kept, _) = alone.run(InPlace::Nothing, 1);
            assert_eq!(own, halves[row * width..][..width]);
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&own_kept), bits(&kept[row * kept_width..][..kept_width]));
        }
    }
}
