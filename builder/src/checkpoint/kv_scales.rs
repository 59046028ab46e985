//! The scales of an FP8 cache that a checkpoint brings: of each layer what stored keys, and what stored values, are
//! multiplied by. Compressed-tensors and ModelOpt name them after projections, older files after the attention.

use super::hf::{Stock, tensor};
use super::safetensors::Stored;
use anyhow::{Context, Result, bail, ensure};

/// Names behind that of the attention, of the keys' scale and of the values'; the last is that of both.
const NAMES: [(&str, &str); 4] = [
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("kv_scale", "kv_scale"),
];

/// Those of keys and values of each layer. None where no layer has any.
pub(super) fn read(stock: &Stock, num_layers: usize) -> Result<Option<Vec<(f32, f32)>>> {
    let layers: Vec<_> =
        (0..num_layers).map(|layer| of_layer(stock, layer)).collect::<Result<_>>()?;
    match layers.iter().position(Option::is_none) {
        None => Ok(layers.into_iter().collect()),
        Some(_) if layers.iter().all(Option::is_none) => Ok(None),
        Some(lacking) => {
            let has = layers.iter().position(Option::is_some).unwrap_or(0);
            bail!("layer {lacking} has no scales of keys and values, layer {has} has some")
        }
    }
}

fn of_layer(stock: &Stock, layer: usize) -> Result<Option<(f32, f32)>> {
    for (key, value) in NAMES {
        let [key, value] =
            [key, value].map(|name| format!("model.layers.{layer}.self_attn.{name}"));
        match (stock.get(&key), stock.get(&value)) {
            (None, None) => {}
            (Some(of_keys), Some(of_values)) => {
                return Ok(Some((scale(&key, of_keys)?, scale(&value, of_values)?)));
            }
            (Some(_), None) => bail!("tensor `{key}` is there without `{value}`"),
            (None, Some(_)) => bail!("tensor `{value}` is there without `{key}`"),
        }
    }
    Ok(None)
}

fn scale(name: &str, stored: &Stored) -> Result<f32> {
    let read = || -> Result<f32> {
        let size: usize = stored.shape.iter().product();
        ensure!(size == 1, "its shape is {:?}, expected one number", stored.shape);
        let mut value = [0.0];
        tensor(stored.clone())?.read(0..1, &mut value)?;
        ensure!(value[0].is_finite() && value[0] > 0.0, "it is {}, expected more than 0", value[0]);
        Ok(value[0])
    };
    read().with_context(|| format!("tensor `{name}`"))
}
