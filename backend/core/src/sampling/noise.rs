//! Counter-based randomness (Philox4x32-10): a value is a pure function of (key, position, lane, index),
//! so nothing is ever "advanced" and the order of evaluation cannot matter.
//!
//! Counter words are `[block, lane, position low, position high]`, key words `[key low, key high]`; the noise
//! of token `id` is word `id % 4` of block `id / 4`. Every executor must use this layout.

/// Blocks that `Noise::fill` computes together.
pub(super) const BATCH: usize = 32;

/// Set in the lane word for the 32 bits below a token's first 32.
const LOW_BITS: u32 = 1 << 31;

/// The noise of one position in one lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noise {
    key: [u32; 2],
    position: [u32; 2],
    lane: u32,
}

impl Noise {
    /// Lanes are independent of each other and below 2^31.
    pub(super) fn new(key: u64, position: usize, lane: u32) -> Self {
        assert!(lane < LOW_BITS, "lane {lane} reaches the reserved bit");
        Self { key: halves(key), position: halves(position as u64), lane }
    }

    /// The leading 32 bits of the tokens `4 * block .. 4 * block + 4`.
    pub(super) fn block(&self, block: u32) -> [u32; 4] {
        philox([block, self.lane, self.position[0], self.position[1]], self.key)
    }

    /// The leading 32 bits of `words.len()` tokens from `4 * first_block` on. Inlined so that it is compiled
    /// for the instruction set of the caller.
    #[inline(always)]
    pub(super) fn fill(&self, first_block: u32, words: &mut [u32; 4 * BATCH]) {
        let [low, high] = self.position;
        let blocks = std::array::from_fn(|n| first_block.wrapping_add(n as u32));
        let counters = [blocks, [self.lane; BATCH], [low; BATCH], [high; BATCH]];
        let random = philox_many(counters, self.key);
        for (n, four) in words.chunks_exact_mut(4).enumerate() {
            four.copy_from_slice(&[0, 1, 2, 3].map(|word: usize| random[word][n]));
        }
    }

    /// The exponential variate of token `id`, whose leading bits are `word`: -ln(1 - v) with v uniform on
    /// 64 bits. Always at least `word / 2^32`, which lets callers reject most tokens from `word` alone.
    pub(super) fn exponential(&self, id: u32, word: u32) -> f64 {
        let low = [id / 4, self.lane | LOW_BITS, self.position[0], self.position[1]];
        let bits = u64::from(word) << 32 | u64::from(philox(low, self.key)[id as usize % 4]);
        // Half a step off zero, and not rounded up to one: the logarithm stays finite at both ends.
        let v = ((bits as f64 + 0.5) * 2f64.powi(-64)).min(1.0 - f64::EPSILON / 2.0);
        -(-v).ln_1p()
    }

    /// A uniform variate strictly between 0 and 1 (52 bits, centred in their cells).
    pub(super) fn uniform(&self, index: u32) -> f64 {
        let words = self.block(index);
        let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 12;
        (bits as f64 + 0.5) * 2f64.powi(-52)
    }
}

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

/// Ten rounds of Philox4x32 (Salmon, Moraes, Dror and Shaw, 2011) on one counter.
fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    philox_many(counter.map(|word| [word]), key).map(|[word]| word)
}

/// The same on `N` counters, word by word: `counters[w][n]` is word `w` of counter `n`.
#[inline(always)]
fn philox_many<const N: usize>(mut counters: [[u32; N]; 4], mut key: [u32; 2]) -> [[u32; N]; 4] {
    for _ in 0..10 {
        let [first, second, third, fourth] = &mut counters;
        for (((a, b), c), d) in first.iter_mut().zip(second).zip(third).zip(fourth) {
            let left = u64::from(*a) * 0xD251_1F53;
            let right = u64::from(*c) * 0xCD9E_8D57;
            *a = (right >> 32) as u32 ^ *b ^ key[0];
            *b = right as u32;
            *c = (left >> 32) as u32 ^ *d ^ key[1];
            *d = left as u32;
        }
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_answers() {
        let all = u32::MAX;
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([all; 4], [all; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn uniforms_stay_inside_the_open_interval_and_are_even() {
        let count = 100_000;
        let mut sum = 0.0;
        for position in 0..count {
            let u = Noise::new(7, position, 2).uniform(0);
            assert!(u > 0.0 && u < 1.0);
            sum += u;
        }
        // Five standard deviations of the mean of `count` uniforms.
        assert!((sum / count as f64 - 0.5).abs() < 5.0 / (12.0 * count as f64).sqrt());
    }

    #[test]
    fn exponentials_are_finite_at_both_ends_and_bounded_by_their_leading_word() {
        let noise = Noise::new(1, 2, 3);
        for word in [0, 1, 12_345, u32::MAX / 2, u32::MAX] {
            let value = noise.exponential(9, word);
            assert!(value.is_finite() && value > 0.0);
            assert!(value >= f64::from(word) * 2f64.powi(-32));
        }
    }

    #[test]
    fn every_coordinate_changes_the_noise() {
        let base = Noise::new(5, 6, 1);
        let others = [Noise::new(5 | 1 << 40, 6, 1), Noise::new(5, 7, 1), Noise::new(5, 6, 0)];
        for other in others {
            assert_ne!(base.block(0), other.block(0));
        }
        assert_ne!(base.block(0), base.block(1));
    }
}
