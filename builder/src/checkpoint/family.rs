//! The families of models by the names that files give them. A new family adds a row.

use spec_core::model::Family;

/// How a family goes by in the files, and what its models have.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FamilyRow {
    pub(crate) family: Family,
    /// `model_type` of config.json.
    pub(crate) model_type: &'static str,
    /// The one of `architectures`.
    pub(crate) class: &'static str,
    /// `general.architecture` of GGUF; Mistral models call themselves llama there.
    pub(crate) gguf: Option<&'static str>,
    /// GGUF keeps the rows of q and k interleaved.
    pub(crate) interleaved: bool,
    /// Checkpoints keep q, k and v in one tensor, and gate and up in another.
    pub(crate) fused: bool,
    /// Elements of a head when config.json does not say; `None`: hidden size by heads.
    pub(crate) default_head_dim: Option<usize>,
    pub(crate) biases: Biases,
    /// Each head of q and k has a norm.
    pub(crate) qk_norm: bool,
    pub(crate) window: Window,
}

/// Which projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Biases {
    None,
    /// q, k and v.
    Qkv,
    /// All of the attention, where `attention_bias` says so.
    Attention,
    /// And all of the MLP, where `mlp_bias` does.
    AttentionAndMlp,
}

/// When a token sees only so many before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    Never,
    /// Where `sliding_window` is a number.
    IfSized,
    /// And `use_sliding_window` is on.
    IfUsed,
}

/// What most families have in common.
const COMMON: FamilyRow = FamilyRow {
    family: Family::Llama,
    model_type: "llama",
    class: "LlamaForCausalLM",
    gguf: Some("llama"),
    interleaved: false,
    fused: false,
    default_head_dim: None,
    biases: Biases::None,
    qk_norm: false,
    window: Window::Never,
};

/// Every family.
#[rustfmt::skip]
pub(crate) const FAMILIES: [FamilyRow; 5] = [
    FamilyRow { interleaved: true, biases: Biases::AttentionAndMlp, ..COMMON },
    FamilyRow { family: Family::Mistral, model_type: "mistral", class: "MistralForCausalLM", gguf: None, window: Window::IfSized, ..COMMON },
    FamilyRow { family: Family::Qwen2, model_type: "qwen2", class: "Qwen2ForCausalLM", gguf: Some("qwen2"), biases: Biases::Qkv, window: Window::IfUsed, ..COMMON },
    FamilyRow { family: Family::Qwen3, model_type: "qwen3", class: "Qwen3ForCausalLM", gguf: Some("qwen3"), default_head_dim: Some(128), biases: Biases::Attention, qk_norm: true, window: Window::IfUsed, ..COMMON },
    FamilyRow { family: Family::Phi3, model_type: "phi3", class: "Phi3ForCausalLM", gguf: Some("phi3"), fused: true, window: Window::IfSized, ..COMMON },
];

/// Whether a family goes by this `model_type`.
pub(crate) fn is_known(model_type: &str) -> bool {
    FAMILIES.iter().any(|row| row.model_type == model_type)
}

pub(crate) fn row(family: Family) -> &'static FamilyRow {
    // Every variant has its row, in the order of the enum: tested below.
    &FAMILIES[family as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_finds_its_row() {
        for (idx, found) in FAMILIES.iter().enumerate() {
            assert_eq!(found.family as usize, idx);
            assert_eq!(row(found.family).model_type, found.model_type);
        }
    }
}
