//! What a GGUF file means: its metadata as a model config and a tokenizer, its tensors under their
//! canonical names, with the llama family's interleaved q and k rows marked so that they read as in
//! Hugging Face checkpoints.

use super::family::{self, Biases};
use super::gguf::{Gguf, Stored};
use super::gguf_fields::Fields;
use super::gguf_metadata::GgufMetadata;
use super::names::{self, Expected};
use super::tensor::{RowOrder, Source, Tensor};
use super::{Checkpoint, TokenizerFiles, TokenizerSource};
use anyhow::{Context, Result, bail, ensure};
use spec_core::model::decoder::{TensorId, TensorRole as Role};
use spec_core::model::{ModelConfig, RopeScaling};
use spec_core::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::f64::consts::TAU;
use std::path::Path;

/// Kinds of tokens that are spelled as in the checkpoint: normal and control ones.
const PLAIN_KINDS: [i32; 2] = [1, 3];

pub(super) fn open(path: &Path) -> Result<Checkpoint> {
    let gguf = Gguf::open(path)?;
    let fields = Fields::new(&gguf)?;
    let mut stock: BTreeMap<String, Stored> = BTreeMap::new();
    let mut rope_factors = None;
    for tensor in &gguf.tensors {
        match names::from_gguf(&tensor.name, fields.row.fused) {
            Some(name) => drop(stock.insert(name, tensor.clone())),
            None if tensor.name == "rope_freqs.weight" => rope_factors = Some(tensor),
            None => bail!("tensor `{}` is unexpected in a {} model", tensor.name, fields.arch),
        }
    }
    let mut config = model_config(&fields, &stock)?;
    if let Some(stored) = rope_factors {
        ensure!(
            config.rope_scaling.is_none(),
            "there are both {}.rope.scaling and rope_freqs.weight",
            fields.arch
        );
        config.rope_scaling = rope_factor_scaling(&gguf, stored, &config)?;
    }
    let mut tensors = BTreeMap::new();
    for Expected { name, shape, parts } in names::expected(&config, fields.row.fused) {
        let context = || format!("tensor `{name}`");
        let tensor = take(&gguf, &mut stock, &name, &shape, &config).with_context(context)?;
        for (part, rows) in parts {
            tensors.insert(part, tensor.part(rows).with_context(context)?);
        }
    }
    if let Some((name, stored)) = stock.first_key_value() {
        bail!("tensor `{name}` ({}) is unexpected in a {} model", stored.name, fields.arch);
    }

    let metadata = GgufMetadata::read(&fields, config.max_position)?;
    ensure!(
        metadata.tokens.len() <= config.vocab_size,
        "there are {} tokens, the embedding has {} rows",
        metadata.tokens.len(),
        config.vocab_size
    );
    let generation = metadata.generation();
    let beside = TokenizerFiles::in_folder(path.parent().unwrap_or(Path::new("")));
    let tokenizer = match beside.tokenizer.clone() {
        Some(file) => {
            check_beside(&file, &metadata)?;
            TokenizerSource::Files(beside)
        }
        None => TokenizerSource::Gguf(Box::new(metadata)),
    };
    let sliding_window = fields.size("attention.sliding_window")?.filter(|window| *window > 0);
    Ok(Checkpoint { config, generation, tokenizer, sliding_window, kv_scales: Ok(None), tensors })
}

/// Refuses a tokenizer that lies beside the file and is another model's.
fn check_beside(path: &Path, metadata: &GgufMetadata) -> Result<()> {
    let tokenizer = Tokenizer::open(path.parent().unwrap_or(Path::new("")))?;
    for (id, token) in metadata.tokens.iter().enumerate() {
        // Of others the file may spell spaces differently, and padding has a name there alone.
        let is_plain = metadata.token_types.get(id).is_none_or(|kind| PLAIN_KINDS.contains(kind));
        let Some(own) = tokenizer.id_to_token(id as u32).filter(|_| is_plain) else { continue };
        ensure!(
            own == *token,
            "{} is another model's: token {id} is {own:?} there and {token:?} in the GGUF file",
            path.display()
        );
    }
    Ok(())
}

/// Takes an expected tensor out of the stock.
fn take(
    gguf: &Gguf,
    stock: &mut BTreeMap<String, Stored>,
    name: &str,
    shape: &[usize],
    config: &ModelConfig,
) -> Result<Tensor> {
    let stored = stock.remove(name).with_context(|| format!("missing, expected {shape:?}"))?;
    ensure!(
        stored.shape == shape,
        "{} has shape {:?}, expected {shape:?}",
        stored.name,
        stored.shape
    );
    let rotated = matches!(names::role(name), Some(Role::Q | Role::K));
    let order = if rotated && family::row(config.family).interleaved {
        RowOrder::Interleaved { head_dim: config.head_dim }
    } else {
        RowOrder::Plain
    };
    Ok(Tensor {
        source: Source::File { file: gguf.file.clone(), offset: stored.offset },
        shape: stored.shape,
        encoding: stored.encoding,
        order,
        scale: None,
    })
}

fn model_config(fields: &Fields<'_>, stock: &BTreeMap<String, Stored>) -> Result<ModelConfig> {
    let has = |name: String| stock.contains_key(&name);
    let first_bias = |role| names::bias(TensorId { role, layer: Some(0) });
    if let Some(parts) = fields.size_at("split.count")?.filter(|parts| *parts > 1) {
        bail!("split.count is {parts}: merge the parts into one file");
    }
    if let Some(experts) = fields.size("expert_count")?.filter(|experts| *experts > 0) {
        bail!("a mixture of {experts} experts is not supported");
    }
    let embed = stock.get(names::EMBED).context("tensor `token_embd.weight`: missing")?;
    let num_heads = fields.need("attention.head_count")?;
    let hidden_size = fields.need("embedding_length")?;
    let head_dim = fields.size("attention.key_length")?.unwrap_or(hidden_size / num_heads.max(1));
    for key in ["attention.value_length", "rope.dimension_count"] {
        let size = fields.size(key)?.unwrap_or(head_dim);
        ensure!(size == head_dim, "{key} is {size}, expected the head's {head_dim}");
    }
    let config = ModelConfig {
        family: fields.row.family,
        vocab_size: embed.shape[0],
        hidden_size,
        intermediate_size: fields.need("feed_forward_length")?,
        num_layers: fields.need("block_count")?,
        num_heads,
        num_kv_heads: fields.size("attention.head_count_kv")?.unwrap_or(num_heads),
        head_dim,
        rms_norm_eps: fields
            .float("attention.layer_norm_rms_epsilon")?
            .context("attention.layer_norm_rms_epsilon is missing")? as f32,
        rope_theta: fields.float("rope.freq_base")?.unwrap_or(10_000.0),
        rope_scaling: rope_scaling(fields)?,
        max_position: fields.need("context_length")?,
        tied_head: !has(names::HEAD.to_string()),
        qkv_bias: fields.row.biases == Biases::Qkv || has(first_bias(Role::Q)),
        out_bias: has(first_bias(Role::O)),
        mlp_bias: has(first_bias(Role::Gate)),
        qk_norm: fields.row.qk_norm,
        mask_token: None,
        draft_vocab: None,
        draft_head: None,
    };
    config.validate()?;
    Ok(config)
}

fn rope_scaling(fields: &Fields<'_>) -> Result<Option<RopeScaling>> {
    let factor = match fields.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        None => fields.float("rope.scale_linear")?,
    };
    match (fields.text("rope.scaling.type")?, factor) {
        (None | Some("none"), None) | (Some("none"), _) => Ok(None),
        (None | Some("linear"), Some(factor)) if factor == 0.0 || factor == 1.0 => Ok(None),
        (None | Some("linear"), Some(factor)) => Ok(Some(RopeScaling::Linear { factor })),
        (Some("linear"), None) => bail!("rope.scaling.factor is missing"),
        (Some(other), _) => bail!("rope scaling `{other}` is not supported: expected linear"),
    }
}

/// Llama 3.x files hold the divisor of each rotary frequency instead of the parameters behind them:
/// the parameters are those of the published models if they give the same divisors.
fn rope_factor_scaling(
    gguf: &Gguf,
    stored: &Stored,
    config: &ModelConfig,
) -> Result<Option<RopeScaling>> {
    let half = config.head_dim / 2;
    ensure!(
        stored.shape == [half],
        "tensor `rope_freqs.weight` has shape {:?}, expected [{half}]",
        stored.shape
    );
    let mut found = vec![0.0; half];
    let tensor = Tensor {
        source: Source::File { file: gguf.file.clone(), offset: stored.offset },
        shape: stored.shape.clone(),
        encoding: stored.encoding,
        order: RowOrder::Plain,
        scale: None,
    };
    tensor.read(0..half, &mut found).context("tensor `rope_freqs.weight`")?;
    if found.iter().all(|divisor| *divisor == 1.0) {
        return Ok(None);
    }
    for factor in [8.0, 32.0] {
        let divisors = llama3_divisors(config, factor);
        // Files hold them rounded to f32 from an f32 computation.
        if found.iter().zip(divisors).all(|(f, d)| (f64::from(*f) / d - 1.0).abs() < 1e-3) {
            return Ok(Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position: 8192,
            }));
        }
    }
    bail!("tensor `rope_freqs.weight` is none of llama 3.x with factor 8 or 32: not supported")
}

fn llama3_divisors(config: &ModelConfig, factor: f64) -> impl Iterator<Item = f64> {
    let (theta, dim) = (config.rope_theta, config.head_dim as f64);
    (0..config.head_dim / 2).map(move |pair| {
        let wavelength = TAU * theta.powf((2 * pair) as f64 / dim);
        let keep = ((8192.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
        1.0 / (keep + (1.0 - keep) / factor)
    })
}
