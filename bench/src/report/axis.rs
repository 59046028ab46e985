//! Scales: where a value lies between two ends, and the ticks that tell it.

use super::number::decimal;

/// Beyond it, figures are no measurement, and differences of two would lose all digits.
const LARGEST: f64 = 1e12;
/// Of the largest value to the smallest, from which a scale is logarithmic.
const LOGARITHMIC_FROM: f64 = 30.0;

/// Which values one direction of a plot shows.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    /// What is written, and at which value.
    pub(super) ticks: Vec<(f64, String)>,
}

/// Whether a value can be drawn.
pub(super) fn is_drawable(value: f64) -> bool {
    value.abs() < LARGEST
}

impl Axis {
    /// About so many ticks at 1, 2 or 5 times a power of ten, one at each end. Values that cannot be drawn count for nothing.
    pub(super) fn linear(values: impl IntoIterator<Item = f64>, about: usize) -> Self {
        let (low, high) = widened(range(values));
        let step = nice_step((high - low) / about.max(1) as f64);
        let decimals = (-(step * 1.000_001).log10().floor()).max(0.0) as usize;
        let steps = (low / step + 1e-9).floor() as i64..=(high / step - 1e-9).ceil() as i64;
        let (low, high) = (*steps.start() as f64 * step, *steps.end() as f64 * step);
        let tick = |at: i64| (at as f64 * step, decimal(at as f64 * step, decimals));
        Self { low, high, is_log: false, ticks: steps.map(tick).collect() }
    }

    /// The same, for values of several orders of magnitude: logarithmic then.
    pub(super) fn fitting(values: impl IntoIterator<Item = f64>, about: usize) -> Self {
        let (low, high) = range(values);
        if low <= high * 1e-9 || high / low < LOGARITHMIC_FROM {
            return Self::linear([low, high], about);
        }
        let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let all: Vec<f64> =
            decades.flat_map(|at| [1.0, 2.0, 5.0].map(|of| of * 10f64.powi(at))).collect();
        let first = all.iter().rposition(|&tick| tick <= low).unwrap_or(0);
        let last = all.iter().position(|&tick| tick >= high).unwrap_or(all.len() - 1);
        let ticks = all[first..=last].iter().enumerate();
        // 1, 2, 5 while there are few; else powers of ten, or some of them.
        let every =
            if last - first <= 2 * about { 1 } else { 3 * (last - first).div_ceil(3 * about) };
        let shown = ticks.filter(|(at, _)| (first + at) % every == 0).map(|(_, &tick)| tick);
        let name = |tick: f64| decimal(tick, (-tick.log10().floor()).max(0.0) as usize);
        let ticks = shown.map(|tick| (tick, name(tick))).collect();
        Self { low: all[first], high: all[last], is_log: true, ticks }
    }

    /// Ticks where there are values. `is_log` counts where all of them are positive.
    pub(super) fn at_values(ticks: Vec<(f64, String)>, is_log: bool) -> Self {
        let (low, high) = range(ticks.iter().map(|&(value, _)| value));
        let is_log = is_log && low > 0.0 && low < high;
        let (low, high) = if low < high { (low, high) } else { (low - 1.0, high + 1.0) };
        Self { low, high, is_log, ticks }
    }

    /// 0 at the low end, 1 at the high one, and never beyond.
    pub(super) fn share(&self, value: f64) -> f64 {
        let share = if self.is_log {
            (value / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) }
    }
}

/// The smallest and the largest that can be drawn; 0 and 0 without any.
fn range(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let drawable = values.into_iter().filter(|&value| is_drawable(value));
    let widen = |range: Option<(f64, f64)>, value: f64| match range {
        None => Some((value, value)),
        Some((low, high)) => Some((low.min(value), high.max(value))),
    };
    drawable.fold(None, widen).unwrap_or((0.0, 0.0))
}

/// Apart by enough that steps between them can be told from each other.
fn widened((low, high): (f64, f64)) -> (f64, f64) {
    let least = (low.abs().max(high.abs()) * 1e-6).max(1e-6);
    if high - low >= least {
        return (low, high);
    }
    let by = if high.abs() < 1e-3 { 1.0 } else { high.abs() * 0.1 };
    (if low >= 0.0 { (low - by).max(0.0) } else { low - by }, high + by)
}

/// The next of 1, 2 and 5 times a power of ten.
fn nice_step(least: f64) -> f64 {
    let decade = 10f64.powf(least.log10().floor());
    let of = [1.0, 2.0, 5.0].into_iter().find(|of| of * decade >= least * (1.0 - 1e-9));
    of.unwrap_or(10.0) * decade
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(labels(&Axis::linear([0.0, 97.0], 5)), ["0", "20", "40", "60", "80", "100"]);
        assert_eq!(labels(&Axis::linear([0.9, 2.1], 4)), ["0.5", "1.0", "1.5", "2.0", "2.5"]);
        assert_eq!(
            labels(&Axis::fitting([3.0, 150.0], 5)),
            ["2", "5", "10", "20", "50", "100", "200"]
        );
        let decades = labels(&Axis::fitting([0.02, 8e6], 5)).join(" ");
        assert_eq!(decades, "1 100 10,000 1,000,000");
    }

    #[test]
    fn values_that_are_no_numbers_count_for_nothing() {
        let none = [f64::NAN, f64::INFINITY, 1e300];
        assert_eq!(Axis::linear(none, 5), Axis::linear([], 5));
        assert_eq!(Axis::fitting([1.0, f64::INFINITY, 2.0], 5), Axis::linear([1.0, 2.0], 5));
        for axis in
            [Axis::linear([], 5), Axis::at_values(Vec::new(), true), Axis::fitting([1.0, 99.0], 5)]
        {
            assert!(
                none.iter()
                    .chain(&[-1.0, 0.0])
                    .all(|&value| (0.0..=1.0).contains(&axis.share(value)))
            );
        }
    }

    proptest! {
        #[test]
        fn ticks_cover_the_values_in_equal_steps(
            exponent in -5i32..11, a in -1.0f64..1.0, b in -1.0f64..1.0, about in 2usize..10,
        ) {
            let scale = 10f64.powi(exponent);
            let (low, high) = (a.min(b) * scale, a.max(b) * scale);
            let axis = Axis::linear([high, low], about);
            let ticks: Vec<f64> = axis.ticks.iter().map(|&(value, _)| value).collect();
            let step = ticks[1] - ticks[0];
            prop_assert!(ticks[0] <= low + step * 1e-6 && ticks[ticks.len() - 1] >= high - step * 1e-6);
            prop_assert!(ticks.windows(2).all(|pair| (pair[1] - pair[0] - step).abs() < step * 1e-6));
            let digit = step / 10f64.powf((step * 1.000_001).log10().floor());
            prop_assert!([1.0, 2.0, 5.0].iter().any(|of| (digit - of).abs() < 1e-4), "{}", digit);
            prop_assert!((2..=about + 3).contains(&ticks.len()));
            let mut names = labels(&axis);
            names.dedup();
            prop_assert_eq!(names.len(), ticks.len());
        }

        #[test]
        fn larger_values_lie_further_on(a in 1e-3f64..1e9, b in 1e-3f64..1e9) {
            let axis = Axis::fitting([a, b], 5);
            prop_assert_eq!(axis.share(a) <= axis.share(b), a <= b || axis.share(a) == axis.share(b));
            prop_assert!(axis.ticks.len() >= 2);
            prop_assert!(axis.ticks.windows(2).all(|pair| pair[0].0 < pair[1].0));
        }
    }
}
