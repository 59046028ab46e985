//! `spec-build export`: a checkpoint, usually a GGUF file, as a Hugging Face folder in bf16.
//! Rows are decoded and rounded (to nearest even) a few MiB at a time on all cores. The folder
//! appears whole or not at all: it is written under another name beside its place and renamed.

use crate::checkpoint::family::{self, Biases, Window};
use crate::checkpoint::names::{self, Expected};
use crate::checkpoint::{Checkpoint, TokenizerSource};
use anyhow::{Context, Result, bail};
use half::bf16;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use spec_core::model::{ModelConfig, RopeScaling};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Values that are converted before they are written; a row of more is converted alone.
const BATCH_VALUES: usize = 4 << 20;

/// Writes the checkpoint at `from` to the folder `out_dir`, which must not exist or be empty.
/// `write_tokenizer` puts the tokenizer's files into the folder that it is given.
pub fn export(
    from: &Path,
    out_dir: &Path,
    write_tokenizer: impl FnOnce(&TokenizerSource, &Path) -> Result<()>,
) -> Result<()> {
    let checkpoint = Checkpoint::open(from)?;
    if fs::read_dir(out_dir).is_ok_and(|mut entries| entries.next().is_some()) {
        bail!("{} is not empty: remove it or name another folder", out_dir.display());
    }
    let partial = partial_name(out_dir)?;
    if partial.try_exists()? {
        fs::remove_dir_all(&partial)
            .with_context(|| format!("removing the unfinished {}", partial.display()))?;
    }
    fs::create_dir_all(&partial).with_context(|| format!("creating {}", partial.display()))?;
    let done = write_folder(&checkpoint, &partial, write_tokenizer).and_then(|()| {
        fs::rename(&partial, out_dir)
            .with_context(|| format!("renaming {} to {}", partial.display(), out_dir.display()))
    });
    if done.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_dir_all(&partial);
    }
    done
}

/// `a/b` becomes `a/b.partial`.
fn partial_name(out_dir: &Path) -> Result<PathBuf> {
    let name = out_dir.file_name();
    let mut name: OsString =
        name.with_context(|| format!("{} is no folder name", out_dir.display()))?.into();
    name.push(".partial");
    Ok(out_dir.with_file_name(name))
}

fn write_folder(
    checkpoint: &Checkpoint,
    folder: &Path,
    write_tokenizer: impl FnOnce(&TokenizerSource, &Path) -> Result<()>,
) -> Result<()> {
    write_json(&folder.join("config.json"), &config_json(checkpoint))?;
    write_json(&folder.join("generation_config.json"), &generation_json(checkpoint))?;
    let weights = folder.join("model.safetensors");
    write_weights(checkpoint, &weights)
        .with_context(|| format!("writing {}", weights.display()))?;
    write_tokenizer(&checkpoint.tokenizer, folder).context("writing the tokenizer")?;
    File::open(folder)?.sync_all()?;
    Ok(())
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    let write = || -> Result<()> {
        let mut file = File::create(path)?;
        file.write_all(serde_json::to_string_pretty(value)?.as_bytes())?;
        Ok(file.sync_all()?)
    };
    write().with_context(|| format!("writing {}", path.display()))
}

/// Tensors as the family's checkpoints keep them, in the order of their names, the header padded with spaces to a multiple
/// of 8.
fn write_weights(checkpoint: &Checkpoint, path: &Path) -> Result<()> {
    let config = &checkpoint.config;
    let mut tensors = names::expected(config, family::row(config.family).fused);
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    let mut offset = 0;
    for Expected { name, shape, .. } in &tensors {
        let bytes = 2 * shape.iter().product::<usize>();
        let place = json!([offset, offset + bytes]);
        let entry = json!({"dtype": "BF16", "shape": shape, "data_offsets": place});
        header.insert(name.clone(), entry);
        offset += bytes;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');

    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    for (part, _) in tensors.iter().flat_map(|tensor| &tensor.parts) {
        write_tensor(checkpoint, part, &mut file)?;
    }
    Ok(file.sync_all()?)
}

fn write_tensor(checkpoint: &Checkpoint, name: &str, file: &mut File) -> Result<()> {
    let tensor = checkpoint.tensor(name)?;
    let (num_rows, row_len) = (tensor.num_rows(), tensor.row_len());
    let rows_at_once = (BATCH_VALUES / row_len).max(1);
    let mut bytes = Vec::new();
    for start in (0..num_rows).step_by(rows_at_once) {
        let rows = rows_at_once.min(num_rows - start);
        bytes.resize(2 * rows * row_len, 0);
        let rows_each = rows.div_ceil(4 * rayon::current_num_threads());
        bytes.par_chunks_mut(2 * rows_each * row_len).enumerate().try_for_each(|(idx, out)| {
            let first = start + idx * rows_each;
            convert(checkpoint, name, first, out)
        })?;
        file.write_all(&bytes)?;
    }
    Ok(())
}

/// Fills `out` with the bf16 values of the rows from `first` on.
fn convert(checkpoint: &Checkpoint, name: &str, first: usize, out: &mut [u8]) -> Result<()> {
    let mut values = vec![0.0; out.len() / 2];
    let rows = values.len() / checkpoint.tensor(name)?.row_len();
    checkpoint.read_rows(name, first..first + rows, &mut values)?;
    checkpoint.check_finite(name, first, &values)?;
    for (value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        *out = bf16::from_f32(*value).to_le_bytes();
    }
    Ok(())
}

fn config_json(checkpoint: &Checkpoint) -> Value {
    let config = &checkpoint.config;
    let row = family::row(config.family);
    let mut json = json!({
        "architectures": [row.class],
        "model_type": row.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "initializer_range": 0.02,
        "rms_norm_eps": shortest(config.rms_norm_eps),
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling_json(config),
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied_head,
        "use_cache": true,
        "bos_token_id": checkpoint.generation.bos_token,
        "eos_token_id": end_tokens_json(checkpoint),
        "torch_dtype": "bfloat16",
    });
    if matches!(row.biases, Biases::Attention | Biases::AttentionAndMlp) {
        json["attention_bias"] = json!(config.qkv_bias);
    }
    if row.biases == Biases::AttentionAndMlp {
        json["mlp_bias"] = json!(config.mlp_bias);
    }
    let window = checkpoint.sliding_window;
    if row.window != Window::Never {
        json["sliding_window"] = json!(window);
    }
    if row.window == Window::IfUsed {
        json["use_sliding_window"] = json!(window.is_some());
    }
    json
}

fn rope_scaling_json(config: &ModelConfig) -> Value {
    match &config.rope_scaling {
        None => Value::Null,
        Some(RopeScaling::Linear { factor }) => json!({"rope_type": "linear", "factor": factor}),
        Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        }) => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position,
        }),
    }
}

fn generation_json(checkpoint: &Checkpoint) -> Value {
    json!({
        "bos_token_id": checkpoint.generation.bos_token,
        "eos_token_id": end_tokens_json(checkpoint),
        "do_sample": false,
    })
}

/// One token as a number, several as a list, none as null.
fn end_tokens_json(checkpoint: &Checkpoint) -> Value {
    match checkpoint.generation.end_tokens.as_slice() {
        [] => Value::Null,
        [one] => json!(one),
        several => json!(several),
    }
}

/// The decimal that a single-precision number was written as: 1e-5, not 0.000009999999747.
fn shortest(value: f32) -> f64 {
    // Rust prints the shortest decimal that reads back as the same number.
    value.to_string().parse().unwrap_or(f64::from(value))
}
