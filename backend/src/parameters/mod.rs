//! The `parameters` of a model configuration, as typed settings.
//!
//! One table says what each key means. A key that it does not hold is an error that names the nearest one; a
//! key of TensorRT-LLM that can mean nothing here is an error that says why; an unfilled `${x}` is unset.

use crate::contract::Profile;
use serde_json::Value;
use spec_core::runtime::{Isa, Lookup, Pinning, Prefill};
use triton_backend::{Error, Result};

mod keys;
mod queue;
#[cfg(test)]
mod tests;
mod value;

pub(crate) use keys::{KEYS, Meaning};
pub use queue::{LevelPolicy, QueuePolicy};

/// When a request's pages are reserved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// A request starts when all of it fits, and keeps its pages to the end.
    #[default]
    GuaranteedNoEvict,
    /// A request starts when its prompt fits, and may lose its pages for a while.
    MaxUtilization,
}

/// What becomes of a request when as many wait as may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// It is refused.
    #[default]
    Refuse,
    /// It waits in Triton's queue, and so does everything behind it.
    HoldBack,
}

/// What becomes of a request for more tokens than fit behind its prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenTooLong {
    /// It gets those that fit.
    #[default]
    Clamp,
    /// It is refused.
    Refuse,
}

/// What a temperature means where neither top-k nor top-p nor min-p is given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TemperatureAlone {
    /// Tokens are drawn from all.
    #[default]
    Draws,
    /// Nothing, as in TensorRT-LLM: the likeliest token is taken.
    Greedy,
}

/// Which responses Triton counts in its response statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseStatistics {
    /// None.
    Off,
    /// The first and the last of a request.
    #[default]
    Ends,
    /// Every one.
    All,
}

/// What a model configuration says about serving.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Names of inputs and outputs.
    pub profile: Profile,
    /// Whether a request may have several responses (`model_transaction_policy`).
    pub decoupled: bool,
    /// Instances of all groups (`instance_group`), which share the cores.
    pub instance_count: usize,
    /// Sequences that an instance runs at once; `None` is as many as the engine was built for.
    pub max_running: Option<usize>,
    /// Threads of an instance; `None` shares the cores out.
    pub threads: Option<usize>,
    /// Whether they are bound to cores.
    pub pin_threads: Pinning,
    /// What they compute with; `None` is the best that the machine has.
    pub isa: Option<Isa>,
    /// Draft tokens in a step; `None` adapts.
    pub draft_len: Option<usize>,
    /// Where drafts are looked up; `None` is as the engine was built.
    pub lookup: Option<Lookup>,
    /// Continuations that a look-up drafts side by side.
    pub ngram_branches: usize,
    /// Tokens of a position that a model or a head drafts side by side.
    pub draft_branches: usize,
    /// Tokens of such a draft at most, in all branches.
    pub draft_tree_tokens: Option<usize>,
    /// Part of the free memory that the KV cache may take.
    pub kv_memory_fraction: Option<f64>,
    /// Tokens that the KV cache holds at most.
    pub max_kv_tokens: Option<usize>,
    /// When pages are reserved.
    pub policy: Policy,
    /// Requests that may wait.
    pub max_queue_size: usize,
    /// What becomes of more.
    pub when_full: WhenFull,
    /// In which order, and how long (`dynamic_batching`).
    pub queue: QueuePolicy,
    /// Whether the pages of equal prompt beginnings are shared.
    pub kv_reuse: bool,
    /// Rows in a step.
    pub max_num_tokens: Option<usize>,
    /// GPUs of the instances that are not placed on one, in turn; none is the first GPU for all.
    pub gpus: Vec<usize>,
    /// The drafter's GPU, where it is not that of the instance.
    pub draft_gpu: Option<usize>,
    /// Who multiplies the rows of long prompts on a GPU; none is a library where there is one.
    pub prefill: Option<Prefill>,
    /// Whether a GPU begins the next step before the host has seen what the last one brought.
    pub launch_ahead: bool,
    /// Whether the output leaves out the prompt, where a request does not say.
    pub exclude_prompt: Option<bool>,
    /// What becomes of a request for more tokens than fit.
    pub when_too_long: WhenTooLong,
    /// What a temperature means by itself.
    pub temperature_alone: TemperatureAlone,
    /// Whether responses tell how many KV pages were found computed.
    pub report_reuse: bool,
    /// Tokens to generate, where a request does not say; `None` leaves it to the profile.
    pub default_max_tokens: Option<usize>,
    /// Sampling, where a request does not say.
    pub sampling: SamplingDefaults,
    /// Longest time of a request in milliseconds; 0 is any.
    pub request_timeout_ms: u64,
    /// Which responses are counted.
    pub response_statistics: ResponseStatistics,
    /// Whether an engine's sections are hashed when it is loaded.
    pub verify_engine: bool,
    /// How long an instance that is taken away may finish its requests.
    pub drain_timeout_ms: u64,
}

/// Sampling options that the operator gives for requests that do not; `None` leaves them to the profile.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Of `temperature`.
    pub temperature: Option<f32>,
    /// Of `top_k`.
    pub top_k: Option<usize>,
    /// Of `top_p`.
    pub top_p: Option<f32>,
    /// Of `min_p`.
    pub min_p: Option<f32>,
    /// Of `repetition_penalty`.
    pub repetition_penalty: Option<f32>,
    /// Of `presence_penalty`.
    pub presence_penalty: Option<f32>,
    /// Of `frequency_penalty`.
    pub frequency_penalty: Option<f32>,
    /// Of `seed`.
    pub seed: Option<u64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            profile: Profile::Text,
            decoupled: false,
            instance_count: 1,
            max_running: None,
            threads: None,
            pin_threads: Pinning::default(),
            isa: None,
            draft_len: None,
            lookup: None,
            ngram_branches: 1,
            draft_branches: 1,
            draft_tree_tokens: None,
            kv_memory_fraction: None,
            max_kv_tokens: None,
            policy: Policy::default(),
            max_queue_size: 1024,
            when_full: WhenFull::default(),
            when_too_long: WhenTooLong::default(),
            temperature_alone: TemperatureAlone::default(),
            report_reuse: true,
            queue: QueuePolicy::default(),
            kv_reuse: true,
            max_num_tokens: None,
            gpus: Vec::new(),
            draft_gpu: None,
            prefill: None,
            launch_ahead: true,
            exclude_prompt: None,
            default_max_tokens: None,
            sampling: SamplingDefaults::default(),
            request_timeout_ms: 0,
            response_statistics: ResponseStatistics::default(),
            verify_engine: false,
            drain_timeout_ms: 10_000,
        }
    }
}

impl Settings {
    /// Reads a model configuration, in Triton's JSON.
    pub fn parse(config: &Value) -> Result<Self> {
        let mut settings = Self {
            decoupled: config["model_transaction_policy"]["decoupled"].as_bool().unwrap_or(false),
            instance_count: instance_count(config),
            queue: QueuePolicy::parse(config),
            ..Self::default()
        };
        for (name, parameter) in config["parameters"].as_object().into_iter().flatten() {
            settings.set(name, value(name, parameter)?)?;
        }
        settings.check()?;
        Ok(settings)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let Some(key) = KEYS.iter().find(|key| key.name == name) else {
            return Err(unknown(name));
        };
        if is_unfilled(value) {
            return Ok(());
        }
        match key.meaning {
            Meaning::Set(set) => set(self, value.trim()).map_err(|expected| {
                Error::invalid_arg(format!("parameter '{name}' is '{value}', expected {expected}"))
            }),
            Meaning::Refused(why) => {
                Err(Error::unsupported(format!("parameter '{name}' is not supported: {why}")))
            }
        }
    }

    /// The sampling defaults are checked as a request's would be, so that no request fails because of them.
    fn check(&self) -> Result<()> {
        let mut params = spec_core::sampling::SamplingParams::default();
        self.sampling.apply(&mut params);
        params.validate(usize::MAX).map_err(|error| match error {
            spec_core::Error::BadRequest { field, message } => {
                Error::invalid_arg(format!("parameter 'default_{field}': {message}"))
            }
            other => Error::internal(other.to_string()),
        })
    }
}

impl SamplingDefaults {
    /// Writes what is given over `params`.
    pub(crate) fn apply(&self, params: &mut spec_core::sampling::SamplingParams) {
        let Self { temperature, top_k, top_p, min_p, .. } = self;
        let Self { repetition_penalty, presence_penalty, frequency_penalty, seed, .. } = self;
        let write = |slot: &mut f32, given: &Option<f32>| *slot = given.unwrap_or(*slot);
        write(&mut params.temperature, temperature);
        write(&mut params.top_p, top_p);
        write(&mut params.min_p, min_p);
        write(&mut params.repetition_penalty, repetition_penalty);
        write(&mut params.presence_penalty, presence_penalty);
        write(&mut params.frequency_penalty, frequency_penalty);
        params.top_k = top_k.unwrap_or(params.top_k);
        params.seed = seed.or(params.seed);
    }
}

fn value<'a>(name: &str, parameter: &'a Value) -> Result<&'a str> {
    parameter["string_value"].as_str().ok_or_else(|| {
        Error::invalid_arg(format!("parameter '{name}' has no string_value: {parameter}"))
    })
}

/// A template's variable that nobody filled, or nothing at all.
fn is_unfilled(value: &str) -> bool {
    let value = value.trim();
    value.is_empty() || (value.starts_with("${") && value.ends_with('}'))
}

/// All of them share the CPUs: beside a target on a GPU a drafter may run there. A group has `count` on each of its GPUs.
fn instance_count(config: &Value) -> usize {
    let groups = config["instance_group"].as_array().into_iter().flatten();
    let instances = |group: &Value| {
        let gpus = group["gpus"].as_array().filter(|_| group["kind"] == "KIND_GPU");
        let places = gpus.map_or(1, |gpus| gpus.len().max(1)) as u64;
        group["count"].as_u64().unwrap_or(1).max(1).saturating_mul(places)
    };
    let count = groups.map(instances).fold(0, u64::saturating_add);
    usize::try_from(count).unwrap_or(usize::MAX).max(1)
}

fn unknown(name: &str) -> Error {
    let settable = KEYS.iter().filter(|key| matches!(key.meaning, Meaning::Set(_)));
    let nearest = settable.map(|key| key.name).min_by_key(|known| distance(name, known));
    let nearest = nearest.unwrap_or_default();
    Error::invalid_arg(format!("parameter '{name}' is not known, the nearest is '{nearest}'"))
}

/// Letters to insert, delete or replace to turn one word into the other.
fn distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (idx, letter) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], idx + 1);
        for (column, &other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}
