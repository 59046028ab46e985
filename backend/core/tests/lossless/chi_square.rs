//! Pearson's chi-square test of counts against exact probabilities.

use std::collections::BTreeMap;

/// A test rejects below this: one false alarm in ten thousand tests, and the tests' randomness is fixed.
pub(crate) const ALPHA: f64 = 1e-4;

/// Cells with a smaller expected count are pooled.
const MIN_EXPECTED: f64 = 5.0;

/// The probability of counts at least as far from `expected` (probabilities, which sum to 1) if they were drawn from it.
pub(crate) fn p_value<K: Ord>(observed: &BTreeMap<K, u64>, expected: &BTreeMap<K, f64>) -> f64 {
    let total: f64 = expected.values().sum();
    assert!((total - 1.0).abs() < 1e-6, "the expected probabilities sum to {total}");
    // Below rounding of the f32 weights, a cell is impossible.
    let possible = |key| expected.get(key).is_some_and(|&p| p > 1e-12);
    if observed.keys().any(|key| !possible(key)) {
        return 0.0;
    }
    let num: f64 = observed.values().sum::<u64>() as f64;
    let (mut statistic, mut cells) = (0.0, 0);
    let mut add = |count: f64, mean: f64| {
        statistic += (count - mean).powi(2) / mean;
        cells += 1;
    };
    let mut pool = (0.0, 0.0);
    for (key, p) in expected {
        let (count, mean) = (observed.get(key).copied().unwrap_or(0) as f64, p * num);
        if mean >= MIN_EXPECTED {
            add(count, mean);
        } else {
            pool = (pool.0 + count, pool.1 + mean);
        }
    }
    if pool.1 >= MIN_EXPECTED {
        add(pool.0, pool.1);
    } else if pool.0 > 50.0 {
        // Too small a pool for the approximation, yet more than 50 where under 5 are expected.
        return 0.0;
    }
    survival(statistic, cells - 1)
}

/// The upper tail of the chi-square distribution.
fn survival(statistic: f64, degrees: usize) -> f64 {
    if degrees == 0 {
        return if statistic < 1e-6 { 1.0 } else { 0.0 };
    }
    upper_gamma(degrees as f64 / 2.0, statistic / 2.0)
}

/// The regularised upper incomplete gamma function Q(a, x).
fn upper_gamma(a: f64, x: f64) -> f64 {
    if x <= 0.0 {
        return 1.0;
    }
    let scale = (a * x.ln() - x - ln_gamma(a)).exp();
    if x < a + 1.0 {
        return 1.0 - scale * lower_series(a, x);
    }
    scale * upper_fraction(a, x)
}

fn lower_series(a: f64, x: f64) -> f64 {
    let (mut term, mut sum) = (1.0 / a, 1.0 / a);
    for n in 1..100_000 {
        term *= x / (a + f64::from(n));
        sum += term;
        if term < sum * 1e-16 {
            break;
        }
    }
    sum
}

/// Lentz's evaluation of the continued fraction.
fn upper_fraction(a: f64, x: f64) -> f64 {
    let tiny = 1e-300;
    let mut b = x + 1.0 - a;
    let (mut c, mut d) = (1.0 / tiny, 1.0 / b);
    let mut value = d;
    for n in 1..100_000 {
        let n = f64::from(n);
        let numerator = -n * (n - a);
        b += 2.0;
        d = 1.0 / (numerator * d + b);
        c = b + numerator / c;
        value *= c * d;
        if (c * d - 1.0).abs() < 1e-15 {
            break;
        }
    }
    value
}

/// Stirling's series, after stepping up to where it is exact to f64.
fn ln_gamma(mut x: f64) -> f64 {
    let mut shift = 0.0;
    while x < 12.0 {
        shift += x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / (x * x);
    let series = 1.0 / 12.0
        - inverse
            * (1.0 / 360.0
                - inverse * (1.0 / 1260.0 - inverse * (1.0 / 1680.0 - inverse / 1188.0)));
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series / x - shift
}

#[test]
fn survival_matches_the_printed_tables() {
    // Critical values: (degrees of freedom, statistic, upper tail).
    let table = [
        (1, 3.841_458_8, 0.05),
        (1, 15.136_705, 1e-4),
        (5, 20.515_006, 0.001),
        (10, 18.307_038, 0.05),
        (30, 14.953_457, 0.99),
        (100, 149.449_25, 0.001),
    ];
    for (degrees, statistic, tail) in table {
        let found = survival(statistic, degrees);
        assert!((found / tail - 1.0).abs() < 1e-5, "{degrees} {statistic}: {found} for {tail}");
    }
    // With two degrees of freedom it is exponential.
    for x in [0.0, 0.1, 1.0, 5.0, 50.0, 300.0] {
        assert!((survival(x, 2) / (-x / 2.0).exp() - 1.0).abs() < 1e-12, "{x}");
    }
}

#[test]
fn gamma_of_small_integers_is_a_factorial() {
    for (n, factorial) in [(1, 1f64), (2, 1.0), (5, 24.0), (13, 479_001_600.0)] {
        assert!((ln_gamma(f64::from(n)) - factorial.ln()).abs() < 1e-12);
    }
}

#[test]
fn a_fair_count_passes_and_a_loaded_or_impossible_one_fails() {
    let expected: BTreeMap<u8, f64> = (0..4).map(|face| (face, 0.25)).collect();
    let count = |counts: [u64; 4]| (0..4).zip(counts).collect::<BTreeMap<u8, u64>>();
    assert!(p_value(&count([50_100, 49_900, 50_050, 49_950]), &expected) > 0.5);
    assert!(p_value(&count([51_000, 49_000, 50_000, 50_000]), &expected) < ALPHA);
    assert_eq!(p_value(&[(9, 1)].into(), &expected), 0.0);
}
