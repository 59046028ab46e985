//! What `config.json` and `generation_config.json` of a Hugging Face folder mean.
//! Both the older spelling (`rope_theta`, `rope_scaling`) and that of transformers 5
//! (`rope_parameters`) are read. What the executors cannot do is refused by name.

use super::bounded::Object;
use super::family::{self, Biases, FAMILIES, FamilyRow, Window};
use super::{Generation, names};
use anyhow::{Result, bail, ensure};
use spec_core::model::{Family, ModelConfig, RopeScaling};

/// The shape of the model. `has` tells whether a tensor is there: it settles what files leave out.
pub(super) fn model_config(config: &Object, has: impl Fn(&str) -> bool) -> Result<ModelConfig> {
    let row = family_row(config)?;
    let activation = config.text("hidden_act")?.unwrap_or("silu");
    ensure!(
        matches!(activation, "silu" | "swish"),
        "{}: hidden_act `{activation}` is not supported: expected silu",
        config.place()
    );
    let num_heads = config.need_usize("num_attention_heads")?;
    let hidden_size = config.need_usize("hidden_size")?;
    let head_dim = match config.usize("head_dim")? {
        Some(head_dim) => head_dim,
        None => row.default_head_dim.unwrap_or(hidden_size / num_heads.max(1)),
    };
    let says = |key| Ok::<_, anyhow::Error>(config.bool(key)?.unwrap_or(false));
    let (qkv_bias, out_bias, mlp_bias) = match row.biases {
        Biases::None => (false, false, false),
        Biases::Qkv => (true, false, false),
        Biases::Attention => (says("attention_bias")?, says("attention_bias")?, false),
        Biases::AttentionAndMlp => {
            (says("attention_bias")?, says("attention_bias")?, says("mlp_bias")?)
        }
    };
    let (rope_theta, rope_scaling) = rope(config)?;
    let model = ModelConfig {
        family: row.family,
        vocab_size: config.need_usize("vocab_size")?,
        hidden_size,
        intermediate_size: config.need_usize("intermediate_size")?,
        num_layers: config.need_usize("num_hidden_layers")?,
        num_heads,
        num_kv_heads: config.usize("num_key_value_heads")?.unwrap_or(num_heads),
        head_dim,
        rms_norm_eps: config.f64("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        rope_theta,
        rope_scaling,
        max_position: config.need_usize("max_position_embeddings")?,
        tied_head: config.bool("tie_word_embeddings")?.unwrap_or(!has(names::HEAD)),
        qkv_bias,
        out_bias,
        mlp_bias,
        qk_norm: row.qk_norm,
        mask_token: super::eagle::mask_token(config, &["pard_token", "ptd_token_id"])?,
        draft_vocab: None,
        draft_head: None,
    };
    model.validate()?;
    Ok(model)
}

fn family_row(config: &Object) -> Result<&'static FamilyRow> {
    let known = || FAMILIES.map(|row| row.model_type).join(", ");
    let model_type = config.need("model_type", config.text("model_type")?)?;
    let Some(row) = FAMILIES.iter().find(|row| row.model_type == model_type) else {
        bail!("model type `{model_type}` is not supported: expected one of {}", known());
    };
    for class in config.list("architectures")?.into_iter().flatten() {
        let named = class.as_str().unwrap_or_default();
        let fits = named.eq_ignore_ascii_case(row.class);
        ensure!(fits, "architecture {class} is not supported: expected {}", row.class);
    }
    Ok(row)
}

/// Base and stretch of the rotary frequencies.
fn rope(config: &Object) -> Result<(f64, Option<RopeScaling>)> {
    let scaling = match config.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => config.object("rope_scaling")?,
    };
    let mut theta = config.f64("rope_theta")?;
    for place in [Some(config), scaling.as_ref()].into_iter().flatten() {
        let share = place.f64("partial_rotary_factor")?.unwrap_or(1.0);
        ensure!(share == 1.0, "partial_rotary_factor {share} is not supported");
    }
    let Some(scaling) = scaling else { return Ok((theta.unwrap_or(10_000.0), None)) };
    theta = scaling.f64("rope_theta")?.or(theta);
    let kind = scaling.text("rope_type")?.or(scaling.text("type")?).unwrap_or("default");
    let need = |key| scaling.need(key, scaling.f64(key)?);
    let stretch = match kind {
        "default" => None,
        "linear" => Some(RopeScaling::Linear { factor: need("factor")? }),
        "llama3" => {
            let key = "original_max_position_embeddings";
            let original = scaling.usize(key)?.or(config.usize(key)?);
            Some(RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_position: scaling.need(key, original)?,
            })
        }
        other => bail!("rope scaling `{other}` is not supported: expected linear or llama3"),
    };
    Ok((theta.unwrap_or(10_000.0), stretch))
}

/// Positions that a token sees at most, where the model limits them.
pub(super) fn sliding_window(config: &Object, family: Family) -> Result<Option<usize>> {
    let uses_it = match family::row(family).window {
        Window::Never => false,
        Window::IfSized => true,
        Window::IfUsed => config.bool("use_sliding_window")?.unwrap_or(false),
    };
    if uses_it { config.usize("sliding_window") } else { Ok(None) }
}

/// Which tokens begin and end a text. `generation_config.json` goes before `config.json`.
pub(super) fn generation(
    config: &Object,
    generation: Option<&Object>,
    tokenizer: Option<&Object>,
    vocab_size: usize,
) -> Result<Generation> {
    let ids = |key| -> Result<Vec<u32>> {
        let own = generation.map(|file| file.token_ids(key)).transpose()?.unwrap_or_default();
        let ids = if own.is_empty() { config.token_ids(key)? } else { own };
        let unknown = ids.iter().find(|id| **id as usize >= vocab_size);
        match unknown {
            Some(id) => bail!("{key} is {id}, the vocabulary has {vocab_size} tokens"),
            None => Ok(ids),
        }
    };
    let add_bos = tokenizer.map(|file| file.bool("add_bos_token")).transpose()?.flatten();
    Ok(Generation {
        bos_token: ids("bos_token_id")?.first().copied(),
        add_bos,
        end_tokens: ids("eos_token_id")?,
    })
}
