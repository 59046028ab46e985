//! Gumbel argmax over weights: the token with the largest ln(weight) + Gumbel noise, lowest id on ties.
//! Its winner is distributed as the weights, and two distributions raced on the same noise agree as
//! often as they overlap.
//!
//! Written as an exponential race (Gumbel = -ln E): a token beats `best` iff E < weight * exp(-best), and as
//! E is at least its leading 32 bits, one multiplication and one comparison dismiss almost every token.
#![allow(unsafe_code)]

use super::noise::{BATCH, Noise};

/// Covers the rounding of the dismissal test, which is done in f32.
const SLACK: f64 = 1.0001;

struct Race {
    noise: Noise,
    best: f64,
    winner: u32,
    /// `exp(-best) * 2^24`, rounded up: what a word's leading bits are compared with, times the weight.
    bar: f32,
}

impl Race {
    fn new(noise: Noise) -> Self {
        Self { noise, best: f64::NEG_INFINITY, winner: 0, bar: f32::INFINITY }
    }

    /// False also for a weight of 0 against an infinite bar (NaN). As many bits as a signed conversion to
    /// f32 takes in one instruction, without rounding.
    #[inline(always)]
    fn may_win(&self, weight: f32, word: u32) -> bool {
        (word >> 8) as i32 as f32 <= weight * self.bar
    }

    fn enter(&mut self, id: u32, weight: f32, word: u32) {
        if !self.may_win(weight, word) {
            return;
        }
        let score = f64::from(weight).ln() - self.noise.exponential(id, word).ln();
        if score > self.best {
            self.best = score;
            self.winner = id;
            self.bar = ((-score).exp() * 2f64.powi(24) * SLACK) as f32;
        }
    }
}

/// The winner where token `i` has weight `weights[i]`.
pub(super) fn dense(weights: &[f32], noise: Noise) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the instruction set was just found to be there.
        return unsafe { dense_avx2(weights, noise) };
    }
    dense_any(weights, noise)
}

/// Three quarters of the time: eight words of noise are multiplied at once.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn dense_avx2(weights: &[f32], noise: Noise) -> u32 {
    dense_any(weights, noise)
}

#[inline(always)]
fn dense_any(weights: &[f32], noise: Noise) -> u32 {
    let mut race = Race::new(noise);
    let mut words = [0u32; 4 * BATCH];
    for (batch, weights) in weights.chunks(4 * BATCH).enumerate() {
        let first_block = (batch * BATCH) as u32;
        noise.fill(first_block, &mut words);
        // Without an early exit, so that the compiler can test many at a time.
        let pairs = weights.iter().zip(&words);
        if !pairs.clone().fold(false, |any, (&weight, &word)| any | race.may_win(weight, word)) {
            continue;
        }
        for (idx, (&weight, &word)) in pairs.enumerate() {
            race.enter(4 * first_block + idx as u32, weight, word);
        }
    }
    race.winner
}

/// The winner among `ids`, ascending, with the weights beside them.
pub(super) fn sparse(ids: &[u32], weights: &[f32], noise: Noise) -> u32 {
    let mut race = Race::new(noise);
    let mut block = None;
    for (&id, &weight) in ids.iter().zip(weights) {
        let words = match block {
            Some((number, words)) if number == id / 4 => words,
            _ => noise.block(id / 4),
        };
        block = Some((id / 4, words));
        race.enter(id, weight, words[id as usize % 4]);
    }
    race.winner
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every token's full Gumbel noise, no dismissal.
    fn naive(ids: &[u32], weights: &[f32], noise: Noise) -> u32 {
        let mut best = (f64::NEG_INFINITY, 0);
        for (&id, &weight) in ids.iter().zip(weights) {
            let word = noise.block(id / 4)[id as usize % 4];
            let score = f64::from(weight).ln() - noise.exponential(id, word).ln();
            if score > best.0 {
                best = (score, id);
            }
        }
        best.1
    }

    proptest! {
        #[test]
        fn dismissed_tokens_could_not_have_won(
            logs in prop::collection::vec(-60f32..0.0, 1..900), key: u64, position in 0usize..100_000,
        ) {
            let weights: Vec<f32> = logs.iter().map(|log| log.exp()).collect();
            let ids: Vec<u32> = (0..weights.len() as u32).collect();
            let noise = Noise::new(key, position, 0);
            let expected = naive(&ids, &weights, noise);
            prop_assert_eq!(dense(&weights, noise), expected);
            prop_assert_eq!(dense_any(&weights, noise), expected);
            prop_assert_eq!(sparse(&ids, &weights, noise), expected);
        }

        #[test]
        fn scattered_ids_keep_their_own_noise(
            ids in prop::collection::btree_set(0u32..5_000, 1..200), key: u64,
        ) {
            let ids: Vec<u32> = ids.into_iter().collect();
            let mut weights = vec![0.0; 5_000];
            for &id in &ids {
                weights[id as usize] = 1.0 / (1.0 + id as f32);
            }
            let picked: Vec<f32> = ids.iter().map(|&id| weights[id as usize]).collect();
            let noise = Noise::new(key, 3, 1);
            prop_assert_eq!(sparse(&ids, &picked, noise), dense(&weights, noise));
        }
    }

    #[test]
    fn tiny_weights_race_as_well_as_large_ones() {
        let weights = [0.0, 3e-30, 0.0, 1e-30];
        let wins = (0..20_000).filter(|&i| dense(&weights, Noise::new(i, 0, 0)) == 1).count();
        // Five standard deviations around 3/4.
        assert!((wins as f64 - 15_000.0).abs() < 5.0 * (20_000f64 * 0.75 * 0.25).sqrt(), "{wins}");
    }
}
