//! The shape of a decoder model: everything that the executors need to know besides the weights.

use super::{DraftHead, EagleConfig, MedusaConfig};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// The families of Llama-shaped decoders. They differ in biases, q/k norms and defaults only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 2 and 3.x, SmolLM2 and other models that call themselves `llama`.
    Llama,
    /// Mistral (without a sliding window inside `max_seq_len`).
    Mistral,
    /// Qwen2 and Qwen2.5: biases on q, k and v.
    Qwen2,
    /// Qwen3: an RMS norm on each head of q and k.
    Qwen3,
    /// Phi-3 and Phi-4: checkpoints that keep q, k and v in one tensor, and gate and up in another.
    Phi3,
}

/// How rotary frequencies are stretched beyond the trained context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "type", deny_unknown_fields)]
pub enum RopeScaling {
    /// Positions divided by `factor`.
    Linear {
        /// The stretch, at least 1.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a ramp between.
    Llama3 {
        /// The stretch of the long wavelengths.
        factor: f64,
        /// Wavelengths longer than `original_max_position / low_freq_factor` are stretched.
        low_freq_factor: f64,
        /// Wavelengths shorter than `original_max_position / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context length of the original training, in tokens.
        original_max_position: usize,
    },
}

/// The shape of a model. Sizes are in elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Which family's conventions hold.
    pub family: Family,
    /// Rows of the embedding, padding included.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Stretch of the rotary frequencies, if any.
    pub rope_scaling: Option<RopeScaling>,
    /// The longest context that the model was made for, in tokens.
    pub max_position: usize,
    /// The head is the embedding.
    pub tied_head: bool,
    /// q, k and v have biases.
    pub qkv_bias: bool,
    /// The attention output projection has a bias.
    pub out_bias: bool,
    /// The MLP projections have biases.
    pub mlp_bias: bool,
    /// Each head of q and k goes through an RMS norm before the rotation.
    pub qk_norm: bool,
    /// The token of the positions behind the known ones whose rows say, in one pass, what comes there: what makes a model
    /// one that drafts in parallel, PARD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_token: Option<u32>,
    /// Tokens that its head has logits of, where that is not all of the vocabulary: of a model that drafts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_vocab: Option<usize>,
    /// What it is besides, where it is no model of its own but a head on another one's hidden states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_head: Option<DraftHead>,
}

impl ModelConfig {
    /// What it is as an EAGLE head, if it is one.
    pub fn eagle(&self) -> Option<&EagleConfig> {
        match &self.draft_head {
            Some(DraftHead::Eagle(eagle)) => Some(eagle),
            _ => None,
        }
    }

    /// What it is as Medusa heads, if it is that.
    pub fn medusa(&self) -> Option<&MedusaConfig> {
        match &self.draft_head {
            Some(DraftHead::Medusa(medusa)) => Some(medusa),
            _ => None,
        }
    }

    /// Whether all that it drafts comes from one pass: of a model or a head made for that.
    pub fn drafts_at_once(&self) -> bool {
        self.mask_token.or(self.eagle().and_then(|eagle| eagle.mask_token)).is_some()
    }

    /// Logits of a row.
    pub fn num_logits(&self) -> usize {
        let of_head = self.eagle().map(|eagle| eagle.draft_vocab);
        self.draft_vocab.or(of_head).unwrap_or(self.vocab_size)
    }

    /// Whether the tokens that it has logits of are not the first ones of the vocabulary.
    pub(crate) fn maps_vocab(&self) -> bool {
        self.draft_vocab.is_some() || self.eagle().is_some_and(|eagle| eagle.maps_vocab)
    }

    /// Tokens that it can draft in a step, where that is limited.
    pub fn most_drafts(&self) -> Option<usize> {
        self.medusa().map(MedusaConfig::num_heads)
    }

    /// Elements of all query heads.
    pub fn q_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Elements of all key (or all value) heads.
    pub fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Rows of the fused q, k, v projection.
    pub(crate) fn qkv_size(&self) -> usize {
        self.q_size() + 2 * self.kv_size()
    }

    /// Checks what the executors rely on. Bounds are generous: they keep products of sizes far from
    /// overflow and allocations in proportion, whatever a hostile file claims.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 22),
            ("hidden_size", self.hidden_size, 1 << 16),
            ("intermediate_size", self.intermediate_size, 1 << 18),
            ("num_layers", self.num_layers, 1024),
            ("num_heads", self.num_heads, 1024),
            ("num_kv_heads", self.num_kv_heads, 1024),
            ("head_dim", self.head_dim, 1024),
            ("max_position", self.max_position, 1 << 24),
        ];
        for (name, value, most) in sizes {
            let has_none = name == "num_layers" && self.medusa().is_some();
            if (value == 0 && !has_none) || value > most {
                return Err(bad(format!("{name} is {value}, expected 1 to {most}")));
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return Err(bad(format!(
                "num_heads {} is no multiple of num_kv_heads {}",
                self.num_heads, self.num_kv_heads
            )));
        }
        if let Some(mask) = self.mask_token.filter(|&mask| mask as usize >= self.vocab_size) {
            let all = self.vocab_size;
            return Err(bad(format!("its mask token is {mask}, expected one of {all}")));
        }
        if let Some(drafted) = self.draft_vocab {
            self.validate_draft_vocab(drafted)?;
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(bad(format!("head_dim {} is odd", self.head_dim)));
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return Err(bad(format!("rms_norm_eps is {}, expected 0 to 1", self.rms_norm_eps)));
        }
        if !(self.rope_theta >= 1.0 && self.rope_theta.is_finite()) {
            return Err(bad(format!("rope_theta is {}, expected at least 1", self.rope_theta)));
        }
        match &self.draft_head {
            None => {}
            Some(DraftHead::Eagle(eagle)) => eagle.validate(self)?,
            Some(DraftHead::Medusa(medusa)) => medusa.validate(self)?,
        }
        match &self.rope_scaling {
            None => Ok(()),
            Some(RopeScaling::Linear { factor }) if *factor >= 1.0 && factor.is_finite() => Ok(()),
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            }) if *factor >= 1.0
                && factor.is_finite()
                && *low_freq_factor > 0.0
                && high_freq_factor > low_freq_factor
                && high_freq_factor.is_finite()
                && *original_max_position > 0 =>
            {
                Ok(())
            }
            Some(scaling) => Err(bad(format!("rope_scaling is out of range: {scaling:?}"))),
        }
    }

    fn validate_draft_vocab(&self, drafted: usize) -> Result<()> {
        if drafted == 0 || drafted > self.vocab_size {
            let all = self.vocab_size;
            return Err(bad(format!("draft_vocab is {drafted}, expected 1 to {all}")));
        }
        if self.tied_head || self.draft_head.is_some() {
            return Err(bad(format!(
                "draft_vocab is {drafted}, expected none but of a model with a head of its own"
            )));
        }
        Ok(())
    }
}

fn bad(message: String) -> Error {
    Error::BadModel(format!("model config: {message}"))
}
