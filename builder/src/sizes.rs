//! How big a model is: bytes by what they are for, parameters, and the KV cache of a token.

use crate::table::{self, Table};
use spec_core::engine::{Device, Precision, SectionKind, SectionSpec, expected_sections};
use spec_core::model::ModelConfig;
use spec_core::model::decoder::MatrixKind;
use spec_core::runtime::{PAGE_TOKENS, page_bytes, pages_for};

/// Sections by what they are for, in the order of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// The table of token vectors.
    Embedding,
    /// Projections of the attention.
    Attention,
    /// Projections of the MLP.
    Mlp,
    /// The output projection, where it is not the embedding.
    Head,
    /// Norms, biases and scales.
    Vectors,
}

impl Group {
    /// Every group.
    pub const ALL: [Self; 5] =
        [Self::Embedding, Self::Attention, Self::Mlp, Self::Head, Self::Vectors];

    fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::Mlp => "mlp",
            Self::Head => "head",
            Self::Vectors => "norms, biases, scales",
        }
    }

    fn of(section: &SectionSpec) -> Self {
        match section.matrix {
            Some(MatrixKind::Embed) => Self::Embedding,
            Some(MatrixKind::Qkv | MatrixKind::Out) => Self::Attention,
            Some(MatrixKind::GateUp | MatrixKind::Down | MatrixKind::Fc) => Self::Mlp,
            Some(MatrixKind::Head) => Self::Head,
            None => Self::Vectors,
        }
    }
}

/// The sizes of one engine.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Bytes of each group.
    pub groups: Vec<(Group, u64)>,
    /// Values of the model; scales are not counted.
    pub parameters: u64,
    /// Bytes of keys and values for one token.
    pub kv_token_bytes: u64,
    /// Bytes that a pass reads of the weights: all but the rows of an embedding that is no head. One of Medusa heads runs one
    /// of them.
    pub step_bytes: u64,
    /// Multiply-adds of a row with the layers' weights.
    pub layer_macs: u64,
    /// Multiply-adds of a row with the head.
    pub head_macs: u64,
}

impl Sizes {
    /// The sizes that follow from a model, its number formats and where it runs; code is not counted.
    pub fn new(model: &ModelConfig, precision: &Precision, device: &Device) -> Self {
        let mut sections = expected_sections(model, precision, device);
        sections.retain(|section| section.kind != SectionKind::Code);
        let of_group = |group| sections.iter().filter(move |s| Group::of(s) == group);
        let bytes = |group| of_group(group).filter_map(|section| section.bytes).sum::<u64>();
        let values = |section: &SectionSpec| -> u64 {
            section.shape.iter().map(|&size| size as u64).product()
        };
        let macs = |group| of_group(group).map(values).sum::<u64>();
        let not_scales = sections.iter().filter(|section| section.kind != SectionKind::Scale);
        let total: u64 = sections.iter().filter_map(|section| section.bytes).sum();
        let num_passes = model.most_drafts().unwrap_or(1) as u64;
        Self {
            groups: Group::ALL.into_iter().map(|group| (group, bytes(group))).collect(),
            parameters: not_scales.map(values).sum(),
            kv_token_bytes: (page_bytes(model, precision, device) / PAGE_TOKENS) as u64,
            step_bytes: match model.tied_head {
                true => total,
                false => (total - bytes(Group::Embedding)) / num_passes,
            },
            layer_macs: (macs(Group::Attention) + macs(Group::Mlp)) / num_passes,
            head_macs: match model.tied_head {
                true => macs(Group::Embedding),
                false => macs(Group::Head) / num_passes,
            },
        }
    }

    /// Bytes of all groups.
    pub fn total(&self) -> u64 {
        self.groups.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// Bytes by group, a column for each engine.
pub fn table(engines: &[(&str, &Sizes)]) -> Table {
    let mut table = Table::new([""].into_iter().chain(engines.iter().map(|(name, _)| *name)));
    let mut row = |name: &str, bytes: &dyn Fn(&Sizes) -> u64| {
        let cells = engines.iter().map(|(_, sizes)| table::bytes(bytes(sizes)));
        table.row([name.to_string()].into_iter().chain(cells));
    };
    for (idx, group) in Group::ALL.into_iter().enumerate() {
        row(group.name(), &|sizes| sizes.groups[idx].1);
    }
    row("all weights", &Sizes::total);
    row("kv cache, a token", &|sizes| sizes.kv_token_bytes);
    table
}

/// What fits into the memory for keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Tokens in whole pages.
    pub tokens: u64,
    /// Sequences of the full length.
    pub sequences: u64,
}

impl Capacity {
    /// Bytes of a sequence of `max_seq_len` in the caches of all engines.
    pub fn bytes(kv_token_bytes: u64, max_seq_len: usize) -> u64 {
        (pages_for(max_seq_len) * PAGE_TOKENS) as u64 * kv_token_bytes
    }

    /// Pages of all engines together in `memory` bytes, for sequences of `max_seq_len`.
    pub fn new(memory: u64, kv_token_bytes: u64, max_seq_len: usize) -> Self {
        let pages = memory / (kv_token_bytes * PAGE_TOKENS as u64).max(1);
        Self {
            tokens: pages * PAGE_TOKENS as u64,
            sequences: pages / pages_for(max_seq_len).max(1) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::testing::{model, tiny_config};
    use spec_core::model::{DraftHead, Dtype, MedusaConfig};

    /// Hidden 32, 2 layers, 4 heads over 2 of 8, MLP 64, vocabulary 48, head of its own.
    fn sizes(weights: Dtype) -> Sizes {
        let config = model(&tiny_config("llama", "LlamaForCausalLM"));
        let precision = Precision { weights, head: Dtype::Bf16, kv: Dtype::Fp16 };
        Sizes::new(&config, &precision, &Device::Cpu)
    }

    #[test]
    fn groups_add_up_to_hand_counted_bytes() {
        let sizes = sizes(Dtype::Bf16);
        let bytes: Vec<u64> = sizes.groups.iter().map(|(_, bytes)| *bytes).collect();
        // Outputs are padded to 64: 48 rows of 32 become 64, qkv has 64, out 32 -> 64, down 32 -> 64.
        let embedding = 64 * 32 * 2;
        let attention = 2 * (64 * 32 + 64 * 32) * 2;
        let mlp = 2 * (128 * 32 + 64 * 64) * 2;
        let vectors = (2 * 2 + 1) * 32 * 4;
        assert_eq!(bytes, [embedding, attention, mlp, embedding, vectors]);
        assert_eq!(sizes.step_bytes, sizes.total() - embedding);
    }

    #[test]
    fn parameters_and_products_are_those_of_the_model_without_padding() {
        let layer = (32 + 16 + 16) * 32 + 32 * 32 + 3 * 64 * 32;
        for sizes in [sizes(Dtype::Bf16), sizes(Dtype::Fp8)] {
            assert_eq!(sizes.layer_macs, 2 * layer);
            assert_eq!(sizes.head_macs, 48 * 32);
            assert_eq!(sizes.parameters, 2 * layer + 2 * 48 * 32 + 5 * 32);
        }
    }

    #[test]
    fn a_token_has_keys_and_padded_values_in_every_layer_and_head() {
        // 8 values of a key, 8 padded to 16 of a value, in 2 layers and 2 heads, 2 bytes each.
        assert_eq!(sizes(Dtype::Bf16).kv_token_bytes, 2 * 2 * (8 + 16) * 2);
    }

    #[test]
    fn a_pass_of_medusa_heads_is_one_of_them() {
        let own_heads = vec![true; 4];
        let medusa = MedusaConfig { tap: 2, num_blocks: 1, block_bias: false, own_heads };
        let config = model(&tiny_config("llama", "LlamaForCausalLM"));
        let draft_head = Some(DraftHead::Medusa(medusa));
        let config = ModelConfig { num_layers: 0, draft_head, ..config };
        let precision = Precision { weights: Dtype::Bf16, head: Dtype::Bf16, kv: Dtype::Fp16 };
        let sizes = Sizes::new(&config, &precision, &Device::Cpu);
        assert_eq!((sizes.layer_macs, sizes.head_macs), (32 * 32, 48 * 32));
        // Outputs are padded to 64; the norm is the target's.
        assert_eq!(sizes.total(), 4 * 2 * 64 * 32 * 2 + 32 * 4);
        assert_eq!((sizes.step_bytes, sizes.kv_token_bytes), (sizes.total() / 4, 0));
    }

    #[test]
    fn capacity_counts_whole_pages() {
        let capacity = Capacity::new(10_000, 10, 33);
        // 160 bytes a page: 62 pages; 33 positions take 3 of them.
        assert_eq!(capacity, Capacity { tokens: 992, sequences: 20 });
    }
}
