//! Random contents for matrices and caches: zeros would be faster than what is measured for.

use half::f16;

/// SplitMix64.
pub(crate) struct Noise(u64);

impl Noise {
    /// The same for the same seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Mean 0, the standard deviation given: a sum of four uniform numbers, which is near enough to normal.
    fn bell(&mut self, deviation: f64) -> f64 {
        let bits = self.next();
        let sum: f64 = (0..4).map(|i| f64::from((bits >> (16 * i)) as u16) / 65536.0 - 0.5).sum();
        sum * 3f64.sqrt() * deviation
    }
}

/// Any words.
pub(crate) fn random_words(count: usize) -> Vec<u32> {
    let mut noise = Noise::new(1);
    (0..count).map(|_| noise.next() as u32).collect()
}

/// Half-precision numbers of this standard deviation, as bytes.
pub(crate) fn random_halves(count: usize, deviation: f64) -> Vec<u8> {
    let mut noise = Noise::new(2);
    let number = |_| f16::from_f64(noise.bell(deviation)).to_le_bytes();
    (0..count).flat_map(number).collect()
}

/// Standard deviation of [`random_e4m3`]: 99.6, nearly all of it from the largest numbers.
pub(crate) const E4M3_DEVIATION: f64 = 99.6;

/// Bits of e4m3 numbers, every code but NaN alike.
pub(crate) fn random_e4m3(count: usize) -> Vec<u8> {
    let mut noise = Noise::new(3);
    let number = |_| match noise.next() as u8 {
        code if code & 0x7f == 0x7f => 0x30,
        code => code,
    };
    (0..count).map(number).collect()
}
