//! Parts of a model's own layers that its drafts go without.

use super::ModelConfig;
use serde::{Deserialize, Serialize};

/// Which layers are passed over by drafts, attention and MLP each for itself, as ascending numbers from 0 on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSkip {
    /// Layers without attention.
    pub attention: Vec<usize>,
    /// Layers without an MLP.
    pub mlp: Vec<usize>,
}

impl LayerSkip {
    /// Whether the layer with this number is left without attention.
    pub(crate) fn skips_attention(&self, layer: usize) -> bool {
        self.attention.binary_search(&layer).is_ok()
    }

    /// Whether it is left without its MLP.
    pub(crate) fn skips_mlp(&self, layer: usize) -> bool {
        self.mlp.binary_search(&layer).is_ok()
    }

    /// Whether it says something about this model: numbers of its layers, each once, and something is left out.
    pub fn check(&self, model: &ModelConfig) -> Result<(), String> {
        for (part, layers) in [("attention", &self.attention), ("mlp", &self.mlp)] {
            if let Some(layer) = layers.iter().find(|&&layer| layer >= model.num_layers) {
                let most = model.num_layers;
                return Err(format!("{part} of layer {layer}, expected numbers below {most}"));
            }
            if !layers.is_sorted_by(|a, b| a < b) {
                return Err(format!("{part} of layers {layers:?}, expected ascending numbers"));
            }
        }
        match self.attention.is_empty() && self.mlp.is_empty() {
            true => Err("nothing is left out".into()),
            false => Ok(()),
        }
    }
}
