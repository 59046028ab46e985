//! What a runtime holds in memory: weights, and the pages that the KV caches get of what is allowed.

use super::Options;
use crate::engine::{Engine, SectionKind};
use crate::exec::cpu::kv::KvCache;
use crate::pages::pages_for;
use crate::{Error, Result};

/// Part of the free memory that the KV caches may take where nothing is said.
const DEFAULT_FRACTION: f64 = 0.25;

/// Memory that is held from load to unload, of target and drafter together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes of the KV caches, in use or not.
    pub kv_bytes: usize,
    /// Bytes of the packed weights.
    pub weight_bytes: usize,
}

impl Memory {
    pub(super) fn of(target: &Engine, draft: Option<&Engine>, num_pages: usize) -> Self {
        let engines = || [Some(target), draft].into_iter().flatten();
        Self {
            kv_bytes: num_pages * engines().map(page_bytes).sum::<usize>(),
            weight_bytes: engines().map(weight_bytes).sum(),
        }
    }
}

/// Pages that target and drafter get, of the memory that is allowed.
pub(super) fn num_pages(
    target: &Engine,
    draft: Option<&Engine>,
    options: &Options,
) -> Result<usize> {
    let page_bytes: usize = [Some(target), draft].into_iter().flatten().map(page_bytes).sum();
    let limits = &target.manifest().limits;
    let per_sequence = pages_for(limits.max_seq_len);
    let wanted = per_sequence.saturating_mul(options.max_batch_size(limits));
    let allowed = allowed_pages(options, page_bytes);
    if allowed < per_sequence {
        return Err(Error::Capacity(format!(
            "the KV cache needs {} MiB for one sequence of max_seq_len {}, {} MiB are allowed: raise \
             the KV memory or build with a smaller --max-seq-len",
            (per_sequence * page_bytes) >> 20,
            limits.max_seq_len,
            allowed.saturating_mul(page_bytes) >> 20
        )));
    }
    Ok(wanted.min(allowed))
}

/// Pages that the options allow.
fn allowed_pages(options: &Options, page_bytes: usize) -> usize {
    let free_part = |fraction: f64| {
        available_memory()
            .map_or(usize::MAX, |bytes| (bytes as f64 * fraction) as usize / page_bytes)
    };
    let limits = [
        options.kv_bytes.map(|bytes| bytes / page_bytes),
        options.kv_free_fraction.map(free_part),
        options.kv_tokens.map(pages_for),
    ];
    limits.into_iter().flatten().min().unwrap_or_else(|| free_part(DEFAULT_FRACTION))
}

/// Bytes of one page of an engine's KV cache.
fn page_bytes(engine: &Engine) -> usize {
    let manifest = engine.manifest();
    let model = &manifest.model;
    KvCache::page_bytes(manifest.precision.kv, model.num_layers, model.num_kv_heads, model.head_dim)
}

/// Bytes that the system can give without swapping, where it says so.
fn available_memory() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
    let kib: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}

fn weight_bytes(engine: &Engine) -> usize {
    let sections = engine.manifest().sections.iter();
    let weights = sections.filter(|section| section.kind == SectionKind::Weight);
    weights.map(|section| section.bytes as usize).sum()
}
