//! The families of models by the names that files give them. A new family adds a row.

use spec_core::model::Family;

/// How a family goes by in the files.
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
    /// Elements of a head when config.json does not say; `None`: hidden size by heads.
    pub(crate) default_head_dim: Option<usize>,
}

/// Every family.
#[rustfmt::skip]
pub(crate) const FAMILIES: [FamilyRow; 4] = [
    FamilyRow { family: Family::Llama, model_type: "llama", class: "LlamaForCausalLM", gguf: Some("llama"), interleaved: true, default_head_dim: None },
    FamilyRow { family: Family::Mistral, model_type: "mistral", class: "MistralForCausalLM", gguf: None, interleaved: false, default_head_dim: None },
    FamilyRow { family: Family::Qwen2, model_type: "qwen2", class: "Qwen2ForCausalLM", gguf: Some("qwen2"), interleaved: false, default_head_dim: None },
    FamilyRow { family: Family::Qwen3, model_type: "qwen3", class: "Qwen3ForCausalLM", gguf: Some("qwen3"), interleaved: false, default_head_dim: Some(128) },
];

/// The row of a family.
pub(crate) fn row(family: Family) -> &'static FamilyRow {
    // Every variant has its row, in the order of the enum: tested below.
    &FAMILIES[family as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_finds_its_row() {
        for family in [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3] {
            assert_eq!(row(family).family, family);
        }
    }
}
