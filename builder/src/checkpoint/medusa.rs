//! Medusa heads as their authors publish them (`medusa_lm_head.pt` or `.safetensors` beside a config.json, tensors
//! `HEAD.BLOCK.linear.weight` and, behind the blocks, `HEAD.BLOCKS.weight`), and as vLLM reads them (`blocks.HEAD.layers.BLOCK.weight`,
//! `lm_heads.HEAD.weight`). How many heads and blocks there are is what the tensors say: config.json is known to be wrong.

use super::Checkpoint;
use super::bounded::Object;
use super::hf::{self, Stock};
use super::names::{self, Expected};
use super::target::Target;
use anyhow::{Context, Result, bail, ensure};
use spec_core::model::{DraftHead, MedusaConfig, ModelConfig};
use std::collections::BTreeMap;
use std::path::Path;

/// What the weights are called; the names that models have come last.
const WEIGHTS: [&str; 4] =
    ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin"];

/// Opens a folder as heads of `target`, if it has some. `shares` is whether they may leave to the target what both have.
pub(super) fn open(folder: &Path, target: &dyn Target, shares: bool) -> Result<Option<Checkpoint>> {
    let stock = hf::stock(folder, &WEIGHTS)?;
    if !stock.keys().any(|name| block_of(name).is_some()) {
        return Ok(None);
    }
    let theirs = target.config();
    let config = Object::open(&folder.join("config.json"))?;
    for (key, what, of_target) in [
        ("hidden_size", "width", theirs.hidden_size),
        ("vocab_size", "vocabulary", theirs.vocab_size),
    ] {
        let own = config.usize(key)?.unwrap_or(of_target);
        ensure!(
            own == of_target,
            "they are heads for a model of {what} {own}, that of the target is {of_target}"
        );
    }
    let blocks: Vec<_> = stock.keys().filter_map(|name| block_of(name)).collect();
    let num_blocks = blocks.iter().filter(|(head, _)| *head == 0).count();
    let num_heads = blocks.iter().filter(|(_, block)| *block == 0).count();
    let mut stock = rename(stock, num_blocks)?;
    if config.bool("original_lm_head")?.unwrap_or(false) {
        // One for all.
        if let Some(first) = stock.get(&to_logits(0, num_blocks)).cloned() {
            for head in 1..num_heads {
                stock.entry(to_logits(head, num_blocks)).or_insert_with(|| first.clone());
            }
        }
    }
    let mut own_heads = Vec::with_capacity(num_heads);
    for head in 0..num_heads {
        let name = to_logits(head, num_blocks);
        let own = stock.get(&name).cloned();
        let own = hf::tensor(own.with_context(|| format!("tensor `{name}`: missing"))?)?;
        let is_own = !shares || !target.has_same(names::HEAD, &own)?;
        if !is_own {
            stock.remove(&name);
        }
        own_heads.push(is_own);
    }
    let medusa = MedusaConfig {
        tap: theirs.num_layers,
        num_blocks,
        block_bias: stock.contains_key("0.0.linear.bias"),
        own_heads,
    };
    let model = ModelConfig {
        num_layers: 0,
        tied_head: false,
        mask_token: None,
        draft_vocab: None,
        draft_head: Some(DraftHead::Medusa(medusa)),
        ..theirs.clone()
    };
    model.validate()?;
    let mut tensors = BTreeMap::new();
    for Expected { name, shape, .. } in names::expected(&model, false) {
        let tensor = match name.as_str() {
            // Their states are behind the target's last norm.
            names::TAPS_NORM => target.tensor(names::FINAL_NORM),
            _ => hf::take(&mut stock, &name, &shape, None),
        };
        tensors.insert(name.clone(), tensor.with_context(|| format!("tensor `{name}`"))?);
    }
    if let Some(name) = stock.keys().find(|name| !hf::is_ignorable(name)) {
        bail!("tensor `{name}` is unexpected in {num_heads} Medusa heads of {num_blocks} layers");
    }
    Ok(Some(Checkpoint {
        config: model,
        generation: target.generation().clone(),
        tokenizer: target.tokenizer().clone(),
        sliding_window: None,
        kv_scales: Ok(None),
        tensors,
    }))
}

/// The matrix to the logits of a head, which stands behind its blocks.
fn to_logits(head: usize, num_blocks: usize) -> String {
    format!("{head}.{num_blocks}.weight")
}

/// The head and the block that a tensor is the matrix of.
fn block_of(name: &str) -> Option<(usize, usize)> {
    let canonical = published(name)?;
    let (head, rest) = canonical.split_once('.')?;
    let block = rest.strip_suffix(".linear.weight")?;
    Some((head.parse().ok()?, block.parse().ok()?))
}

/// The published name of a tensor whose name says where it is but for the number of blocks.
fn published(name: &str) -> Option<String> {
    let bare =
        ["medusa_heads.", "medusa_head."].iter().find_map(|prefix| name.strip_prefix(prefix));
    let bare = bare.unwrap_or(name);
    let Some(of_blocks) = bare.strip_prefix("blocks.") else { return Some(bare.to_string()) };
    let (head, part) = of_blocks.split_once(".layers.")?;
    let (block, kind) = part.split_once('.')?;
    Some(format!("{head}.{block}.linear.{kind}"))
}

/// The tensors by their published names.
fn rename(stock: Stock, num_blocks: usize) -> Result<Stock> {
    let mut renamed = Stock::new();
    for (name, stored) in stock {
        let canonical = published(&name).unwrap_or_else(|| name.clone());
        let head =
            canonical.strip_prefix("lm_heads.").and_then(|head| head.strip_suffix(".weight"));
        let canonical = match head.and_then(|head| head.parse().ok()) {
            Some(head) => to_logits(head, num_blocks),
            None => canonical,
        };
        if renamed.insert(canonical.clone(), stored).is_some() {
            bail!("tensor `{canonical}` is there twice");
        }
    }
    Ok(renamed)
}
