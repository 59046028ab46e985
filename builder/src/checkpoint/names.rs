//! The one table of tensor names: what a tensor is, its name in Hugging Face checkpoints (the canonical one), and its name
//! in GGUF. Which of them a model has, and their shapes, follows from the description of a decoder.

use spec_core::Result;
use spec_core::model::ModelConfig;
use spec_core::model::decoder::{
    self, Linear, Load, MatrixKind, TensorId, TensorRole as Role, Vector,
};
use std::ops::Range;

/// Canonical name of the embedding, [vocabulary, hidden].
pub const EMBED: &str = "model.embed_tokens.weight";
/// Canonical name of the last norm, one value a hidden channel.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Canonical name of an untied head, [vocabulary, hidden].
pub const HEAD: &str = "lm_head.weight";

/// Canonical name of what norms the taps of a head.
pub const TAPS_NORM: &str = "input_norm.weight";
/// Canonical name of how far the token of each row of an EAGLE head is away.
pub const VOCAB_MAP: &str = "d2t";
/// Canonical name of the hidden states that stand in for a target's in a head that drafts in one pass.
pub const MASK_HIDDEN: &str = "mask_hidden";

/// Tensors of a layer, without `model.layers.N.` or `blk.N.`, and without `.weight` and `.bias`.
const LAYER: [(Role, &str, &str); 11] = [
    (Role::AttnNorm, "input_layernorm", "attn_norm"),
    (Role::Q, "self_attn.q_proj", "attn_q"),
    (Role::K, "self_attn.k_proj", "attn_k"),
    (Role::V, "self_attn.v_proj", "attn_v"),
    (Role::QNorm, "self_attn.q_norm", "attn_q_norm"),
    (Role::KNorm, "self_attn.k_norm", "attn_k_norm"),
    (Role::O, "self_attn.o_proj", "attn_output"),
    (Role::MlpNorm, "post_attention_layernorm", "ffn_norm"),
    (Role::Gate, "mlp.gate_proj", "ffn_gate"),
    (Role::Up, "mlp.up_proj", "ffn_up"),
    (Role::Down, "mlp.down_proj", "ffn_down"),
];

/// Tensors outside the layers.
const GLOBAL: [(Role, &str, &str); 3] = [
    (Role::Embed, EMBED, "token_embd.weight"),
    (Role::FinalNorm, FINAL_NORM, "output_norm.weight"),
    (Role::Head, HEAD, "output.weight"),
];

/// Tensors that some families keep in one, by the matrix that they make up.
const FUSED: [(MatrixKind, &str, &str); 2] = [
    (MatrixKind::Qkv, "self_attn.qkv_proj", "attn_qkv"),
    (MatrixKind::GateUp, "mlp.gate_up_proj", "ffn_up"),
];

/// Canonical name of a tensor's weight.
pub fn weight(tensor: TensorId) -> String {
    match (tensor.role, tensor.layer) {
        (Role::TapsNorm, _) => TAPS_NORM.into(),
        (Role::TapNorm, Some(tap)) => format!("fc_norm.{tap}.weight"),
        (Role::Fc, _) => "fc.weight".into(),
        (Role::VocabMap, _) => VOCAB_MAP.into(),
        (Role::MaskHidden, _) => MASK_HIDDEN.into(),
        (Role::Block(idx), Some(head)) => format!("{head}.{idx}.linear.weight"),
        (Role::BehindBlocks(idx), Some(head)) => format!("{head}.{idx}.weight"),
        (Role::HiddenNorm, Some(layer)) => in_layer(layer, "hidden_norm", "weight"),
        (role, Some(layer)) => in_layer(layer, stem(&LAYER, role), "weight"),
        (role, None) => stem(&GLOBAL, role).into(),
    }
}

/// Canonical name of a tensor's bias, which only those of layers, blocks and `fc` may have.
pub fn bias(tensor: TensorId) -> String {
    if tensor.role == Role::Fc {
        return "fc.bias".into();
    }
    let layer = tensor.layer.expect("tensors outside of layers have no bias");
    if let Role::Block(idx) = tensor.role {
        return format!("{layer}.{idx}.linear.bias");
    }
    in_layer(layer, stem(&LAYER, tensor.role), "bias")
}

fn in_layer(layer: usize, stem: &str, kind: &str) -> String {
    format!("model.layers.{layer}.{stem}.{kind}")
}

fn stem(table: &[(Role, &'static str, &str)], role: Role) -> &'static str {
    let row = table.iter().find(|(known, ..)| *known == role);
    row.expect("the tables list every role: tested below").1
}

/// A tensor that a checkpoint of a model must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The name that it is found under: the canonical one, or that of several tensors in one.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The canonical tensors that it is, and which of its rows each is.
    pub parts: Vec<(String, Range<usize>)>,
}

/// Every tensor that a checkpoint of a model must have; `fused` is whether q, k and v are in one tensor, and gate and up in
/// another.
pub fn expected(config: &ModelConfig, fused: bool) -> Vec<Expected> {
    let mut tensors = Tensors { fused, list: Vec::new() };
    decoder::walk(config, &mut tensors).expect("a list takes everything");
    tensors.list
}

/// Lists the tensors that parts are made of.
struct Tensors {
    fused: bool,
    list: Vec<Expected>,
}

impl Tensors {
    /// The weights, or the biases, of a matrix; a row has `shape` behind its number.
    fn push(&mut self, linear: &Linear, name: fn(TensorId) -> String, kind: &str, shape: &[usize]) {
        let shaped = |rows: usize| [&[rows], shape].concat();
        let stem = FUSED.iter().find(|(fused, ..)| self.fused && *fused == linear.kind);
        if let Some((_, stem, _)) = stem {
            let mut end = 0;
            let part = |&(tensor, rows): &(TensorId, usize)| {
                end += rows;
                (name(tensor), end - rows..end)
            };
            let parts = linear.sources.iter().map(part).collect();
            let layer = linear.sources[0].0.layer.expect("what is fused is in a layer");
            let name = in_layer(layer, stem, kind);
            self.list.push(Expected { name, shape: shaped(linear.n()), parts });
            return;
        }
        for &(tensor, rows) in &linear.sources {
            self.list.push(Expected::whole(name(tensor), shaped(rows)));
        }
    }
}

impl Expected {
    fn whole(name: String, shape: Vec<usize>) -> Self {
        Self { parts: vec![(name.clone(), 0..shape[0])], name, shape }
    }
}

impl Load for Tensors {
    type Matrix = ();
    type Vector = ();

    fn matrix(&mut self, linear: &Linear) -> Result<()> {
        if linear.has_bias {
            self.push(linear, bias, "bias", &[]);
        }
        self.push(linear, weight, "weight", &[linear.k]);
        Ok(())
    }

    fn vector(&mut self, vector: &Vector) -> Result<()> {
        self.list.push(Expected::whole(weight(vector.source), vec![vector.len]));
        Ok(())
    }
}

/// The name in Hugging Face checkpoints of a GGUF tensor, if it is one of the tables'; `fused` as above.
pub(super) fn from_gguf(name: &str, fused: bool) -> Option<String> {
    if let Some((_, hf, _)) = GLOBAL.iter().find(|(.., gguf)| *gguf == name) {
        return Some((*hf).to_string());
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer: usize = layer.parse().ok().filter(|idx: &usize| idx.to_string() == layer)?;
    let (stem, kind) = part.rsplit_once('.')?;
    let in_one = FUSED.iter().find(|(.., gguf)| fused && *gguf == stem).map(|(_, hf, _)| *hf);
    let alone = || LAYER.iter().find(|(.., gguf)| *gguf == stem).map(|(_, hf, _)| *hf);
    let hf = in_one.or_else(alone)?;
    matches!(kind, "weight" | "bias").then(|| in_layer(layer, hf, kind))
}

/// What a canonical tensor of a layer is.
pub(super) fn role(name: &str) -> Option<Role> {
    let (_, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (stem, _) = part.rsplit_once('.')?;
    LAYER.iter().find(|(_, hf, _)| *hf == stem).map(|(role, ..)| *role)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_what_a_tensor_is() {
        for (found, ..) in LAYER {
            let tensor = TensorId { role: found, layer: Some(7) };
            assert_eq!(role(&weight(tensor)), Some(found));
            assert_eq!(role(&bias(tensor)), Some(found));
        }
    }

    #[test]
    fn every_part_of_a_decoder_has_a_name_of_its_own() {
        let mut config = crate::checkpoint::testing::tiny_config("qwen3", "Qwen3ForCausalLM");
        config["attention_bias"] = true.into();
        config["tie_word_embeddings"] = false.into();
        let model = crate::checkpoint::testing::model(&config);
        for (fused, in_layer) in [(false, 11 + 4), (true, 8 + 2)] {
            let expected = expected(&model, fused);
            let mut names: Vec<_> = expected.iter().map(|expected| &expected.name).collect();
            let num_tensors = 3 + model.num_layers * in_layer;
            assert_eq!(names.len(), num_tensors);
            names.sort();
            names.dedup();
            assert_eq!(names.len(), num_tensors);
            // The parts are the same, however they are kept.
            let parts = expected.iter().map(|expected| expected.parts.len()).sum::<usize>();
            assert_eq!(parts, 3 + model.num_layers * (11 + 4));
            for Expected { name, shape, parts } in &expected {
                let ends = parts.iter().map(|(_, rows)| rows.end);
                let begins = parts.iter().map(|(_, rows)| rows.start);
                assert!(begins.eq([0].into_iter().chain(ends).take(parts.len())), "{name}");
                assert_eq!(parts.last().unwrap().1.end, shape[0], "{name}");
            }
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
            assert_eq!(from_gguf(gguf, false).as_deref(), hf, "{gguf}");
        }
    }

    #[test]
    fn tensors_in_one_have_names_of_their_own() {
        let names = |name| [false, true].map(|fused| from_gguf(name, fused));
        let up = "model.layers.2.mlp.up_proj.weight".to_string();
        let both = "model.layers.2.mlp.gate_up_proj.weight".to_string();
        assert_eq!(names("blk.2.ffn_up.weight"), [Some(up), Some(both)]);
        let qkv = "model.layers.2.self_attn.qkv_proj.bias".to_string();
        assert_eq!(names("blk.2.attn_qkv.bias"), [None, Some(qkv)]);
    }
}
