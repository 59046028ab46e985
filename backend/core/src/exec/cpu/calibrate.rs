//! How large a model's keys and values become, for the scales of a cache in FP8.

use super::{Isa, Model, Pinning, Pool};
use crate::Result;
use crate::batch::{Forward, Segment};
use crate::engine::Engine;
use crate::model::KvPeaks;
use crate::pages::{PAGE_TOKENS, PageId};
use std::sync::Arc;

/// The largest keys and values of these texts, each by itself. The engine is one for CPUs whose cache is in FP32.
pub fn kv_peaks(engine: &Engine, texts: &[Vec<u32>]) -> Result<KvPeaks> {
    let longest = texts.iter().map(Vec::len).max().unwrap_or(0);
    let pages: Vec<PageId> = (0..longest.div_ceil(PAGE_TOKENS) as PageId).collect();
    let pool = Arc::new(Pool::on_machine(None, Pinning::Off));
    let mut model = Model::load(engine, pages.len(), Isa::detect(), pool)?;
    let heads = vec![0.0; engine.manifest().model.num_kv_heads];
    let layers = vec![heads; engine.manifest().model.num_layers];
    let mut peaks = KvPeaks { keys: layers.clone(), values: layers };
    for tokens in texts {
        model.forward(&[Segment {
            tokens,
            first_position: 0,
            pages: &pages,
            prompt_len: 0,
            num_logits: 0,
            tree: &[],
        }])?;
        let layers = peaks.keys.iter_mut().zip(&mut peaks.values).enumerate();
        for (layer, (keys, values)) in layers {
            for (head, (key, value)) in keys.iter_mut().zip(values).enumerate() {
                let (most_key, most_value) = model.kv().peaks(layer, head, &pages, tokens.len());
                (*key, *value) = (key.max(most_key), value.max(most_value));
            }
        }
    }
    Ok(peaks)
}
