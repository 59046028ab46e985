//! A model's lines on Triton's metrics endpoint: the families of TensorRT-LLM's backend, which dashboards and
//! ORCA load reports know, and those of speculation. Gauges add up the instances.

use crate::contract::{Row, RowReply, Times};
use crate::triton::{Family, Kind, Metric, Result};
use spec_core::runtime::{Memory, Usage};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bounds of the histograms of lengths, in tokens: TensorRT-LLM's.
const LENGTHS: &[f64] = &[10.0, 50.0, 100.0, 500.0, 1000.0];
/// Bounds of the histograms of times, in seconds: vLLM's.
const FIRST_TOKEN: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0];
const PER_TOKEN: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
const WHOLE: &[f64] = &[1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0];

/// The metrics of a model.
pub(crate) struct Metrics {
    gauges: Vec<(Metric, Read)>,
    lengths: [Metric; 2],
    prompt_tokens: Metric,
    generated_tokens: Metric,
    drafts: Metric,
    draft_tokens: Metric,
    accepted_tokens: Metric,
    /// By position in the draft.
    accepted_at: Vec<Metric>,
    first_token: Metric,
    per_token: Metric,
    whole: Metric,
    instances: Mutex<Vec<Option<Load>>>,
}

/// How loaded an instance is, or all of them together.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    usage: Usage,
    memory: Memory,
    dead: bool,
}

/// What a gauge shows of a load.
type Read = fn(&Load) -> f64;
/// A gauge: its label, and what it shows.
type Gauge = (&'static str, Read);

const REQUESTS: &[Gauge] = &[
    ("active", |load| (load.usage.running + load.usage.waiting + load.usage.paused) as f64),
    ("max", |load| load.usage.max_running as f64),
    ("scheduled", |load| load.usage.running as f64),
    ("context", |load| load.usage.prefilling as f64),
    ("waiting", |load| (load.usage.waiting + load.usage.paused) as f64),
];
const MEMORY: &[Gauge] = &[
    ("cpu", |load| (load.memory.kv_bytes + load.memory.weight_bytes) as f64),
    ("gpu", |_| 0.0),
    ("pinned", |_| 0.0),
];
const KV_BLOCKS: &[Gauge] = &[
    ("max", |load| load.usage.pages as f64),
    ("free", |load| load.usage.free_pages as f64),
    ("used", |load| load.usage.used_pages as f64),
    ("cached", |load| load.usage.cached_pages as f64),
    ("tokens_per", |load| load.usage.page_tokens as f64),
    ("fraction", |load| load.usage.used_pages as f64 / load.usage.pages.max(1) as f64),
];
const BATCHER: &[Gauge] = &[
    ("total_context_tokens", |load| load.usage.context_tokens as f64),
    ("generation_requests", |load| load.usage.decoding as f64),
    ("micro_batch_id", |_| 0.0),
    ("paused_requests", |load| load.usage.paused as f64),
];
const GENERAL: &[Gauge] = &[
    ("timestamp", |_| unix_seconds()),
    ("iteration_counter", |load| load.usage.iterations as f64),
];
const STATE: &[Gauge] = &[
    ("ready", |load| f64::from(u8::from(!load.dead))),
    ("preemptions", |load| load.usage.preemptions as f64),
];

fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |age| age.as_secs_f64().floor())
}

impl Metrics {
    /// The metrics of version `version` of the model `name`; `max_draft_len` positions are told apart.
    pub(crate) fn new(name: &str, version: u64, max_draft_len: usize) -> Result<Self> {
        let version = version.to_string();
        let labels = [("model", name), ("version", &version)];
        let one = |kind, name, help| Family::new(kind, name, help)?.metric(&labels);
        let of = |family: &std::sync::Arc<Family>, label, value: &str| {
            family.metric(&[labels[0], labels[1], (label, value)])
        };
        let mut gauges = Vec::new();
        for (name, help, label, values) in [
            ("nv_trt_llm_request_metrics", "Requests in the backend", "request_type", REQUESTS),
            ("nv_trt_llm_runtime_memory_metrics", "Bytes held", "memory_type", MEMORY),
            ("nv_trt_llm_kv_cache_block_metrics", "KV pages", "kv_cache_block_type", KV_BLOCKS),
            (
                "nv_trt_llm_inflight_batcher_metrics",
                "The in-flight batcher",
                "inflight_batcher_specific_metric",
                BATCHER,
            ),
            ("nv_trt_llm_general_metrics", "Time and steps", "general_type", GENERAL),
            ("nv_spec_engine_metrics", "Health and preemptions", "engine_metric_type", STATE),
        ] {
            let family = Family::new(Kind::Gauge, name, help)?;
            for &(value, read) in values {
                gauges.push((of(&family, label, value)?, read));
            }
        }
        let length = |name, help, value| {
            of(&Family::new(Kind::Histogram(LENGTHS), name, help)?, "response_metric_type", value)
        };
        let accepted_at = Family::new(
            Kind::Counter,
            "nv_spec_num_accepted_tokens_per_pos_total",
            "Drafts accepted up to this position at least",
        )?;
        let positions = (0..max_draft_len).map(|at| of(&accepted_at, "position", &at.to_string()));
        Ok(Self {
            gauges,
            lengths: [
                length("nv_llm_input_token_len", "Tokens of prompts", "total_input_tokens")?,
                length("nv_llm_output_token_len", "Tokens generated", "total_output_tokens")?,
            ],
            prompt_tokens: one(Kind::Counter, "nv_spec_prompt_tokens_total", "Tokens of prompts")?,
            generated_tokens: one(
                Kind::Counter,
                "nv_spec_generation_tokens_total",
                "Tokens generated",
            )?,
            drafts: one(Kind::Counter, "nv_spec_num_drafts_total", "Steps that verified a draft")?,
            draft_tokens: one(
                Kind::Counter,
                "nv_spec_num_draft_tokens_total",
                "Draft tokens verified",
            )?,
            accepted_tokens: one(
                Kind::Counter,
                "nv_spec_num_accepted_tokens_total",
                "Draft tokens accepted",
            )?,
            accepted_at: positions.collect::<Result<_>>()?,
            first_token: one(
                Kind::Histogram(FIRST_TOKEN),
                "nv_spec_time_to_first_token_seconds",
                "From arrival to the first token",
            )?,
            per_token: one(
                Kind::Histogram(PER_TOKEN),
                "nv_spec_time_per_output_token_seconds",
                "Mean time between tokens of a request",
            )?,
            whole: one(
                Kind::Histogram(WHOLE),
                "nv_spec_e2e_request_latency_seconds",
                "From arrival to the last response",
            )?,
            instances: Mutex::default(),
        })
    }

    /// Counts a row that has ended well.
    pub(crate) fn count_row(&self, row: &Row, num_tokens: usize, reply: &RowReply) {
        self.lengths[0].observe(row.prompt_len as f64);
        self.lengths[1].observe(num_tokens as f64);
        self.prompt_tokens.add(row.prompt_len as f64);
        self.generated_tokens.add(num_tokens as f64);
        let Some(finish) = &reply.finish else { return };
        let counters = &finish.counters;
        self.drafts.add(counters.drafts as f64);
        self.draft_tokens.add(counters.drafted as f64);
        self.accepted_tokens.add(counters.accepted as f64);
        for (metric, &count) in self.accepted_at.iter().zip(&counters.accepted_per_position) {
            metric.add(count as f64);
        }
    }

    /// Counts a request that has been answered, by the times and tokens of its rows.
    pub(crate) fn count_request(
        &self,
        arrival_ns: u64,
        end_ns: u64,
        rows: impl Iterator<Item = (Times, usize)>,
    ) {
        let seconds = |from: u64, to: u64| to.saturating_sub(from) as f64 * 1e-9;
        self.whole.observe(seconds(arrival_ns, end_ns));
        for (times, num_tokens) in rows {
            self.first_token.observe(seconds(arrival_ns, times.first_token_ns));
            if num_tokens > 1 {
                let decoding = seconds(times.first_token_ns, times.last_token_ns);
                self.per_token.observe(decoding / (num_tokens - 1) as f64);
            }
        }
    }

    /// Makes room for an instance's gauges, and names it.
    pub(crate) fn add_instance(&self, memory: Memory) -> usize {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        instances.push(Some(Load { memory, ..Load::default() }));
        instances.len() - 1
    }

    /// The instance is gone.
    pub(crate) fn remove_instance(&self, idx: usize) {
        self.update(idx, |load| *load = None);
    }

    /// How loaded an instance is now.
    pub(crate) fn publish(&self, idx: usize, usage: Usage) {
        self.update(idx, |load| load.iter_mut().for_each(|load| load.usage = usage));
    }

    /// An instance's engine thread has died: it holds nothing any more.
    pub(crate) fn publish_death(&self, idx: usize) {
        self.update(idx, |load| {
            *load = load.map(|load| Load { dead: true, usage: Usage::default(), ..load });
        });
    }

    fn update(&self, idx: usize, change: impl FnOnce(&mut Option<Load>)) {
        let mut instances = self.instances.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut instances[idx]);
        let all = instances.iter().flatten().fold(Load::default(), |all, load| all.with(load));
        for (metric, read) in &self.gauges {
            metric.set(read(&all));
        }
    }
}

impl Load {
    fn with(self, other: &Self) -> Self {
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
            },
            memory: Memory {
                kv_bytes: self.memory.kv_bytes + other.memory.kv_bytes,
                weight_bytes: self.memory.weight_bytes + other.memory.weight_bytes,
            },
            dead: self.dead || other.dead,
        }
    }
}
