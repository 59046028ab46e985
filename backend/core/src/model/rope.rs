//! Rotary position angles: cos and sin per position, computed once in f64.

use super::{ModelConfig, RopeScaling};
use std::f64::consts::TAU;

/// cos and sin of every (position, pair) up to a length. Pair `i` of a head rotates elements `i` and
/// `i + head_dim / 2` (the half-split convention of Hugging Face checkpoints).
#[derive(Clone, Debug)]
pub(crate) struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// The table for positions `0..len`.
    pub(crate) fn new(config: &ModelConfig, len: usize) -> Self {
        let freqs = frequencies(config);
        let half = freqs.len();
        let mut cos = Vec::with_capacity(len * half);
        let mut sin = Vec::with_capacity(len * half);
        for position in 0..len {
            for freq in &freqs {
                // Reference implementations hold the frequencies and angles in f32.
                let angle = f64::from((position as f32) * (*freq as f32));
                cos.push(angle.cos() as f32);
                sin.push(angle.sin() as f32);
            }
        }
        Self { half, cos, sin }
    }

    /// cos and sin at `position`, `head_dim / 2` values each.
    pub(crate) fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let range = position * self.half..(position + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

fn frequencies(config: &ModelConfig) -> Vec<f64> {
    let dim = config.head_dim as f64;
    (0..config.head_dim / 2)
        .map(|pair| config.rope_theta.powf(-((2 * pair) as f64) / dim))
        .map(|freq| match &config.rope_scaling {
            None => freq,
            Some(RopeScaling::Linear { factor }) => freq / factor,
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            }) => {
                let wavelength = TAU / freq;
                let context = *original_max_position as f64;
                let ramp =
                    (context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let keep = ramp.clamp(0.0, 1.0);
                freq * keep + freq / factor * (1.0 - keep)
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Family;

    fn config(rope_scaling: Option<RopeScaling>) -> ModelConfig {
        ModelConfig {
            family: Family::Llama,
            vocab_size: 8,
            hidden_size: 128,
            intermediate_size: 8,
            num_layers: 1,
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: 128,
            rms_norm_eps: 1e-5,
            rope_theta: 500_000.0,
            rope_scaling,
            max_position: 131_072,
            tied_head: true,
            qkv_bias: false,
            out_bias: false,
            mlp_bias: false,
            qk_norm: false,
            mask_token: None,
            draft_vocab: None,
            draft_head: None,
        }
    }

    #[test]
    fn llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones() {
        let plain = frequencies(&config(None));
        let scaled = frequencies(&config(Some(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192,
        })));
        assert_eq!(plain[0], scaled[0]);
        assert!((plain[63] / scaled[63] - 8.0).abs() < 1e-9);
        assert!(scaled.windows(2).all(|w| w[0] > w[1]), "frequencies must fall");
    }

    #[test]
    fn angles_at_position_zero_are_the_identity() {
        let table = RopeTable::new(&config(None), 3);
        let (cos, sin) = table.at(0);
        assert!(cos.iter().all(|&c| c == 1.0) && sin.iter().all(|&s| s == 0.0));
        assert!((table.at(2).0[0] - 2f32.cos()).abs() < 1e-6);
    }
}
