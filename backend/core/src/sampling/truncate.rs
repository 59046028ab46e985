//! From edited logits to a distribution: temperature, then top-k, top-p and min-p, each on what the one
//! before has left.

use super::distribution::{Distribution, sum};
use super::exp::exp;
use super::select::{descending, top_k};
use super::{SamplingParams, select};

/// As many tokens are sorted to find where top-p cuts.
const SORTED: usize = 64;

/// The distribution of a positive temperature. At least one score must be above negative infinity.
pub(super) fn truncate(scores: &[f32], params: &SamplingParams) -> Distribution {
    // Infinite logits would give NaN against an infinite maximum; the comparison lets NaN pass to `exp`.
    let cap = |score: f32| if score > f32::MAX { f32::MAX } else { score };
    let max = cap(select::max(scores));
    let temperature = params.temperature;
    // By value: through references the loops below would not be vectorised.
    let weight = move |score: f32| exp((cap(score) - max) / temperature);

    if params.top_k > 0 && params.top_k < scores.len() {
        let kept = top_k(scores, params.top_k);
        let weights: Vec<f32> = kept.iter().map(|&(_, score)| weight(score)).collect();
        return narrow(kept.iter().map(|&(id, _)| id), &weights, params);
    }
    let weights: Vec<f32> = scores.iter().map(|&score| weight(score)).collect();
    if params.top_p == 1.0 && params.min_p == 0.0 {
        return Distribution::dense(weights);
    }
    narrow(0.., &weights, params)
}

/// Top-p, then min-p, on tokens and their weights, of which the largest is 1.
fn narrow(
    ids: impl Iterator<Item = u32>,
    weights: &[f32],
    params: &SamplingParams,
) -> Distribution {
    let total = sum(weights);
    let goal = total * f64::from(params.top_p);
    let floor = if params.top_p < 1.0 {
        // All tokens below the floor together weigh less than what may be left out, so none of them is
        // needed. The factor covers the rounding of the sums.
        (0.99 * (total - goal) / weights.len() as f64) as f32
    } else {
        params.min_p
    };
    let pairs = ids.zip(weights.iter().copied());
    let mut kept: Vec<_> = pairs.filter(|&(_, weight)| weight > 0.0 && weight >= floor).collect();
    if params.top_p < 1.0 {
        nucleus(&mut kept, goal);
    }
    kept.retain(|&(_, weight)| weight >= params.min_p);
    Distribution::sparse(kept)
}

/// Keeps the shortest prefix, likeliest first, whose weights reach `goal`: at least one token. Halves the
/// range that holds the cut until sorting it is cheap.
fn nucleus(kept: &mut Vec<(u32, f32)>, goal: f64) {
    let (mut low, mut high, mut held) = (0, kept.len(), 0.0);
    while high - low > SORTED {
        let half = (high - low) / 2;
        kept[low..high].select_nth_unstable_by(half, descending);
        let mass: f64 = kept[low..low + half].iter().map(|&(_, weight)| f64::from(weight)).sum();
        if held + mass >= goal {
            high = low + half;
        } else {
            held += mass;
            low += half;
        }
    }
    kept.truncate(high);
    kept[low..].sort_unstable_by(descending);
    let reaches = kept[low..].iter().position(|&(_, weight)| {
        held += f64::from(weight);
        held >= goal
    });
    if let Some(idx) = reaches {
        kept.truncate(low + idx + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Full sorts and f64 throughout.
    fn naive(scores: &[f32], params: &SamplingParams) -> Vec<(u32, f64)> {
        let mut kept: Vec<(u32, f64)> = (0..).zip(scores.iter().map(|&s| f64::from(s))).collect();
        kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if params.top_k > 0 {
            kept.truncate(params.top_k);
        }
        let max = kept[0].1;
        kept.iter_mut().for_each(|k| k.1 = ((k.1 - max) / f64::from(params.temperature)).exp());
        if params.top_p < 1.0 {
            let total: f64 = kept.iter().map(|k| k.1).sum();
            let mut held = 0.0;
            let needed = kept.iter().position(|k| {
                held += k.1;
                held >= total * f64::from(params.top_p)
            });
            kept.truncate(needed.map_or(kept.len(), |idx| idx + 1));
        }
        kept.retain(|k| k.1 >= f64::from(params.min_p));
        let total: f64 = kept.iter().map(|k| k.1).sum();
        kept.iter_mut().for_each(|k| k.1 /= total);
        kept.sort_by_key(|k| k.0);
        kept
    }

    proptest! {
        #[test]
        fn truncation_matches_full_sorting(
            // Multiples of 1/4, so that ties occur, spread so that the nucleus is sometimes many rounds wide.
            scores in prop::collection::vec((-40i8..8).prop_map(|q| f32::from(q) * 0.25), 1..1_500),
            temperature in prop_oneof![Just(1.0f32), 0.3f32..3.0],
            top_k in prop_oneof![Just(0usize), 1usize..60],
            top_p in prop_oneof![Just(1.0f32), 0.05f32..0.999],
            min_p in prop_oneof![Just(0.0f32), 0.001f32..0.5],
        ) {
            let params = SamplingParams { temperature, top_k, top_p, min_p, ..Default::default() };
            let dist = truncate(&scores, &params);
            let expected = naive(&scores, &params);
            let found: Vec<_> = dist.iter().collect();
            prop_assert_eq!(
                found.iter().map(|f| f.0).collect::<Vec<_>>(),
                expected.iter().map(|e| e.0).collect::<Vec<_>>()
            );
            for (found, expected) in found.iter().zip(&expected) {
                // Eight roundings of f32.
                prop_assert!((found.1 - expected.1).abs() <= 5e-7 * expected.1.max(1e-3));
            }
        }
    }

    fn support(scores: &[f32], params: SamplingParams) -> Vec<u32> {
        truncate(scores, &params).iter().map(|(id, _)| id).collect()
    }

    #[test]
    fn top_p_keeps_the_token_that_crosses_and_no_more() {
        let scores = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
        for (top_p, expected) in [(0.4, 1), (0.5, 1), (0.51, 2), (0.76, 3), (0.9, 4), (1e-9, 1)] {
            let params = SamplingParams { temperature: 1.0, top_p, ..Default::default() };
            assert_eq!(support(&scores, params).len(), expected, "top_p {top_p}");
        }
    }

    #[test]
    fn min_p_is_relative_to_the_likeliest_after_temperature() {
        let scores = [0.0, -1.0, -2.0, -4.0];
        let at = |temperature, min_p| {
            support(&scores, SamplingParams { temperature, min_p, ..Default::default() }).len()
        };
        assert_eq!(at(1.0, 0.1), 3);
        assert_eq!(at(2.0, 0.1), 4);
        assert_eq!(at(0.5, 0.1), 2);
        assert_eq!(at(1.0, 1.0), 1);
    }

    #[test]
    fn infinite_and_nan_logits_do_not_spread() {
        let params = SamplingParams { temperature: 1e-40, ..Default::default() };
        let scores = [f32::NAN, f32::INFINITY, 3.0, f32::NEG_INFINITY, f32::INFINITY, f32::MIN];
        assert_eq!(support(&scores, params), [1, 4]);
        let params = SamplingParams { temperature: 1.0, top_k: 5, ..Default::default() };
        assert_eq!(
            support(&[f32::NAN, f32::NEG_INFINITY, 0.0, 1.0, f32::NAN, 2.0], params),
            [2, 3, 5]
        );
    }
}
