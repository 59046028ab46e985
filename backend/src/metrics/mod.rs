//! A model's lines on Triton's metrics endpoint: the families of TensorRT-LLM's backend, which dashboards and
//! ORCA load reports know, and those of speculation.

mod acceptance;
mod load;

pub(crate) use load::Slot;

use crate::contract::Times;
use acceptance::Acceptance;
use load::Gauges;
use spec_core::runtime::Counters;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use triton_backend::{Family, Kind, Metric, Result, log};

/// Bounds of the histograms of lengths, in tokens: TensorRT-LLM's.
const LENGTHS: Kind<'_> = Kind::Histogram(&[10.0, 50.0, 100.0, 500.0, 1000.0]);
/// Bounds of the histograms of times, in seconds: vLLM's.
const FIRST_TOKEN: Kind<'_> = Kind::Histogram(&[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
]);
const PER_TOKEN: Kind<'_> =
    Kind::Histogram(&[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]);
const WHOLE: Kind<'_> = Kind::Histogram(&[1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0]);

/// Of steps, in seconds: from a small model on a GPU to a long prompt on a CPU.
const STEPS: Kind<'_> = Kind::Histogram(&[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
]);

/// A model's name and version.
type Key = (String, u64);

/// Metrics in use: a model that is loaded anew while the old one still serves shares them with it, as their
/// lines are the same. Lines are made and taken away under this lock alone: Triton frees a line that two use when
/// one of them is done.
static IN_USE: Mutex<Option<HashMap<Key, Arc<Metrics>>>> = Mutex::new(None);

/// Takes the lines away that no model uses any more, when it is dropped.
pub(crate) struct Sweeper;

impl Drop for Sweeper {
    fn drop(&mut self) {
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.get_or_insert_default().retain(|_, metrics| Arc::strong_count(metrics) > 1);
    }
}

/// The metrics of a model.
pub(crate) struct Metrics {
    key: Key,
    gauges: Gauges,
    prompt_lens: Metric,
    output_lens: Metric,
    prompt_tokens: Metric,
    generated_tokens: Metric,
    drafts: Metric,
    draft_tokens: Metric,
    accepted_tokens: Metric,
    /// By position in the draft, as far as any was accepted.
    accepted_at: Mutex<Vec<Metric>>,
    acceptance: Mutex<Acceptance>,
    steps: Metric,
    drafting: Metric,
    first_token: Metric,
    per_token: Metric,
    whole: Metric,
}

impl Metrics {
    /// The metrics of version `version` of the model `name`.
    pub(crate) fn of(name: &str, version: u64) -> Result<Arc<Self>> {
        let key = (name.to_string(), version);
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let in_use = in_use.get_or_insert_default();
        if let Some(metrics) = in_use.get(&key) {
            return Ok(Arc::clone(metrics));
        }
        let metrics = Arc::new(Self::new(key.clone())?);
        in_use.insert(key, Arc::clone(&metrics));
        Ok(metrics)
    }

    fn new(key: Key) -> Result<Self> {
        let version = key.1.to_string();
        let labels = [("model", key.0.as_str()), ("version", &version)];
        let one = |kind, name, help| Family::new(kind, name, help)?.metric(&labels);
        let count = |name, help| one(Kind::Counter, name, help);
        let length = |name, help, what| {
            let labels = [labels[0], labels[1], ("response_metric_type", what)];
            Family::new(LENGTHS, name, help)?.metric(&labels)
        };
        Ok(Self {
            gauges: Gauges::new(labels)?,
            prompt_lens: length("nv_llm_input_token_len", "Prompts", "total_input_tokens")?,
            output_lens: length("nv_llm_output_token_len", "Outputs", "total_output_tokens")?,
            prompt_tokens: count("nv_spec_prompt_tokens_total", "Tokens of prompts")?,
            generated_tokens: count("nv_spec_generation_tokens_total", "Tokens generated")?,
            drafts: count("nv_spec_num_drafts_total", "Steps that verified a draft")?,
            draft_tokens: count("nv_spec_num_draft_tokens_total", "Draft tokens verified")?,
            accepted_tokens: count("nv_spec_num_accepted_tokens_total", "Draft tokens accepted")?,
            accepted_at: Mutex::default(),
            acceptance: Mutex::default(),
            steps: one(
                STEPS,
                "nv_spec_step_seconds",
                "Steps, from their schedule to their tokens",
            )?,
            drafting: count(
                "nv_spec_draft_seconds_total",
                "Of steps: drafting; nothing is counted where a GPU drafts inside of its step",
            )?,
            first_token: one(
                FIRST_TOKEN,
                "nv_spec_time_to_first_token_seconds",
                "From arrival to the first token",
            )?,
            per_token: one(
                PER_TOKEN,
                "nv_spec_time_per_output_token_seconds",
                "Mean time between the tokens of a request",
            )?,
            whole: one(
                WHOLE,
                "nv_spec_e2e_request_latency_seconds",
                "From arrival to the last response",
            )?,
            key,
        })
    }

    /// Counts a step that took so long, and how much of that went into drafting.
    pub(crate) fn count_step(&self, took: Duration, drafting: Option<Duration>) {
        self.steps.observe(took.as_secs_f64());
        if let Some(drafting) = drafting {
            self.drafting.add(drafting.as_secs_f64());
        }
    }

    /// Counts what a row drafted, however it ended.
    pub(crate) fn count_drafts(&self, counters: &Counters) {
        self.watch_acceptance(counters);
        self.drafts.add(counters.drafts as f64);
        self.draft_tokens.add(counters.drafted as f64);
        self.accepted_tokens.add(counters.accepted as f64);
        let mut accepted_at = self.accepted_at.lock().unwrap_or_else(PoisonError::into_inner);
        for (position, &count) in counters.accepted_per_position.iter().enumerate() {
            if position == accepted_at.len() {
                // Without this line the others are still right.
                let Ok(metric) = self.accepted_at(position) else { return };
                accepted_at.push(metric);
            }
            accepted_at[position].add(count as f64);
        }
    }

    /// Says in the log when drafts have come to be worth less, and when they are worth as much as before again.
    fn watch_acceptance(&self, counters: &Counters) {
        let first = counters.accepted_per_position.first().copied().unwrap_or(0);
        let mut acceptance = self.acceptance.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(change) = acceptance.count(counters.drafts, first) {
            let (name, version) = &self.key;
            log(change.level(), &format!("model '{name}' version {version}: {change}"));
        }
    }

    fn accepted_at(&self, position: usize) -> Result<Metric> {
        let (version, position) = (self.key.1.to_string(), position.to_string());
        let family = Family::new(
            Kind::Counter,
            "nv_spec_num_accepted_tokens_per_pos_total",
            "Drafts that were accepted up to this position at least",
        )?;
        family.metric(&[("model", &self.key.0), ("version", &version), ("position", &position)])
    }

    /// Counts a text that has ended well, by its tokens.
    pub(crate) fn count_text(&self, num_tokens: usize) {
        self.output_lens.observe(num_tokens as f64);
        self.generated_tokens.add(num_tokens as f64);
    }

    /// Counts a prompt, which several texts may follow.
    pub(crate) fn count_prompt(&self, prompt_len: usize) {
        self.prompt_lens.observe(prompt_len as f64);
        self.prompt_tokens.add(prompt_len as f64);
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
        for (times, num_tokens) in rows.filter(|&(_, num_tokens)| num_tokens > 0) {
            self.first_token.observe(seconds(arrival_ns, times.first_token_ns));
            if num_tokens > 1 {
                let decoding = seconds(times.first_token_ns, times.last_token_ns);
                self.per_token.observe(decoding / (num_tokens - 1) as f64);
            }
        }
    }
}
