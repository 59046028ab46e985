//! What a runtime holds in memory: weights, and the pages that the KV caches get of what is allowed.

use super::Options;
use crate::engine::{Device, Engine, Limits, SectionKind};
use crate::exec::cpu::kv::KvCache;
use crate::exec::cuda;
use crate::pages::pages_for;
use crate::{Error, Result};

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

/// Memory that pages are taken from: that of the machine or of a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// Bytes of a page there, of all models that run there.
    pub(super) page_bytes: usize,
    /// Bytes that are free for pages, where the system says so.
    pub(super) available: Option<usize>,
    /// Part of them that is taken where nothing is said.
    pub(super) fraction: f64,
    /// Whether more than is free cannot be had: there is no swapping.
    pub(super) is_hard: bool,
}

/// Pages that target and drafter get, of the memory that is allowed.
pub(super) fn num_pages(limits: &Limits, sources: &[Source], options: &Options) -> Result<usize> {
    let per_sequence = pages_for(limits.max_seq_len);
    let wanted = per_sequence.saturating_mul(options.max_batch_size(limits));
    let allowed = allowed_pages(options, sources);
    if allowed < per_sequence {
        let page_bytes: usize = sources.iter().map(|source| source.page_bytes).sum();
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

/// Pages that the options allow: the fewest of what each limit and each memory gives.
fn allowed_pages(options: &Options, sources: &[Source]) -> usize {
    let free_parts = |fraction: Option<f64>| {
        let parts = sources.iter().map(|source| {
            let fraction = fraction.unwrap_or(source.fraction);
            source
                .available
                .map_or(usize::MAX, |bytes| (bytes as f64 * fraction) as usize / source.page_bytes)
        });
        parts.min().unwrap_or(usize::MAX)
    };
    let page_bytes: usize = sources.iter().map(|source| source.page_bytes).sum();
    let limits = [
        options.kv_bytes.map(|bytes| bytes / page_bytes),
        options.kv_free_fraction.map(|fraction| free_parts(Some(fraction))),
        options.kv_tokens.map(pages_for),
    ];
    let least = limits.into_iter().flatten().min();
    let hard = sources.iter().filter(|source| source.is_hard);
    let most = hard.filter_map(|source| Some(source.available? / source.page_bytes)).min();
    least.unwrap_or_else(|| free_parts(None)).min(most.unwrap_or(usize::MAX))
}

/// Bytes of one page of an engine's KV cache.
pub(super) fn page_bytes(engine: &Engine) -> usize {
    let manifest = engine.manifest();
    let (model, precision) = (&manifest.model, &manifest.precision);
    match manifest.device {
        Device::Cpu => {
            KvCache::page_bytes(precision.kv, model.num_layers, model.num_kv_heads, model.head_dim)
        }
        Device::Cuda { .. } => cuda::kv::page_bytes(precision.kv, model),
    }
}

/// Bytes that the system can give without swapping, where it says so.
pub(super) fn available_memory() -> Option<usize> {
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
