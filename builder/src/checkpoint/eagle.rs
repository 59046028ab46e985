//! EAGLE heads as their authors and trainers publish them: the original repositories' layout (`midlayer.`, a flat
//! config.json), that of SpecForge, ModelOpt and AngelSlim, and that of speculators (`layers.0.`, a
//! `transformer_layer_config`). What a head shares with its target is left to that, or read from it.

use super::bounded::Object;
use super::hf::{self, Stock};
use super::names::{self, Expected};
use super::safetensors::Stored;
use super::target::Target;
use super::tensor::{Source, Tensor};
use super::{Checkpoint, family, hf_config};
use anyhow::{Context, Result, bail, ensure};
use spec_core::model::{DraftHead, EagleConfig, EagleKind, ModelConfig, TapNorms};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// The tensor that only a head has.
const FC: &str = "fc.weight";

/// Opens a folder as a head of `target`, if it is one. `shares` is whether it may leave to the target what both have.
pub(super) fn open(folder: &Path, target: &dyn Target, shares: bool) -> Result<Option<Checkpoint>> {
    let config = Object::open(&folder.join("config.json"))?;
    let mut stock = rename(hf::stock(folder, &hf::WEIGHTS)?)?;
    if !stock.contains_key(FC) {
        return Ok(None);
    }
    let layer = config.object("transformer_layer_config")?.unwrap_or_else(|| config.clone());
    let mut model = hf_config::model_config(&of_layers(&layer, &stock)?, |_| true)?;
    let theirs = target.config();
    let eagle = eagle_config(&config, &layer, &stock, theirs, model.vocab_size)?;
    // Positions count from each other: a head is as long as its target, whatever it was trained with.
    model.max_position = theirs.max_position;
    model.tied_head = false;
    model.mask_token = None;
    ensure!(
        model.vocab_size == theirs.vocab_size,
        "it is a head for a model of {} tokens, the target has {}",
        model.vocab_size,
        theirs.vocab_size
    );
    let mut tensors = BTreeMap::new();
    let mut share = |name: &str, stock: &mut Stock| -> Result<bool> {
        let own = stock.get(name).map(|stored| hf::tensor(stored.clone())).transpose()?;
        // On another device it is the head's in any case.
        let is_own = match own {
            Some(own) => !shares || !target.has_same(name, &own)?,
            None => false,
        };
        if !is_own {
            stock.remove(name);
            ensure!(
                theirs.hidden_size == model.hidden_size,
                "tensor `{name}`: missing, and that of the target has rows of {}, expected {}",
                theirs.hidden_size,
                model.hidden_size
            );
        }
        if !is_own && !shares {
            tensors.insert(name.to_string(), target.tensor(name)?);
        }
        Ok(is_own || !shares)
    };
    let own_embed = share(names::EMBED, &mut stock).context("token vectors")?;
    let own_head = match eagle.draft_vocab == model.vocab_size {
        true => share(names::HEAD, &mut stock).context("head")?,
        false => true,
    };
    if eagle.kind == EagleKind::Eagle1 {
        // What it calls the target's last hidden state is behind the norm.
        tensors.insert(names::TAPS_NORM.into(), target.tensor(names::FINAL_NORM)?);
        let (own, theirs) = (model.rms_norm_eps, theirs.rms_norm_eps);
        ensure!(own == theirs, "its rms_norm_eps is {own}, that of the target {theirs}");
    }
    if let Some(map) = stock.remove(names::VOCAB_MAP) {
        let map = vocab_map(&map, eagle.draft_vocab, model.vocab_size).context("tensor `d2t`")?;
        tensors.insert(names::VOCAB_MAP.into(), map);
    }
    if let Some(mask) = stock.get_mut(names::MASK_HIDDEN) {
        // However many dimensions of one it has.
        mask.shape.retain(|&len| len > 1);
    }
    let eagle = EagleConfig { own_embed, own_head, ..eagle };
    model.draft_head = Some(DraftHead::Eagle(eagle));
    model.validate()?;
    for Expected { name, shape, .. } in names::expected(&model, false) {
        if let Entry::Vacant(missing) = tensors.entry(name) {
            let name = missing.key();
            let tensor = hf::take(&mut stock, name, &shape, None);
            let tensor = tensor.with_context(|| format!("tensor `{name}`"))?;
            missing.insert(tensor);
        }
    }
    let is_ignorable = |name: &str| name == "t2d" || hf::is_ignorable(name);
    if let Some(name) = stock.keys().find(|name| !is_ignorable(name)) {
        bail!("tensor `{name}` is unexpected in an EAGLE head");
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

/// The tensors of a head by canonical names, whatever layout they come in.
fn rename(stock: Stock) -> Result<Stock> {
    let mut renamed = Stock::new();
    for (name, stored) in stock {
        let bare = name.strip_prefix("model.").unwrap_or(&name);
        let canonical = match bare {
            "embed_tokens.weight" => names::EMBED.to_string(),
            "norm.weight" => names::FINAL_NORM.to_string(),
            _ => match (bare.strip_prefix("midlayer."), bare.starts_with("layers.")) {
                (Some(part), _) => format!("model.layers.0.{part}"),
                (None, true) => format!("model.{bare}"),
                (None, false) => bare.to_string(),
            },
        };
        if renamed.insert(canonical.clone(), stored).is_some() {
            bail!("tensor `{canonical}` is there twice");
        }
    }
    Ok(renamed)
}

/// What says how the layers are: a family's configuration, without the name that the whole goes by.
fn of_layers(layer: &Object, stock: &Stock) -> Result<Object> {
    let has_norms = stock.contains_key("model.layers.0.self_attn.q_norm.weight");
    let own = layer.text("model_type")?.filter(|own| family::is_known(own));
    let family = own.unwrap_or(if has_norms { "qwen3" } else { "llama" });
    let family = family.to_string();
    Ok(layer.without("architectures").with("model_type", family.into()))
}

fn eagle_config(
    config: &Object,
    layer: &Object,
    stock: &Stock,
    target: &ModelConfig,
    vocab_size: usize,
) -> Result<EagleConfig> {
    let is_third = stock.contains_key("model.layers.0.hidden_norm.weight");
    let says = |key| Ok::<_, anyhow::Error>(config.bool(key)?.unwrap_or(false));
    const IDS: &str = "eagle_aux_hidden_state_layer_ids";
    let own = config.object("eagle_config")?;
    let ids = config.list(IDS)?;
    let is_outer = ids.is_some();
    let ids = match &own {
        Some(own) if !is_outer => own.list(IDS)?,
        _ => ids,
    };
    let num_layers = target.num_layers;
    let taps = match (ids, is_third) {
        (_, false) => vec![num_layers],
        (None, true) => vec![2, num_layers / 2, num_layers.saturating_sub(3)],
        (Some(ids), true) => {
            let id = |value: &serde_json::Value| value.as_u64().map(|id| id as usize);
            let ids: Option<Vec<usize>> = ids.iter().map(id).collect();
            let mut ids = ids.context("eagle_aux_hidden_state_layer_ids are not all numbers")?;
            // `fc` takes them in the order of the layers, whatever that of the list.
            ids.sort_unstable();
            ids.dedup();
            // Who writes them beside the layer's sizes counts the layers in front of a state. In `eagle_config` some count as
            // well, and others name the layer, from 0 on, whose output it is: those begin with 1, where the former have 2.
            if !is_outer && ids.first() == Some(&1) {
                ids.iter_mut().for_each(|id| *id += 1);
            }
            ids
        }
    };
    if let Some(tap) = taps.iter().find(|&&tap| tap > num_layers) {
        bail!("it reads the hidden states behind layer {tap}, the target has {num_layers} layers");
    }
    let tap_norms = match (is_third, says("norm_before_fc")?, says("fc_norm")?) {
        (false, ..) => TapNorms::Together,
        (true, false, false) => TapNorms::None,
        (true, true, false) => TapNorms::Together,
        (true, false, true) => TapNorms::Each,
        (true, true, true) => bail!("norm_before_fc and fc_norm exclude each other"),
    };
    let width = config.usize("target_hidden_size")?.unwrap_or(target.hidden_size);
    ensure!(
        width == target.hidden_size,
        "it is a head for a model of width {width}, the target is {} wide",
        target.hidden_size
    );
    let draft_vocab = config.usize("draft_vocab_size")?.unwrap_or(vocab_size);
    Ok(EagleConfig {
        kind: if is_third { EagleKind::Eagle3 } else { EagleKind::Eagle1 },
        taps,
        target_hidden: width,
        tap_norms,
        fc_bias: stock.contains_key("fc.bias"),
        norm_before_residual: says("norm_before_residual")?,
        norm_output: says("norm_output")?,
        window: window(layer)?,
        own_embed: true,
        own_head: true,
        draft_vocab,
        maps_vocab: stock.contains_key(names::VOCAB_MAP),
        mask_token: match stock.contains_key(names::MASK_HIDDEN) {
            true => {
                let token = mask_token(config, &["mask_token_id", "ptd_token_id"])?;
                Some(token.context("it has `mask_hidden`, and no mask_token_id")?)
            }
            false => None,
        },
    })
}

/// The token of rows behind the first draft of a head or a model that drafts in one pass, by the first of these keys.
pub(super) fn mask_token(config: &Object, keys: &[&str]) -> Result<Option<u32>> {
    for key in keys {
        if let Some(token) = config.usize(key)? {
            return Ok(Some(u32::try_from(token).with_context(|| format!("{key} is {token}"))?));
        }
    }
    Ok(None)
}

/// Positions that a row sees at most, which is the same in all layers.
fn window(layer: &Object) -> Result<Option<usize>> {
    let Some(types) = layer.list("layer_types")? else { return Ok(None) };
    let slides = |kind: &serde_json::Value| kind == "sliding_attention";
    match types.iter().filter(|kind| slides(kind)).count() {
        0 => Ok(None),
        count if count == types.len() => {
            Ok(Some(layer.need("sliding_window", layer.usize("sliding_window")?)?))
        }
        count => {
            bail!("{count} of {} layers have a sliding window, expected all or none", types.len())
        }
    }
}

/// The target's token of each row of the head, as numbers, from how far it is away.
fn vocab_map(stored: &Stored, draft_vocab: usize, vocab_size: usize) -> Result<Tensor> {
    let bytes = match stored.dtype.as_str() {
        "I64" => 8,
        "I32" => 4,
        other => bail!("dtype {other} is not supported: expected I64 or I32"),
    };
    ensure!(
        stored.shape == [draft_vocab],
        "its shape is {:?}, expected [{draft_vocab}]",
        stored.shape
    );
    let mut read = vec![0; draft_vocab * bytes];
    stored.file.read_exact_at(&mut read, stored.offset).context("reading it")?;
    let mut seen = vec![false; vocab_size];
    let mut map = Vec::with_capacity(draft_vocab);
    for (row, offset) in read.chunks_exact(bytes).enumerate() {
        let offset = match offset.try_into().map(i64::from_le_bytes) {
            Ok(offset) => offset,
            Err(_) => i64::from(i32::from_le_bytes(offset.try_into()?)),
        };
        let token = offset.checked_add(row as i64).and_then(|token| usize::try_from(token).ok());
        let Some(token) = token.filter(|&token| token < vocab_size) else {
            bail!("row {row} has the offset {offset}, which leads out of {vocab_size} tokens");
        };
        ensure!(!std::mem::replace(&mut seen[token], true), "token {token} has two rows");
        map.push(token as f32);
    }
    Ok(Tensor::of_values(Source::Values(Arc::from(map)), vec![draft_vocab]))
}
