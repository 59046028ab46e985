//! How loaded a model is: the gauges, which add up its instances.

use spec_core::runtime::{Memory, MemoryType, Usage};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};
use triton_backend::{Family, Kind, Metric, Result};

/// What a gauge shows of a load.
type Read = fn(&Load) -> f64;
/// A gauge: its label, and what it shows.
type Gauge = (&'static str, Read);

/// Families of gauges: name, help, the label that tells their lines apart, and the lines.
const FAMILIES: &[(&str, &str, &str, &[Gauge])] = &[
    (
        "nv_trt_llm_request_metrics",
        "Requests in the backend",
        "request_type",
        &[
            ("active", |load| (load.usage.running + load.usage.waiting + load.usage.paused) as f64),
            ("max", |load| load.usage.max_running as f64),
            ("scheduled", |load| load.usage.running as f64),
            ("context", |load| load.usage.prefilling as f64),
            ("waiting", |load| (load.usage.waiting + load.usage.paused) as f64),
        ],
    ),
    (
        "nv_trt_llm_runtime_memory_metrics",
        "Bytes of weights, KV cache and workspace; what instances share counts once",
        "memory_type",
        &[
            ("cpu", |load| load.bytes(|memory| memory == MemoryType::Cpu)),
            ("gpu", |load| load.bytes(|memory| matches!(memory, MemoryType::Gpu(_)))),
            ("pinned", |load| load.bytes(|memory| memory == MemoryType::Pinned)),
        ],
    ),
    (
        "nv_trt_llm_kv_cache_block_metrics",
        "Pages of the KV cache",
        "kv_cache_block_type",
        &[
            ("max", |load| load.usage.pages as f64),
            ("free", |load| load.usage.free_pages as f64),
            ("used", |load| load.usage.used_pages as f64),
            ("cached", |load| load.usage.cached_pages as f64),
            ("reused", |load| load.usage.reused_pages as f64),
            ("tokens_per", |load| load.usage.page_tokens as f64),
            ("fraction", |load| load.usage.used_pages as f64 / load.usage.pages.max(1) as f64),
        ],
    ),
    (
        "nv_trt_llm_inflight_batcher_metrics",
        "The in-flight batcher",
        "inflight_batcher_specific_metric",
        &[
            ("total_context_tokens", |load| load.usage.context_tokens as f64),
            ("generation_requests", |load| load.usage.decoding as f64),
            ("micro_batch_id", |_| 0.0),
            ("paused_requests", |load| load.usage.paused as f64),
        ],
    ),
    (
        "nv_trt_llm_general_metrics",
        "Time and steps",
        "general_type",
        &[
            ("timestamp", |_| unix_seconds()),
            ("iteration_counter", |load| load.usage.iterations as f64),
        ],
    ),
    (
        "nv_spec_engine_metrics",
        "Whether all instances can serve; whether the engine of one has died; sequences that lost their pages",
        "engine_metric_type",
        &[
            ("ready", |load| f64::from(u8::from(!load.dead))),
            // Not the same: a model that is still loading is neither.
            ("died", |load| f64::from(u8::from(load.dead))),
            ("preemptions", |load| load.usage.preemptions as f64),
        ],
    ),
];

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |age| age.as_secs_f64().floor())
}

/// How loaded an instance is, or all of them together.
#[derive(Clone, Debug, Default)]
struct Load {
    usage: Usage,
    memory: Memory,
    dead: bool,
}

impl Load {
    fn with(&self, other: &Self) -> Self {
        let mut memory = self.memory.clone();
        memory.merge(&other.memory);
        let (a, b) = (&self.usage, &other.usage);
        Self {
            usage: Usage {
                waiting: a.waiting + b.waiting,
                paused: a.paused + b.paused,
                running: a.running + b.running,
                max_running: a.max_running + b.max_running,
                prefilling: a.prefilling + b.prefilling,
                decoding: a.decoding + b.decoding,
                pages: a.pages + b.pages,
                used_pages: a.used_pages + b.used_pages,
                free_pages: a.free_pages + b.free_pages,
                cached_pages: a.cached_pages + b.cached_pages,
                page_tokens: a.page_tokens.max(b.page_tokens),
                context_tokens: a.context_tokens + b.context_tokens,
                iterations: a.iterations + b.iterations,
                preemptions: a.preemptions + b.preemptions,
                reused_pages: a.reused_pages + b.reused_pages,
            },
            memory,
            dead: self.dead || other.dead,
        }
    }

    fn bytes(&self, of: impl Fn(MemoryType) -> bool) -> f64 {
        self.memory.bytes(of) as f64
    }

    /// What stays of an instance that is gone: its counts.
    fn counts(&self) -> Self {
        let Usage { iterations, preemptions, reused_pages, .. } = self.usage;
        let usage = Usage { iterations, preemptions, reused_pages, ..Usage::default() };
        Self { usage, ..Self::default() }
    }
}

/// A model's gauges.
pub(super) struct Gauges {
    metrics: Vec<(Metric, Read)>,
    instances: Mutex<Instances>,
}

#[derive(Default)]
struct Instances {
    slots: Vec<Option<Load>>,
    /// Counts of those that are gone.
    gone: Load,
}

impl Gauges {
    pub(super) fn new(labels: [(&str, &str); 2]) -> Result<Self> {
        let mut metrics = Vec::new();
        for &(name, help, label, gauges) in FAMILIES {
            let family = Family::new(Kind::Gauge, name, help)?;
            for &(value, read) in gauges {
                metrics.push((family.metric(&[labels[0], labels[1], (label, value)])?, read));
            }
        }
        Ok(Self { metrics, instances: Mutex::default() })
    }

    fn update<T>(&self, change: impl FnOnce(&mut Instances) -> T) -> T {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = change(&mut instances);
        let all = instances.slots.iter().flatten();
        let all = all.fold(instances.gone.clone(), |all, load| all.with(load));
        for (metric, read) in &self.metrics {
            metric.set(read(&all));
        }
        changed
    }
}

/// An instance's place in the gauges of its model.
pub(crate) struct Slot {
    metrics: Arc<super::Metrics>,
    idx: usize,
}

impl Slot {
    /// A place for an instance that holds this memory.
    pub(crate) fn new(metrics: &Arc<super::Metrics>, memory: Memory) -> Self {
        let idx = metrics.gauges.update(|Instances { slots, .. }| {
            let idx = slots.iter().position(Option::is_none).unwrap_or(slots.len());
            slots.resize(slots.len().max(idx + 1), None);
            slots[idx] = Some(Load { memory, ..Load::default() });
            idx
        });
        Self { metrics: Arc::clone(metrics), idx }
    }

    /// The metrics of its model.
    pub(crate) fn metrics(&self) -> &super::Metrics {
        &self.metrics
    }

    /// How loaded the instance is now.
    pub(crate) fn publish(&self, usage: Usage) {
        self.change(|load| load.usage = usage);
    }

    /// Its engine thread has died: it holds nothing any more.
    pub(crate) fn publish_death(&self) {
        self.change(|load| {
            *load = Load { dead: true, memory: load.memory.clone(), ..load.counts() }
        });
    }

    fn change(&self, change: impl FnOnce(&mut Load)) {
        self.metrics.gauges.update(|instances| instances.slots[self.idx].as_mut().map(change));
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.metrics.gauges.update(|Instances { slots, gone }| {
            if let Some(load) = slots[self.idx].take() {
                *gone = gone.with(&load.counts());
            }
        });
    }
}
