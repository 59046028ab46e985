//! The log-probabilities that are reported to clients: those of the model itself, before bias, bans,
//! penalties, temperature and truncation, so that they do not depend on how a token was sampled.

use super::distribution::sum;
use super::exp::exp;
use super::select::{descending, max, top_k};

/// The log-softmax of the raw logits at `token`, and at the `num_top` likeliest tokens, best first, lower ids
/// first on ties. NaN counts as negative infinity.
pub fn report(logits: &[f32], token: u32, num_top: usize) -> (f32, Vec<(u32, f32)>) {
    let max = max(logits);
    let weights: Vec<f32> = logits.iter().map(|&logit| exp(logit - max)).collect();
    let log_total = f64::from(max) + sum(&weights).ln();
    let log_prob = |logit: f32| {
        let value = (f64::from(logit) - log_total) as f32;
        if value.is_nan() { f32::NEG_INFINITY } else { value }
    };
    let mut top = top_k(logits, num_top);
    top.sort_unstable_by(descending);
    top.iter_mut().for_each(|(_, value)| *value = log_prob(*value));
    let own = logits.get(token as usize).map_or(f32::NEG_INFINITY, |&logit| log_prob(logit));
    (own, top)
}

/// The place of `token` among all tokens, the likeliest first, lower ids first on ties: 1 for the likeliest.
pub(crate) fn rank(logits: &[f32], token: u32) -> u32 {
    let own =
        logits.get(token as usize).map_or(f32::NEG_INFINITY, |own| own.max(f32::NEG_INFINITY));
    let before = (0..token).zip(logits).filter(|&(_, &logit)| logit >= own);
    let behind = logits.iter().skip(token as usize + 1).filter(|&&logit| logit > own);
    1 + (before.count() + behind.count()) as u32
}

/// The probabilities of the `num` likeliest tokens in the softmax of the raw logits, those first; 0 for the first if there
/// is none.
pub(crate) fn likeliest(logits: &[f32], num: usize) -> Vec<f32> {
    let max = max(logits);
    let weights: Vec<f32> = logits.iter().map(|&logit| exp(logit - max)).collect();
    let total = sum(&weights);
    if total.is_nan() || total < 1.0 {
        return vec![0.0];
    }
    if num == 1 {
        return vec![(1.0 / total) as f32];
    }
    let mut top = top_k(&weights, num);
    top.sort_unstable_by(descending);
    top.into_iter().map(|(_, weight)| (f64::from(weight) / total) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn confidence_is_the_largest_probability() {
        let confidence = |logits: &[f32]| likeliest(logits, 1)[0];
        assert_eq!(confidence(&[0.0, 0.0, f32::NEG_INFINITY, 0.0, 0.0]), 0.25);
        assert!((confidence(&[3f32.ln(), 0.0]) - 0.75).abs() < 1e-6);
        assert_eq!(confidence(&[f32::NAN]), 0.0);
        assert_eq!(likeliest(&[f32::NAN], 3), [0.0]);
    }

    #[test]
    fn the_likeliest_are_as_many_as_there_are() {
        let logits = [2f32.ln(), 5f32.ln(), f32::NAN, 3f32.ln()];
        for num in 1..6 {
            let found = likeliest(&logits, num);
            let expected = [0.5, 0.3, 0.2];
            assert_eq!(found.len(), num.min(4));
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-6, "{found} {expected}");
            }
        }
    }

    proptest! {
        #[test]
        fn report_matches_a_plain_log_softmax(
            logits in prop::collection::vec(-30f32..30.0, 1..300), pick: prop::sample::Index,
            num_top in 0usize..=20,
        ) {
            let total: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
            let expected = |id: usize| f64::from(logits[id]) - total.ln();
            let token = pick.index(logits.len());
            let (own, top) = report(&logits, token as u32, num_top);
            prop_assert!((f64::from(own) - expected(token)).abs() < 1e-5);

            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            let place = order.iter().position(|&id| id == token).unwrap();
            prop_assert_eq!(rank(&logits, token as u32) as usize, place + 1);
            order.truncate(num_top);
            prop_assert_eq!(top.len(), order.len());
            for ((id, value), &expected_id) in top.into_iter().zip(&order) {
                prop_assert_eq!(id as usize, expected_id);
                prop_assert!((f64::from(value) - expected(expected_id)).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn an_accepted_certainty_reports_zero_and_not_minus_zero_point_something() {
        assert_eq!(report(&[0.0, 200.0, f32::NEG_INFINITY], 1, 0).0, 0.0);
    }

    #[test]
    fn nan_and_emptiness_are_reported_as_impossible() {
        assert_eq!(report(&[f32::NAN, 0.0], 0, 2), (f32::NEG_INFINITY, vec![(1, 0.0)]));
        assert_eq!(report(&[f32::NAN], 0, 0).0, f32::NEG_INFINITY);
        assert_eq!(report(&[0.0], 5, 0).0, f32::NEG_INFINITY);
        assert_eq!([rank(&[f32::NAN, 0.0], 0), rank(&[0.0], 5)], [2, 2]);
    }
}
