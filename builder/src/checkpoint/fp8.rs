//! Quantised Hugging Face checkpoints: which flavours are read, and the form of a weight's scales.
//! FP8 and INT8 weights with their scales beside them are; everything packed is refused by name.

use super::bounded::Object;
use super::encoding::Encoding;
use super::tensor::{Scale, ScaleForm, Tensor};
use anyhow::{Result, bail, ensure};

/// Largest side of a scale's tile.
const MAX_TILE: usize = 1 << 16;

/// What a checkpoint says about its quantised weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Quantization {
    /// Number format of the quantised weights.
    encoding: Encoding,
    /// Rows and columns that share a scale, where scales are tiled. A side of `None` is the whole.
    tile: Option<(usize, usize)>,
}

const PLAIN_FP8: Quantization = Quantization { encoding: Encoding::Fp8, tile: None };

impl Quantization {
    /// Reads `quantization_config` of config.json, or else `hf_quant_config.json`.
    pub(super) fn read(config: &Object, modelopt: Option<&Object>) -> Result<Option<Self>> {
        for key in ["quantization_config", "compression_config"] {
            if let Some(quantization) = config.object(key)?.filter(Object::has_fields) {
                let method = quantization.text("quant_method")?.unwrap_or("compressed-tensors");
                return Self::of_method(method, &quantization);
            }
        }
        match modelopt {
            Some(file) => Self::modelopt(file),
            None => Ok(None),
        }
    }

    fn of_method(method: &str, config: &Object) -> Result<Option<Self>> {
        match method {
            "fp8" | "fbgemm_fp8" => Self::hf_native(config).map(Some),
            "compressed-tensors" => Self::compressed_tensors(config),
            "modelopt" => Self::modelopt(config),
            other => bail!(
                "quantisation `{other}` is not supported: expected fp8, compressed-tensors, \
                 modelopt or a checkpoint in 16 bits"
            ),
        }
    }

    fn hf_native(config: &Object) -> Result<Self> {
        let format = config.text("fmt")?.or(config.text("weight_format")?).unwrap_or("e4m3");
        ensure!(
            ["e4m3", "float8_e4m3", "float8_e4m3fn"].contains(&format),
            "{}: format `{format}` is not supported: expected e4m3",
            config.place()
        );
        Ok(Self { tile: tile(config, "weight_block_size")?, ..PLAIN_FP8 })
    }

    fn compressed_tensors(config: &Object) -> Result<Option<Self>> {
        let format = config.text("format")?.unwrap_or("dense");
        for extra in ["sparsity_config", "transform_config"] {
            let Some(extra_config) = config.object(extra)?.filter(Object::has_fields) else {
                continue;
            };
            let dense = extra_config.text("format")? == Some("dense");
            ensure!(dense, "compressed-tensors with `{extra}` is not supported");
        }
        match format {
            "dense" => return Ok(None),
            "float-quantized" | "int-quantized" | "naive-quantized" => {}
            other => bail!(
                "compressed-tensors format `{other}` is not supported: expected float-quantized \
                 or int-quantized"
            ),
        }
        let groups = config.need("config_groups", config.object("config_groups")?)?;
        let mut found: Option<Self> = None;
        for group in groups.objects()? {
            let Some(weights) = group.object("weights")? else { continue };
            let this = Self::compressed_group(&weights)?;
            ensure!(
                found.is_none_or(|found| found == this),
                "{}: its groups differ, which is not supported",
                groups.place()
            );
            found = Some(this);
        }
        Ok(found)
    }

    fn compressed_group(weights: &Object) -> Result<Self> {
        let bits = weights.need_usize("num_bits")?;
        let kind = weights.text("type")?.unwrap_or("int");
        let encoding = match (bits, kind) {
            (8, "float") => Encoding::Fp8,
            (8, "int") => Encoding::Int8,
            _ => bail!("{}: {bits}-bit {kind} is not supported: expected 8 bits", weights.place()),
        };
        ensure!(
            weights.bool("symmetric")? != Some(false),
            "{}: asymmetric weights are not supported",
            weights.place()
        );
        let tile = match weights.text("strategy")?.unwrap_or("tensor") {
            "tensor" | "channel" => None,
            "block" => tile(weights, "block_structure")?.or(Some((128, 128))),
            "group" => Some((1, weights.need_usize("group_size")?)),
            other => bail!("{}: strategy `{other}` is not supported", weights.place()),
        };
        ensure!(
            tile.is_none_or(|(_, cols)| (1..=MAX_TILE).contains(&cols)),
            "{}: group_size is out of range",
            weights.place()
        );
        Ok(Self { encoding, tile })
    }

    fn modelopt(file: &Object) -> Result<Option<Self>> {
        let nested = file.object("quantization")?;
        match nested.as_ref().unwrap_or(file).text("quant_algo")? {
            None => Ok(None),
            Some("FP8" | "FP8_PER_CHANNEL_PER_TOKEN") => Ok(Some(PLAIN_FP8)),
            Some(other) => bail!("modelopt `{other}` is not supported: expected FP8"),
        }
    }
}

/// A list of two sizes, if it is there.
fn tile(config: &Object, key: &str) -> Result<Option<(usize, usize)>> {
    let Some(sizes) = config.list(key)? else { return Ok(None) };
    let side = |value: &serde_json::Value| {
        value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=MAX_TILE).contains(n))
    };
    match sizes.iter().map(side).collect::<Option<Vec<_>>>().as_deref() {
        Some([rows, cols]) => Ok(Some((*rows, *cols))),
        _ => bail!("{}: `{key}` is {sizes:?}, expected two sizes", config.place()),
    }
}

/// The scale of a quantised matrix of `shape`, its form told by the shape of the scales.
pub(super) fn scale_of(
    quantization: Option<&Quantization>,
    encoding: Encoding,
    shape: &[usize],
    values: Tensor,
) -> Result<Scale> {
    let (&[rows, cols], Some(quantization)) = (shape, quantization) else {
        bail!("it is {} of shape {shape:?}, but config.json declares no such", encoding.name());
    };
    ensure!(
        quantization.encoding == encoding,
        "it is {}, but config.json declares {}",
        encoding.name(),
        quantization.encoding.name()
    );
    ensure!(
        matches!(values.encoding, Encoding::F32 | Encoding::F16 | Encoding::Bf16),
        "its scales are {}, expected F32, F16 or BF16",
        values.encoding.name()
    );
    let tiles = quantization.tile.map(|(r, c)| [rows.div_ceil(r), cols.div_ceil(c)]);
    let scale_shape = values.shape.as_slice();
    let form = if scale_shape.iter().all(|size| *size == 1) {
        ScaleForm::Tensor
    } else if scale_shape == [rows] || scale_shape == [rows, 1] {
        ScaleForm::Channel
    } else if let (Some((rows, cols)), Some(tiles)) = (quantization.tile, tiles)
        && scale_shape == tiles
    {
        ScaleForm::Block { rows, cols }
    } else {
        let tiled = tiles.map(|tiles| format!(" or {tiles:?}")).unwrap_or_default();
        bail!("its scales have shape {scale_shape:?}, expected [1], [{rows}, 1]{tiled}");
    };
    Ok(Scale { form, values: Box::new(values) })
}
