//! The room of the key and value cache on a GPU. A page of a layer is `[kv_head][K | V]`: keys are
//! `[position][element]`, values `[element][position]`, without padding.

use crate::Result;
use crate::engine::Manifest;
use crate::exec::cuda::device::pod::bytes_of;
use crate::exec::cuda::device::{Address, Device};
use crate::model::{Dtype, HeadScales, KvScales, ModelConfig};
use crate::pages::PAGE_TOKENS;

/// The cache of all layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cache {
    memory: Address,
    /// Of one layer.
    layer_bytes: usize,
    /// f32 `[layer][2][kv head]`, of an FP8 cache: of the keys, then of the values.
    scales: Address,
    /// Of one layer.
    scale_bytes: usize,
}

/// That of one layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LayerCache {
    /// The pages.
    pub memory: Address,
    /// f32 `[2][kv head]`, of an FP8 cache: of the keys, then of the values.
    pub scales: Address,
}

impl Cache {
    /// A cache that is nowhere.
    pub(super) const NOWHERE: Self = Self { memory: 0, layer_bytes: 0, scales: 0, scale_bytes: 0 };

    /// Allocates `num_pages` pages.
    pub(super) fn alloc(
        manifest: &Manifest,
        num_pages: usize,
        device: &mut dyn Device,
    ) -> Result<Self> {
        let (model, kv) = (&manifest.model, manifest.precision.kv);
        let bytes = num_pages * page_bytes(kv, model);
        let scales = match kv {
            Dtype::Fp8 => upload_scales(model, manifest.kv_scales.as_ref(), device)?,
            _ => 0,
        };
        let scale_bytes = Self::scale_bytes(manifest) / model.num_layers;
        // The last memory of a model, where who measures looks for it.
        let memory = device.alloc(bytes)?;
        Ok(Self { memory, layer_bytes: bytes / model.num_layers, scales, scale_bytes })
    }

    /// Bytes of the scales.
    pub(super) fn scale_bytes(manifest: &Manifest) -> usize {
        let Manifest { model, precision, .. } = manifest;
        let heads = if precision.kv == Dtype::Fp8 { model.num_kv_heads } else { 0 };
        model.num_layers * 2 * heads * size_of::<f32>()
    }

    /// From one layer's pages to those of the next.
    pub(super) fn layer_bytes(&self) -> usize {
        self.layer_bytes
    }

    pub(super) fn layer(&self, idx: usize) -> LayerCache {
        LayerCache {
            memory: self.memory + (idx * self.layer_bytes) as Address,
            scales: self.scales + (idx * self.scale_bytes) as Address,
        }
    }
}

fn upload_scales(
    model: &ModelConfig,
    scales: Option<&KvScales>,
    device: &mut dyn Device,
) -> Result<Address> {
    let heads: Vec<HeadScales> = match scales {
        Some(scales) => scales.heads().collect(),
        None => vec![HeadScales::ONE; model.num_layers * model.num_kv_heads],
    };
    let layers = heads.chunks(model.num_kv_heads);
    let values: Vec<f32> = layers
        .flat_map(|heads| {
            let keys = heads.iter().map(|head| head.key);
            keys.chain(heads.iter().map(|head| head.value))
        })
        .collect();
    let address = device.alloc(size_of_val(&values[..]))?;
    device.write(address, bytes_of(&values))?;
    Ok(address)
}

/// Bytes of a page over all layers.
pub(crate) const fn page_bytes(kv: Dtype, model: &ModelConfig) -> usize {
    model.num_layers * model.num_kv_heads * 2 * PAGE_TOKENS * model.head_dim * kv.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::testing::small_llama;

    #[test]
    fn a_page_holds_16_keys_and_values_of_every_head_and_layer() {
        // 3 layers, 2 key heads of 64.
        assert_eq!(page_bytes(Dtype::Fp16, &small_llama()), 3 * 2 * (16 * 64 + 64 * 16) * 2);
        assert_eq!(page_bytes(Dtype::Fp8, &small_llama()), 3 * 2 * (16 * 64 + 64 * 16));
    }
}
