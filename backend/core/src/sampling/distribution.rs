//! A probability distribution over tokens, as unnormalised weights on its support.
//!
//! A weight of 0 is outside the support. Weights are relative to the likeliest token, so what is rounded
//! to 0 has less than e^-87 of its probability.

use super::noise::Noise;
use super::race;
use std::sync::Arc;

/// A probability distribution over tokens. Clones share their storage.
#[derive(Clone, Debug)]
pub struct Distribution(Arc<Table>);

#[derive(Debug)]
struct Table {
    /// The tokens of the weights, ascending; `None` where token `i` is at index `i`.
    ids: Option<Vec<u32>>,
    weights: Vec<f32>,
    /// Sum of the weights, positive.
    total: f64,
}

impl Distribution {
    /// All probability on one token.
    pub fn certain(token: u32) -> Self {
        Self::new(Some(vec![token]), vec![1.0])
    }

    /// Token `i` has probability proportional to `weights[i]`: finite, none negative, not all 0.
    pub(super) fn dense(weights: Vec<f32>) -> Self {
        Self::new(None, weights)
    }

    /// The tokens and their weights in any order, each token once; weights as in `dense`.
    pub(super) fn sparse(mut pairs: Vec<(u32, f32)>) -> Self {
        pairs.sort_unstable_by_key(|&(id, _)| id);
        let (ids, weights) = pairs.into_iter().unzip();
        Self::new(Some(ids), weights)
    }

    fn new(ids: Option<Vec<u32>>, weights: Vec<f32>) -> Self {
        let total = sum(&weights);
        assert!(total > 0.0 && total.is_finite(), "weights sum to {total}");
        Self(Arc::new(Table { ids, weights, total }))
    }

    /// The natural logarithm of a token's probability; negative infinity outside the support.
    pub(crate) fn log_prob(&self, token: u32) -> f64 {
        self.prob(token).ln()
    }

    /// A token's probability.
    pub fn prob(&self, token: u32) -> f64 {
        let idx = match &self.0.ids {
            None => Some(token as usize),
            Some(ids) => ids.binary_search(&token).ok(),
        };
        let weight = idx.and_then(|idx| self.0.weights.get(idx)).copied().unwrap_or(0.0);
        f64::from(weight) / self.0.total
    }

    /// The support in ascending order, with probabilities.
    pub fn iter(&self) -> impl Iterator<Item = (u32, f64)> + '_ {
        self.slots()
            .filter(|&(_, weight)| weight > 0.0)
            .map(|(id, weight)| (id, f64::from(weight) / self.0.total))
    }

    /// Every stored token and weight, ascending, zeros included.
    fn slots(&self) -> impl Iterator<Item = (u32, f32)> + '_ {
        let ids = self.0.ids.as_deref();
        let id_at = move |idx: usize| ids.map_or(idx as u32, |ids| ids[idx]);
        self.0.weights.iter().enumerate().map(move |(idx, &weight)| (id_at(idx), weight))
    }

    /// The winner of the Gumbel race on this noise: a draw from the distribution.
    pub(super) fn race(&self, noise: Noise) -> u32 {
        match &self.0.ids {
            None => race::dense(&self.0.weights, noise),
            Some(ids) if ids.len() == 1 => ids[0],
            Some(ids) => race::sparse(ids, &self.0.weights, noise),
        }
    }

    /// What is left to draw from when a draft drawn from `q` was rejected: max(p - q, 0), normalised.
    /// `None` if nothing is left, which takes p = q up to rounding (both sum to 1).
    pub(crate) fn minus(&self, q: &Self) -> Option<Self> {
        let mut other = q.slots().peekable();
        let left = self.slots().map(|(id, weight)| {
            while other.next_if(|&(other_id, _)| other_id < id).is_some() {}
            let taken = other.next_if(|&(other_id, _)| other_id == id).map_or(0.0, |slot| slot.1);
            let left = f64::from(weight) / self.0.total - f64::from(taken) / q.0.total;
            left.max(0.0) as f32
        });
        self.reweighted(left.collect())
    }

    /// What is left to draw from when a draft that was not drawn, but given, was rejected: every
    /// other token. `None` if there is none.
    pub fn without(&self, token: u32) -> Option<Self> {
        let keep = |(id, weight)| if id == token { 0.0 } else { weight };
        self.reweighted(self.slots().map(keep).collect())
    }

    fn reweighted(&self, weights: Vec<f32>) -> Option<Self> {
        let any = weights.iter().any(|&weight| weight > 0.0);
        any.then(|| Self::new(self.0.ids.clone(), weights))
    }
}

/// The sum in f64, in eight interleaved parts: fast, and the same on every machine.
pub(super) fn sum(weights: &[f32]) -> f64 {
    let mut parts = [0f64; 8];
    let (chunks, rest) = weights.as_chunks::<8>();
    for chunk in chunks {
        for (part, &weight) in parts.iter_mut().zip(chunk) {
            *part += f64::from(weight);
        }
    }
    parts.iter().sum::<f64>() + rest.iter().map(|&weight| f64::from(weight)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn probs(dist: &Distribution, size: u32) -> Vec<f64> {
        (0..size).map(|id| dist.prob(id)).collect()
    }

    fn any_distribution() -> impl Strategy<Value = Distribution> {
        let weights = prop::collection::vec(prop_oneof![Just(0.0f32), 0.01f32..1.0], 8);
        (weights, any::<bool>()).prop_filter_map("needs mass", |(weights, dense)| {
            let pairs = (0..).zip(weights.iter().copied()).filter(|pair| pair.1 > 0.0);
            let pairs: Vec<_> = pairs.collect();
            (!pairs.is_empty()).then(|| match dense {
                true => Distribution::dense(weights),
                false => Distribution::sparse(pairs),
            })
        })
    }

    proptest! {
        #[test]
        fn probabilities_sum_to_one_over_the_support(dist in any_distribution()) {
            let total: f64 = dist.iter().map(|(_, prob)| prob).sum();
            prop_assert!((total - 1.0).abs() < 1e-12);
            for (id, prob) in dist.iter() {
                prop_assert_eq!(dist.prob(id), prob);
                prop_assert!((dist.log_prob(id) - prob.ln()).abs() < 1e-6);
            }
        }

        #[test]
        fn minus_is_the_normalised_positive_part(p in any_distribution(), q in any_distribution()) {
            let (pp, qq) = (probs(&p, 8), probs(&q, 8));
            let part: Vec<f64> = pp.iter().zip(&qq).map(|(p, q)| (p - q).max(0.0)).collect();
            let total: f64 = part.iter().sum();
            match p.minus(&q) {
                Some(rest) => for (id, &value) in part.iter().enumerate() {
                    prop_assert!((rest.prob(id as u32) - value / total).abs() < 1e-6);
                },
                None => prop_assert!(total < 1e-6),
            }
        }
    }

    #[test]
    fn nothing_is_left_of_a_distribution_minus_itself() {
        let dist = Distribution::dense(vec![0.3, 0.0, 1.0, 0.7]);
        assert!(dist.minus(&dist.clone()).is_none());
        assert!(Distribution::certain(3).without(3).is_none());
    }

    #[test]
    fn tokens_outside_the_support_have_no_probability() {
        for dist in [Distribution::certain(2), Distribution::dense(vec![0.0, 0.0, 1.0])] {
            assert_eq!(dist.log_prob(2), 0.0);
            for id in [0, 1, 3, 152_064] {
                assert_eq!(dist.log_prob(id), f64::NEG_INFINITY);
            }
        }
    }

    #[test]
    fn a_large_vocabulary_minus_a_small_support_keeps_the_rest() {
        let p = Distribution::dense(vec![1.0; 10]);
        let q = Distribution::sparse(vec![(7, 1.0), (12, 1.0)]);
        let rest = p.minus(&q).unwrap();
        assert_eq!(rest.prob(7), 0.0);
        assert!((rest.prob(0) - 1.0 / 9.0).abs() < 1e-7);
    }
}
