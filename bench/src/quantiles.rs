//! A distribution, by its percentiles.

use serde::{Deserialize, Serialize};

/// Of values, in their unit. All zero without any.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Quantiles {
    /// How many values there were.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Percentiles 0 (the smallest) to 100 (the largest), between values in proportion.
    pub percentiles: Vec<f64>,
}

impl Quantiles {
    /// The percentiles of values in any order.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let Some(last) = values.len().checked_sub(1) else {
            return Self { count: 0, mean: 0.0, percentiles: vec![0.0; 101] };
        };
        let percentile = |percent: usize| {
            let at = last as f64 * percent as f64 / 100.0;
            let (below, share) = (at.floor() as usize, at.fract());
            values[below] + share * (values[(below + 1).min(last)] - values[below])
        };
        Self {
            count: values.len(),
            mean: values.iter().sum::<f64>() / values.len() as f64,
            percentiles: (0..=100).map(percentile).collect(),
        }
    }

    /// A percentile, 0 to 100.
    pub fn at(&self, percent: usize) -> f64 {
        self.percentiles.get(percent).copied().unwrap_or(0.0)
    }
}

/// The value in the middle; the mean of both where there are two. None of nothing.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let quantiles = Quantiles::of(values.into_iter().collect());
    (quantiles.count > 0).then(|| quantiles.at(50))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn few_values_are_told_as_they_are() {
        assert_eq!(Quantiles::of(vec![3.0, 1.0, 2.0]).at(50), 2.0);
        assert_eq!((median([4.0, 1.0]), median([7.0]), median([])), (Some(2.5), Some(7.0), None));
        assert_eq!(Quantiles::of(Vec::new()).at(99), 0.0);
    }

    proptest! {
        #[test]
        fn so_many_values_lie_below_each(values in prop::collection::vec(0.0f64..1e4, 1..300)) {
            let quantiles = Quantiles::of(values.clone());
            prop_assert_eq!(quantiles.percentiles.len(), 101);
            for (percent, &value) in quantiles.percentiles.iter().enumerate() {
                let below = values.iter().filter(|&&other| other < value).count() as f64;
                let above = values.iter().filter(|&&other| other > value).count() as f64;
                let last = (values.len() - 1) as f64;
                prop_assert!(below <= (last * percent as f64 / 100.0).ceil() + 1e-9);
                prop_assert!(above <= (last * (100 - percent) as f64 / 100.0).ceil() + 1e-9);
            }
        }
    }
}
