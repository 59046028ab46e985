//! Which variants are checked: those of real models, in the number formats that change their code.

use spec_core::engine::{Precision, needed_variants};
use spec_core::model::{
    DraftHead, Dtype, EagleConfig, EagleKind, Family, MedusaConfig, ModelConfig, TapNorms,
};
use spec_kernels::{Format, Variant};
use std::collections::BTreeSet;

const FP8: Precision = Precision { weights: Dtype::Fp8, head: Dtype::Fp16, kv: Dtype::Fp16 };
const ALL_FP8: Precision = Precision { weights: Dtype::Fp8, head: Dtype::Fp8, kv: Dtype::Fp8 };
const FP16: Precision = Precision { weights: Dtype::Fp16, head: Dtype::Fp16, kv: Dtype::Fp8 };

/// Query heads of a key head that attention is checked with besides: with large heads, dividing by some of them takes
/// the last registers.
const GROUPS: [usize; 3] = [5, 7, 16];

/// A model by its sizes: hidden, MLP, query heads, key heads, elements of a head, vocabulary.
fn model(sizes: [usize; 6], qk_norm: bool) -> ModelConfig {
    let [hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size] = sizes;
    ModelConfig {
        family: if qk_norm { Family::Qwen3 } else { Family::Llama },
        vocab_size,
        hidden_size,
        intermediate_size,
        num_layers: 1,
        num_heads,
        num_kv_heads,
        head_dim,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        max_position: 8192,
        tied_head: true,
        qkv_bias: false,
        out_bias: false,
        mlp_bias: false,
        qk_norm,
        mask_token: None,
        draft_vocab: None,
        draft_head: None,
    }
}

/// An EAGLE-3 head of a model, with matrices of its own.
fn head(target: &ModelConfig) -> ModelConfig {
    let eagle = EagleConfig {
        kind: EagleKind::Eagle3,
        taps: vec![2, 16, 29],
        target_hidden: target.hidden_size,
        tap_norms: TapNorms::None,
        fc_bias: false,
        norm_before_residual: true,
        norm_output: true,
        window: None,
        own_embed: true,
        own_head: true,
        draft_vocab: 32_000,
        maps_vocab: true,
        mask_token: None,
    };
    ModelConfig { draft_head: Some(DraftHead::Eagle(eagle)), ..target.clone() }
}

/// An EAGLE head of the first kind, which has all but its layer and `fc` from its target.
fn first_head(target: &ModelConfig) -> ModelConfig {
    let eagle = EagleConfig {
        kind: EagleKind::Eagle1,
        taps: vec![32],
        target_hidden: target.hidden_size,
        tap_norms: TapNorms::Together,
        fc_bias: true,
        norm_before_residual: false,
        norm_output: false,
        window: None,
        own_embed: false,
        own_head: false,
        draft_vocab: target.vocab_size,
        maps_vocab: false,
        mask_token: None,
    };
    ModelConfig { draft_head: Some(DraftHead::Eagle(eagle)), ..target.clone() }
}

/// Five Medusa heads of one block.
fn medusa_heads(target: &ModelConfig) -> ModelConfig {
    let medusa =
        MedusaConfig { tap: 32, num_blocks: 1, block_bias: true, own_heads: vec![true; 5] };
    ModelConfig { draft_head: Some(DraftHead::Medusa(medusa)), ..target.clone() }
}

/// The variants of an architecture, each once.
pub(crate) fn variants(arch: &str) -> Vec<Variant> {
    let smollm2 = model([576, 1536, 9, 3, 64, 49152], false);
    let qwen2 = model([896, 4864, 14, 2, 64, 151_936], false);
    let llama = model([4096, 14336, 32, 8, 128, 128_256], false);
    let qwen3 = model([1024, 3072, 16, 8, 128, 151_936], true);
    let mut variants = BTreeSet::new();
    for (model, precision) in
        [(&smollm2, &FP8), (&qwen2, &ALL_FP8), (&qwen3, &FP8), (&llama, &FP8), (&llama, &FP16)]
    {
        variants.extend(needed_variants(model, precision, arch));
    }
    for head in [head(&llama), first_head(&llama), medusa_heads(&llama)] {
        variants.extend(needed_variants(&head, &FP8, arch));
    }
    for (kv, group) in
        [Format::Fp16, Format::Fp8].into_iter().flat_map(|kv| GROUPS.map(|g| (kv, g)))
    {
        variants.insert(Variant::attention(kv, 128, group));
        variants.insert(Variant::attention_wide(kv, 128, group));
    }
    variants.into_iter().collect()
}

/// Those of one shape but for products of 16 and 32 rows, which are made as those of fewer and of more.
pub(crate) fn fewest_and_most_rows(arch: &str) -> BTreeSet<Variant> {
    let mut variants = one_shape_each(arch);
    variants.retain(|variant| !["16", "32"].map(Some).contains(&rows_of_product(variant)));
    variants
}

/// Of each kernel, format of its numbers and epilogue the first variant.
pub(crate) fn one_of_each(arch: &str) -> Vec<Variant> {
    let mut seen = BTreeSet::new();
    let mut variants = variants(arch);
    variants.retain(|variant| {
        let kinds = variant.defines.iter();
        let kinds = kinds.filter(|(name, _)| ["WEIGHT", "KV", "EPILOGUE"].contains(name)).cloned();
        seen.insert((variant.kernel, kinds.collect::<Vec<_>>()))
    });
    variants
}

/// Of a product of few rows: for how many it is compiled.
fn rows_of_product(variant: &Variant) -> Option<&str> {
    let rows = variant.defines.iter().find(|(name, _)| *name == "ROWS");
    rows.filter(|_| variant.kernel == "gemm").map(|(_, rows)| rows.as_str())
}

/// Of an architecture's variants that differ in their shape alone, the first: they are made of the same instructions.
pub(crate) fn one_shape_each(arch: &str) -> BTreeSet<Variant> {
    let mut seen = BTreeSet::new();
    let mut variants = variants(arch);
    variants.retain(|variant| {
        let mut shapeless = variant.clone();
        shapeless.defines.retain(|(name, _)| !name.starts_with("SHAPE_"));
        seen.insert(shapeless)
    });
    variants.into_iter().collect()
}
