//! A cost in milliseconds as a function of rows: a known or assumed shape, scaled where it was
//! measured. Rises with rows, whatever the noise of the measurements.

use crate::engine::CostTable;

/// Every row count up to here has a knot of its own, then there are four to an octave: kernels
/// change their tiles at multiples of these.
const DENSE_ROWS: usize = 8;
const NUM_OCTAVES: usize = 12;
const NUM_KNOTS: usize = DENSE_ROWS + 4 * NUM_OCTAVES;

/// Without a table: what each further row adds, as a share of the first. Weights dominate few rows.
const ASSUMED_ROW_SHARE: f64 = 0.02;

/// Relative variance of a knot that was not measured, when others were; and where a table says its cost.
const NEIGHBOUR_VARIANCE: f64 = 0.04;
const TABLE_VARIANCE: f64 = 0.0025;

#[derive(Clone, Copy, Debug)]
struct Measured {
    /// Of the shape, at this knot.
    factor: f64,
    /// Relative variance of the factor.
    variance: f64,
}

/// Cost by rows.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    shape: [f64; NUM_KNOTS],
    measured: [Option<Measured>; NUM_KNOTS],
    /// What is read: the scaled shape, made to rise.
    ms: [f64; NUM_KNOTS],
    /// Whether the shape is in milliseconds, and not just relative.
    absolute: bool,
    /// Of a knot that was not measured.
    prior_variance: f64,
}

impl Curve {
    /// A curve that starts from a table, or from an assumed shape of unknown scale.
    pub(super) fn new(table: Option<&CostTable>) -> Self {
        let table = table.filter(|table| !table.rows.is_empty());
        let shape = std::array::from_fn(|knot| match table {
            Some(table) => interpolate(table, knot_rows(knot)),
            None => 1.0 + ASSUMED_ROW_SHARE * (knot_rows(knot) - 1) as f64,
        });
        let mut curve = Self {
            shape,
            measured: [None; NUM_KNOTS],
            ms: shape,
            absolute: table.is_some(),
            prior_variance: if table.is_some() { TABLE_VARIANCE } else { NEIGHBOUR_VARIANCE },
        };
        curve.refresh();
        curve
    }

    /// Whether its values are milliseconds yet.
    pub(super) fn is_known(&self) -> bool {
        self.absolute
    }

    /// The cost of `rows` rows.
    pub(super) fn at(&self, rows: usize) -> f64 {
        let rows = rows.max(1);
        let last = knot_rows(NUM_KNOTS - 1);
        if rows >= last {
            return self.ms[NUM_KNOTS - 1] * rows as f64 / last as f64;
        }
        let below = knot_below(rows);
        let (low, high) = (knot_rows(below), knot_rows(below + 1));
        let share = (rows - low) as f64 / (high - low) as f64;
        self.ms[below] + share * (self.ms[below + 1] - self.ms[below])
    }

    /// How unsure the cost of `rows` rows is, as a relative variance.
    pub(super) fn variance(&self, rows: usize) -> f64 {
        self.measured[nearest_knot(rows)].map_or(self.prior_variance, |measured| measured.variance)
    }

    /// Sets the cost of `rows` rows and how unsure it is.
    pub(super) fn set(&mut self, rows: usize, ms: f64, variance: f64) {
        let knot = nearest_knot(rows);
        // The shape between knots, so that a measurement beside a knot is not taken for the knot's.
        let shape = Self { ms: self.shape, ..*self }.at(rows);
        self.measured[knot] = Some(Measured { factor: ms / shape, variance });
        self.absolute = true;
        self.refresh();
    }

    /// Recomputes what is read: knots between measured ones take a factor between theirs.
    fn refresh(&mut self) {
        let mut left: Option<(usize, f64)> = None;
        let mut floor = 0.0;
        for knot in 0..NUM_KNOTS {
            if let Some(measured) = self.measured[knot] {
                left = Some((knot, measured.factor));
            }
            let right = (knot..NUM_KNOTS).find_map(|k| self.measured[k].map(|m| (k, m.factor)));
            let factor = match (left, right) {
                (Some((from, a)), Some((to, b))) if to > from => {
                    a + (b - a) * (knot - from) as f64 / (to - from) as f64
                }
                (Some((_, factor)), _) | (None, Some((_, factor))) => factor,
                (None, None) => 1.0,
            };
            floor = f64::max(floor, factor * self.shape[knot]);
            self.ms[knot] = floor;
        }
    }
}

/// Rows at a knot: 1, 2 .. 8, 10, 12, 14, 16, 20 ..
fn knot_rows(knot: usize) -> usize {
    if knot < DENSE_ROWS {
        return knot + 1;
    }
    let (octave, quarter) = ((knot - DENSE_ROWS) / 4, (knot - DENSE_ROWS) % 4 + 1);
    (DENSE_ROWS << octave) + ((DENSE_ROWS / 4 * quarter) << octave)
}

/// The last knot with no more rows.
fn knot_below(rows: usize) -> usize {
    if rows <= DENSE_ROWS {
        return rows - 1;
    }
    let octave = (rows / DENSE_ROWS).ilog2() as usize;
    let quarter = (rows - (DENSE_ROWS << octave)) / ((DENSE_ROWS / 4) << octave);
    (DENSE_ROWS - 1 + 4 * octave + quarter).min(NUM_KNOTS - 1)
}

/// The knot that a measurement belongs to.
pub(super) fn nearest_knot(rows: usize) -> usize {
    let below = knot_below(rows.max(1));
    let above = (below + 1).min(NUM_KNOTS - 1);
    if rows.abs_diff(knot_rows(above)) < rows.abs_diff(knot_rows(below)) { above } else { below }
}

/// Linear between the table's points, level before the first, proportional after the last.
fn interpolate(table: &CostTable, rows: usize) -> f64 {
    let points = || table.rows.iter().copied().zip(table.step_ms.iter().copied());
    let below = points().take_while(|&(at, _)| at <= rows).last();
    let above = points().find(|&(at, _)| at > rows);
    match (below, above) {
        (Some((low, a)), Some((high, b))) => {
            a + (b - a) * (rows - low) as f64 / (high - low) as f64
        }
        (Some((low, ms)), None) => ms * rows as f64 / low.max(1) as f64,
        (None, Some((_, ms))) => ms,
        (None, None) => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn table() -> CostTable {
        CostTable { rows: vec![1, 8, 64], step_ms: vec![10.0, 10.0, 24.0], ..CostTable::default() }
    }

    #[test]
    fn knots_are_dense_then_four_to_an_octave() {
        let rows: Vec<usize> = (0..16).map(knot_rows).collect();
        assert_eq!(rows, [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32]);
        assert_eq!(knot_rows(NUM_KNOTS - 1), 32768);
        for rows in 1..40_000 {
            let naive = (0..NUM_KNOTS).rfind(|&knot| knot_rows(knot) <= rows);
            assert_eq!(Some(knot_below(rows)), naive, "{rows} rows");
        }
        assert_eq!((nearest_knot(1), nearest_knot(8), nearest_knot(18)), (0, 7, 11));
        assert_eq!(nearest_knot(100_000), NUM_KNOTS - 1);
    }

    #[test]
    fn a_table_is_read_back_and_extended() {
        let curve = Curve::new(Some(&table()));
        assert!(curve.is_known());
        assert_eq!((curve.at(1), curve.at(8), curve.at(64)), (10.0, 10.0, 24.0));
        assert!((curve.at(36) - 17.0).abs() < 1e-9);
        assert!((curve.at(128) - 48.0).abs() < 1e-9);
        assert!((curve.at(65536) - 24.0 * 1024.0).abs() < 1e-6);
    }

    #[test]
    fn a_measurement_scales_what_was_not_measured() {
        let mut curve = Curve::new(Some(&table()));
        curve.set(1, 20.0, 0.01);
        assert!((curve.at(64) - 48.0).abs() < 1e-9);
        curve.set(64, 24.0, 0.01);
        assert_eq!((curve.at(1), curve.at(64)), (20.0, 24.0));
    }

    proptest! {
        #[test]
        fn cost_never_falls_with_rows(points in prop::collection::vec((1usize..40_000, 0.1f64..100.0), 0..30)) {
            let mut curve = Curve::new(None);
            for (rows, ms) in points {
                curve.set(rows, ms, 0.01);
            }
            let mut last = 0.0;
            for rows in (1..200).chain((200..50_000).step_by(371)) {
                prop_assert!(curve.at(rows) >= last);
                last = curve.at(rows);
            }
        }
    }
}
