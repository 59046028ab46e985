//! A model that both devices can run.

use super::{Family, ModelConfig};

/// Three layers of 96, two query heads over each of two key heads of 64, tied, without biases.
pub(crate) fn small_llama() -> ModelConfig {
    ModelConfig {
        family: Family::Llama,
        vocab_size: 100,
        hidden_size: 96,
        intermediate_size: 160,
        num_layers: 3,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: 64,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        max_position: 64,
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
