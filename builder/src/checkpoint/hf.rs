//! A Hugging Face folder: finds its weights, reads its configuration, and matches the tensors
//! with what the model must have, scales of quantised weights included.

use super::bounded::{self, Object};
use super::encoding::Encoding;
use super::fp8::{self, Quantization};
use super::names::{self, Expected};
use super::safetensors::{self, Stored};
use super::tensor::{RowOrder, Source, Tensor};
use super::{Checkpoint, TokenizerFiles, TokenizerSource, family, hf_config, kv_scales, torch};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a model's weights are called, safetensors first.
pub(super) const WEIGHTS: [&str; 2] = ["model.safetensors", "pytorch_model.bin"];
/// Bytes of an index at most.
const MAX_INDEX: u64 = 64 << 20;

pub(super) type Stock = BTreeMap<String, Stored>;

pub(super) fn open(folder: &Path) -> Result<Checkpoint> {
    let config = Object::open(&folder.join("config.json"))?;
    let modelopt = Object::open_if_there(&folder.join("hf_quant_config.json"))?;
    let quantization = Quantization::read(&config, modelopt.as_ref())?;
    let mut stock = stock(folder, &WEIGHTS)?;
    let model = hf_config::model_config(&config, |name| stock.contains_key(name))?;
    if model.tied_head {
        // A stored copy of a tied head is not what the model computes with.
        stock.remove(names::HEAD);
    }
    let mut tensors = BTreeMap::new();
    for Expected { name, shape, parts } in names::expected(&model, family::row(model.family).fused)
    {
        let context = || format!("tensor `{name}`");
        let tensor =
            take(&mut stock, &name, &shape, quantization.as_ref()).with_context(context)?;
        for (part, rows) in parts {
            tensors.insert(part, tensor.part(rows).with_context(context)?);
        }
    }
    let kv_scales = kv_scales::read(&stock, model.num_layers);
    if let Some(name) = stock.keys().find(|name| !is_ignorable(name)) {
        bail!("tensor `{name}` is unexpected in a {:?} model", model.family);
    }
    let generation = Object::open_if_there(&folder.join("generation_config.json"))?;
    let tokenizer = Object::open_if_there(&folder.join("tokenizer_config.json"))?;
    Ok(Checkpoint {
        generation: hf_config::generation(
            &config,
            generation.as_ref(),
            tokenizer.as_ref(),
            model.vocab_size,
        )?,
        sliding_window: hf_config::sliding_window(&config, model.family)?,
        tokenizer: TokenizerSource::Files(TokenizerFiles::in_folder(folder)),
        kv_scales,
        config: model,
        tensors,
    })
}

/// Takes an expected tensor and its scales out of the stock.
pub(super) fn take(
    stock: &mut Stock,
    name: &str,
    shape: &[usize],
    quantization: Option<&Quantization>,
) -> Result<Tensor> {
    let stored = stock.remove(name).with_context(|| format!("missing, expected {shape:?}"))?;
    ensure!(stored.shape == shape, "its shape is {:?}, expected {shape:?}", stored.shape);
    let mut tensor = tensor(stored)?;
    if matches!(tensor.encoding, Encoding::Fp8 | Encoding::Int8) {
        let scales =
            ["_scale", "_scale_inv"].map(|suffix| stock.remove(&format!("{name}{suffix}")));
        let values = match scales {
            [Some(values), None] | [None, Some(values)] => self::tensor(values)?,
            [None, None] => bail!("it is {} without a weight_scale", tensor.encoding.name()),
            [Some(_), Some(_)] => bail!("it has both a weight_scale and a weight_scale_inv"),
        };
        tensor.scale = Some(fp8::scale_of(quantization, tensor.encoding, shape, values)?);
    }
    Ok(tensor)
}

pub(super) fn tensor(stored: Stored) -> Result<Tensor> {
    let Some(encoding) = Encoding::from_safetensors(&stored.dtype) else {
        bail!("dtype {} is not supported: expected BF16, F16, F32, F8_E4M3 or I8", stored.dtype);
    };
    Ok(Tensor {
        source: Source::File { file: stored.file, offset: stored.offset },
        shape: stored.shape,
        encoding,
        order: RowOrder::Plain,
        scale: None,
    })
}

/// Tensors that models carry along and that are no weights: rotary tables, scales of activations, which are chosen anew, and
/// scales of the KV cache.
pub(super) fn is_ignorable(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    let rotary = name.contains("rotary_emb.");
    let scales = ["input_scale", "output_scale", "k_scale", "v_scale", "q_scale", "kv_scale"];
    rotary && ["inv_freq", "cos_cached", "sin_cached"].contains(&last) || scales.contains(&last)
}

/// Every tensor of the folder's weights, by name. They are in the first of these files that is there, or in those of the index
/// that has `.index.json` behind the name.
pub(super) fn stock(folder: &Path, files: &[&str]) -> Result<Stock> {
    let (shards, places) = weights(folder, files)?;
    let mut stock = Stock::new();
    let paths = shards.iter().map(|shard| shard_path(folder, shard));
    for (shard, path) in shards.iter().zip(paths.collect::<Result<Vec<_>>>()?) {
        let tensors = match is_safetensors(shard) {
            true => safetensors::open(&path)?,
            false => torch::open(&path)?,
        };
        for tensor in tensors {
            let place = places.get(&tensor.name).unwrap_or(shard);
            ensure!(
                place == shard,
                "tensor `{}` is in {shard}, the index says {place}",
                tensor.name
            );
            if let Some(twice) = stock.insert(tensor.name.clone(), tensor) {
                bail!("tensor `{}` is in more than one file", twice.name);
            }
        }
    }
    if let Some((name, shard)) = places.iter().find(|(name, _)| !stock.contains_key(*name)) {
        bail!("tensor `{name}` is not in {shard}, where the index says it is");
    }
    Ok(stock)
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The files that hold the weights, and of each tensor the one that an index names.
fn weights(folder: &Path, files: &[&str]) -> Result<(Vec<String>, BTreeMap<String, String>)> {
    for name in files {
        // An index beside it may be of shards that it has taken the place of.
        if folder.join(name).try_exists()? {
            return Ok((vec![name.to_string()], BTreeMap::new()));
        }
        let index = folder.join(format!("{name}.index.json"));
        if index.try_exists()? {
            let Index { weight_map } = serde_json::from_slice(&bounded::read(&index, MAX_INDEX)?)
                .with_context(|| format!("reading {}", index.display()))?;
            let mut shards: Vec<String> = weight_map.values().cloned().collect();
            shards.sort();
            shards.dedup();
            return Ok((shards, weight_map));
        }
    }
    bail!("there is no {} and no index of one in {}", files.join(", no "), folder.display());
}

/// A shard is a plain name: an index cannot lead out of its folder.
fn shard_path(folder: &Path, shard: &str) -> Result<PathBuf> {
    let plain = Path::new(shard).file_name().is_some_and(|name| name == shard);
    ensure!(
        plain && [".safetensors", ".bin", ".pt"].iter().any(|ending| shard.ends_with(ending)),
        "the index names the file `{shard}`, expected a .safetensors, .bin or .pt file beside it"
    );
    Ok(folder.join(shard))
}

fn is_safetensors(shard: &str) -> bool {
    shard.ends_with(".safetensors")
}
