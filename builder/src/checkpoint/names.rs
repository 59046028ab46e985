//! The one table of tensor names: a tensor's role in the model, its name in Hugging Face checkpoints
//! (the canonical one), its name in GGUF, and its shape. A new family adds rows here.

use spec_core::model::ModelConfig;

/// Canonical name of the embedding, [vocabulary, hidden].
pub const EMBED: &str = "model.embed_tokens.weight";
/// Canonical name of the last norm, one value a hidden channel.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Canonical name of an untied head, [vocabulary, hidden].
pub const HEAD: &str = "lm_head.weight";

/// A part of a decoder layer that has tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Norm before attention.
    AttnNorm,
    /// Query projection.
    Q,
    /// Key projection.
    K,
    /// Value projection.
    V,
    /// Attention output projection.
    O,
    /// Norm of each query head.
    QNorm,
    /// Norm of each key head.
    KNorm,
    /// Norm before the MLP.
    MlpNorm,
    /// Gate projection of the MLP.
    Gate,
    /// Up projection of the MLP.
    Up,
    /// Down projection of the MLP.
    Down,
}

struct Row {
    role: Role,
    hf: &'static str,
    gguf: &'static str,
    /// Shape of the weight.
    shape: fn(&ModelConfig) -> Vec<usize>,
    weight: fn(&ModelConfig) -> bool,
    bias: fn(&ModelConfig) -> bool,
}

/// Parts of a layer in the order of computation.
#[rustfmt::skip]
const LAYER: [Row; 11] = [
    Row { role: Role::AttnNorm, hf: "input_layernorm", gguf: "attn_norm", shape: |c| vec![c.hidden_size], weight: always, bias: never },
    Row { role: Role::Q, hf: "self_attn.q_proj", gguf: "attn_q", shape: |c| vec![c.q_size(), c.hidden_size], weight: always, bias: |c| c.qkv_bias },
    Row { role: Role::K, hf: "self_attn.k_proj", gguf: "attn_k", shape: |c| vec![c.kv_size(), c.hidden_size], weight: always, bias: |c| c.qkv_bias },
    Row { role: Role::V, hf: "self_attn.v_proj", gguf: "attn_v", shape: |c| vec![c.kv_size(), c.hidden_size], weight: always, bias: |c| c.qkv_bias },
    Row { role: Role::O, hf: "self_attn.o_proj", gguf: "attn_output", shape: |c| vec![c.hidden_size, c.q_size()], weight: always, bias: |c| c.out_bias },
    Row { role: Role::QNorm, hf: "self_attn.q_norm", gguf: "attn_q_norm", shape: |c| vec![c.head_dim], weight: |c| c.qk_norm, bias: never },
    Row { role: Role::KNorm, hf: "self_attn.k_norm", gguf: "attn_k_norm", shape: |c| vec![c.head_dim], weight: |c| c.qk_norm, bias: never },
    Row { role: Role::MlpNorm, hf: "post_attention_layernorm", gguf: "ffn_norm", shape: |c| vec![c.hidden_size], weight: always, bias: never },
    Row { role: Role::Gate, hf: "mlp.gate_proj", gguf: "ffn_gate", shape: |c| vec![c.intermediate_size, c.hidden_size], weight: always, bias: |c| c.mlp_bias },
    Row { role: Role::Up, hf: "mlp.up_proj", gguf: "ffn_up", shape: |c| vec![c.intermediate_size, c.hidden_size], weight: always, bias: |c| c.mlp_bias },
    Row { role: Role::Down, hf: "mlp.down_proj", gguf: "ffn_down", shape: |c| vec![c.hidden_size, c.intermediate_size], weight: always, bias: |c| c.mlp_bias },
];

/// Tensors outside the layers.
const GLOBAL: [(&str, &str); 3] =
    [(EMBED, "token_embd.weight"), (FINAL_NORM, "output_norm.weight"), (HEAD, "output.weight")];

fn always(_: &ModelConfig) -> bool {
    true
}

fn never(_: &ModelConfig) -> bool {
    false
}

impl Role {
    fn row(self) -> &'static Row {
        // LAYER lists every role in the order of the enum: tested below.
        &LAYER[self as usize]
    }

    /// Canonical name of the weight in a layer.
    pub fn weight(self, layer_idx: usize) -> String {
        format!("model.layers.{layer_idx}.{}.weight", self.row().hf)
    }

    /// Canonical name of the bias in a layer.
    pub fn bias(self, layer_idx: usize) -> String {
        format!("model.layers.{layer_idx}.{}.bias", self.row().hf)
    }

    /// Whether a model has the bias.
    pub fn has_bias(self, config: &ModelConfig) -> bool {
        (self.row().bias)(config)
    }
}

/// Every tensor that a model must have, by canonical name, with its shape.
pub fn expected(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let table = vec![config.vocab_size, config.hidden_size];
    let mut tensors = vec![(EMBED.to_string(), table.clone())];
    for layer_idx in 0..config.num_layers {
        for row in &LAYER {
            let shape = (row.shape)(config);
            if (row.bias)(config) {
                tensors.push((row.role.bias(layer_idx), shape[..1].to_vec()));
            }
            if (row.weight)(config) {
                tensors.push((row.role.weight(layer_idx), shape));
            }
        }
    }
    tensors.push((FINAL_NORM.to_string(), vec![config.hidden_size]));
    if !config.tied_head {
        tensors.push((HEAD.to_string(), table));
    }
    tensors
}

/// The canonical name of a GGUF tensor, if it is one of the table's.
pub(super) fn from_gguf(name: &str) -> Option<String> {
    if let Some((hf, _)) = GLOBAL.iter().find(|(_, gguf)| *gguf == name) {
        return Some((*hf).to_string());
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer_idx: usize = layer.parse().ok().filter(|idx: &usize| idx.to_string() == layer)?;
    let (stem, kind) = part.rsplit_once('.')?;
    let row = LAYER.iter().find(|row| row.gguf == stem)?;
    match kind {
        "weight" => Some(row.role.weight(layer_idx)),
        "bias" => Some(row.role.bias(layer_idx)),
        _ => None,
    }
}

/// The role of a canonical layer tensor.
pub(super) fn role(name: &str) -> Option<Role> {
    let (_, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (stem, _) = part.rsplit_once('.')?;
    LAYER.iter().find(|row| row.hf == stem).map(|row| row.role)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_roles() {
        for (idx, row) in LAYER.iter().enumerate() {
            assert_eq!(row.role as usize, idx);
            assert_eq!(role(&row.role.weight(7)), Some(row.role));
        }
    }

    #[test]
    fn gguf_names_become_canonical_ones() {
        let cases = [
            ("token_embd.weight", Some("model.embed_tokens.weight")),
            ("output.weight", Some("lm_head.weight")),
            ("blk.12.attn_output.weight", Some("model.layers.12.self_attn.o_proj.weight")),
            ("blk.0.attn_q.bias", Some("model.layers.0.self_attn.q_proj.bias")),
            ("blk.0.attn_k_norm.weight", Some("model.layers.0.self_attn.k_norm.weight")),
            ("blk.+1.attn_q.weight", None),
            ("blk.01.attn_q.weight", None),
            ("blk.1.ffn_gate_exps.weight", None),
            ("blk.1.attn_q.scale", None),
            ("rope_freqs.weight", None),
        ];
        for (gguf, hf) in cases {
            assert_eq!(from_gguf(gguf).as_deref(), hf, "{gguf}");
        }
    }
}
