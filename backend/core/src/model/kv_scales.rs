//! What stored FP8 keys and values are multiplied by when they are read: a power of two for each layer and key head, so
//! that scaling rounds nothing. e4m3 has as many digits for small numbers as for large ones: all that a scale decides is
//! what is too large and becomes 448, and what is so small that it loses digits.

use super::ModelConfig;
use super::e4m3::E4M3_MAX;
use serde::{Deserialize, Serialize};

/// Exponents are at most so large, either way: far beyond any model, and far within f32.
const MOST_EXPONENT: i8 = 32;

/// By how much keys and values may exceed the largest ones that were seen.
const HEADROOM: f32 = 2.0;

/// How large the keys and values of a model become: the largest magnitude, `[layer][key head]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvPeaks {
    /// Of rotated keys.
    pub keys: Vec<Vec<f32>>,
    /// Of values.
    pub values: Vec<Vec<f32>>,
}

/// Exponents of the scales, `[layer][key head]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KvScales {
    /// A key is what is stored times two to the power of this.
    pub keys: Vec<Vec<i8>>,
    /// A value likewise.
    pub values: Vec<Vec<i8>>,
}

/// The scales of a key head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct HeadScales {
    /// Of its keys.
    pub key: f32,
    /// Of its values.
    pub value: f32,
}

impl HeadScales {
    /// Everything is stored as it is.
    pub(crate) const ONE: Self = Self { key: 1.0, value: 1.0 };
}

impl KvScales {
    /// The smallest scales that store keys and values twice as large as these without cutting them off.
    pub fn covering(peaks: &KvPeaks) -> Self {
        let all = |peaks: &[Vec<f32>]| {
            peaks.iter().map(|heads| heads.iter().map(|&peak| exponent(peak)).collect()).collect()
        };
        Self { keys: all(&peaks.keys), values: all(&peaks.values) }
    }

    /// The same scales for all heads of a layer: the smallest powers of two that are no smaller than `(key, value)`.
    pub fn of_layers(layers: &[(f32, f32)], num_kv_heads: usize) -> Self {
        let all = |scale: fn(&(f32, f32)) -> f32| {
            layers.iter().map(|layer| vec![power(scale(layer)); num_kv_heads]).collect()
        };
        Self { keys: all(|layer| layer.0), values: all(|layer| layer.1) }
    }

    /// Every head's scales, `[layer][key head]`.
    pub(crate) fn heads(&self) -> impl Iterator<Item = HeadScales> {
        let scale = |exponent: i8| f32::exp2(exponent.into());
        let pairs = self.keys.iter().flatten().zip(self.values.iter().flatten());
        pairs.map(move |(&key, &value)| HeadScales { key: scale(key), value: scale(value) })
    }

    /// Whether they are those of such a model.
    pub(crate) fn check(&self, model: &ModelConfig) -> Result<(), String> {
        for (name, layers) in [("keys", &self.keys), ("values", &self.values)] {
            if layers.len() != model.num_layers {
                let (found, expected) = (layers.len(), model.num_layers);
                return Err(format!(
                    "scales of {name} of {found} layers, the model has {expected}"
                ));
            }
            for (layer, heads) in layers.iter().enumerate() {
                if heads.len() != model.num_kv_heads {
                    let (found, expected) = (heads.len(), model.num_kv_heads);
                    return Err(format!(
                        "scales of {name} of {found} heads in layer {layer}, the model has {expected}"
                    ));
                }
                let limits = -MOST_EXPONENT..=MOST_EXPONENT;
                if let Some(exponent) = heads.iter().find(|exponent| !limits.contains(exponent)) {
                    return Err(format!(
                        "scale 2^{exponent} of {name} in layer {layer}, expected 2^-{MOST_EXPONENT} to 2^{MOST_EXPONENT}"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Of the scale for numbers of up to this magnitude.
fn exponent(peak: f32) -> i8 {
    power(peak * HEADROOM / E4M3_MAX)
}

/// The exponent of the smallest power of two that is no smaller; 0 of what is no positive number.
fn power(scale: f32) -> i8 {
    if scale.is_nan() || scale <= 0.0 {
        return 0;
    }
    let bits = scale.to_bits();
    let has_more = bits & 0x7f_ffff != 0;
    let exponent = (bits >> 23) as i32 - 127 + i32::from(has_more);
    let limit = i32::from(MOST_EXPONENT);
    exponent.clamp(-limit, limit) as i8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::small_llama;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn twice_the_peak_is_stored_whole_and_no_smaller_scale_would_do(peak in 1e-4f32..1e4) {
            let scale = f32::exp2(exponent(peak).into());
            prop_assert!(HEADROOM * peak / scale <= E4M3_MAX);
            prop_assert!(HEADROOM * peak / (0.5 * scale) > E4M3_MAX);
        }
    }

    #[test]
    fn what_never_was_anything_is_stored_as_it_is() {
        assert_eq!([0.0, -0.0, f32::NAN].map(exponent), [0; 3]);
        assert_eq!([f32::INFINITY, f32::MIN_POSITIVE].map(exponent), [32, -32]);
    }

    #[test]
    fn scales_of_a_checkpoint_are_never_made_smaller() {
        let scales = KvScales::of_layers(&[(0.75, 4.0), (1.0, 0.01)], 2);
        assert_eq!(scales.keys, [[0, 0], [0, 0]]);
        assert_eq!(scales.values, [[2, 2], [-6, -6]]);
    }

    #[test]
    fn heads_come_layer_by_layer() {
        let scales =
            KvScales { keys: vec![vec![0, 1], vec![2, -3]], values: vec![vec![4, 5], vec![6, 7]] };
        let found: Vec<(f32, f32)> = scales.heads().map(|head| (head.key, head.value)).collect();
        assert_eq!(found, [(1.0, 16.0), (2.0, 32.0), (4.0, 64.0), (0.125, 128.0)]);
    }

    #[test]
    fn scales_of_another_model_are_refused() {
        let model = small_llama();
        let fits = KvScales { keys: vec![vec![0, 0]; 3], values: vec![vec![0, 0]; 3] };
        assert_eq!(fits.check(&model), Ok(()));
        let message = |change: fn(&mut KvScales)| {
            let mut scales = fits.clone();
            change(&mut scales);
            scales.check(&model).unwrap_err()
        };
        assert_eq!(
            message(|scales| _ = scales.keys.pop()),
            "scales of keys of 2 layers, the model has 3"
        );
        assert_eq!(
            message(|scales| scales.values[1].push(0)),
            "scales of values of 3 heads in layer 1, the model has 2"
        );
        assert_eq!(
            message(|scales| scales.values[2][1] = 33),
            "scale 2^33 of values in layer 2, expected 2^-32 to 2^32"
        );
    }
}
