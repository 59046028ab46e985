//! Picking the largest of many: argmax and an exact, deterministic top-k.

use std::cmp::Ordering;

/// Values that share one maximum when the floor of a top-k is estimated.
const GROUP: usize = 32;

/// The index of the largest value, the lowest on ties; NaN never wins. `None` if every value is NaN or
/// negative infinity.
pub(super) fn argmax(values: &[f32]) -> Option<usize> {
    let mut best = (f32::NEG_INFINITY, None);
    for (idx, &value) in values.iter().enumerate() {
        if value > best.0 {
            best = (value, Some(idx));
        }
    }
    best.1
}

/// The largest value; negative infinity if there is none but NaN.
pub(super) fn max(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, &b| a.max(b))
}

/// Larger first, then lower id.
pub(super) fn descending(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Exactly the `k` largest (or all, if fewer) with their indices, in no particular order. Ties at the
/// boundary go to the lower index, and NaN is left out.
pub(super) fn top_k(values: &[f32], k: usize) -> Vec<(u32, f32)> {
    if k == 0 {
        return Vec::new();
    }
    let floor = floor(values, k);
    let pairs = values.iter().enumerate().map(|(idx, &value)| (idx as u32, value));
    let mut kept: Vec<_> = pairs.filter(|&(_, value)| value >= floor).collect();
    if kept.len() > k {
        kept.select_nth_unstable_by(k - 1, descending);
        kept.truncate(k);
    }
    kept
}

/// A lower bound of the k-th largest value: the k-th largest of the groups' maxima, as at least one value
/// of each group reaches its maximum. Spares sorting a whole vocabulary for a small k.
fn floor(values: &[f32], k: usize) -> f32 {
    let groups = values.chunks(GROUP);
    if k > groups.len() / 2 {
        return f32::NEG_INFINITY;
    }
    let mut maxima: Vec<f32> = groups.map(max).collect();
    *maxima.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sorted(mut pairs: Vec<(u32, f32)>) -> Vec<(u32, f32)> {
        pairs.sort_by(descending);
        pairs
    }

    proptest! {
        #[test]
        fn top_k_is_the_head_of_a_full_sort(
            // Few distinct values, so that ties cross the boundary.
            values in prop::collection::vec((-20i8..20).prop_map(f32::from), 1..2_000), k in 0usize..80,
        ) {
            let all = values.iter().enumerate().map(|(i, &v)| (i as u32, v)).collect();
            let mut expected = sorted(all);
            expected.truncate(k);
            prop_assert_eq!(sorted(top_k(&values, k)), expected);
        }

        #[test]
        fn max_and_argmax_agree(values in prop::collection::vec(-5i8..5, 1..100)) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let idx = argmax(&values).unwrap();
            prop_assert_eq!(values[idx], max(&values));
            prop_assert!(values[..idx].iter().all(|&value| value < values[idx]));
        }
    }

    #[test]
    fn nan_never_wins() {
        let values = [f32::NAN, 1.0, f32::NAN, 2.0, f32::NAN];
        assert_eq!(argmax(&values), Some(3));
        assert_eq!(max(&values), 2.0);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), None);
        assert_eq!(sorted(top_k(&values, 3)), [(3, 2.0), (1, 1.0)]);
    }
}
