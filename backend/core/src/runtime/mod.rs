//! The loop: requests in, tokens out, one speculative step at a time.

mod folder;
mod text;

pub use folder::{DRAFT_FILE, ModelFolder, TARGET_FILE};
pub use text::{TextChunk, TextStream};

use crate::adapt::{DraftPolicy, Tuner};
use crate::batch::{Executor, Forward};
use crate::draft::{self, Drafter};
use crate::engine::{DrafterKind, Engine, Limits as EngineLimits};
use crate::exec::Host;
use crate::exec::cpu::kv::KvCache;
use crate::exec::cpu::{self, Isa, Pool};
use crate::pages::pages_for;
use crate::sampling::{Coupling, Sampler, SamplingParams};
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::sequence::{FinishReason, Limits, Sequence, SequenceId};
use crate::{Error, Result};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Instant;

pub use crate::scheduler::Event;

/// Repeated tokens before which the adaptive policy looks up the draft instead of running the drafter model:
/// from the longest to the shortest. Shorter repeats are right too seldom to beat the model.
const MAX_LOOKUP: usize = 5;
const MIN_LOOKUP: usize = 3;

/// How an engine is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads of the CPU executor; `None` is one a core.
    pub threads: Option<usize>,
    /// Bytes for the KV caches of target and drafter together; `None` holds `max_batch_size` sequences of
    /// `max_seq_len`, or a quarter of the machine's free memory if that is less.
    pub kv_bytes: Option<usize>,
    /// How draft lengths are chosen.
    pub draft_policy: DraftPolicy,
    /// Rows in a step, at most the engine's `max_num_tokens`.
    pub max_num_tokens: Option<usize>,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Instruction set of the CPU executor; `None` is the best this machine has.
    pub isa: Option<Isa>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: None,
            kv_bytes: None,
            draft_policy: DraftPolicy::Adaptive,
            max_num_tokens: None,
            max_queue: 1024,
            isa: None,
        }
    }
}

/// What to generate.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Draft tokens in a step at most; `None` is the engine's maximum, 0 is plain decoding.
    pub draft_len: Option<usize>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Go on after the model's end tokens.
    pub ignore_eos: bool,
    /// Further tokens that end the text.
    pub stop_tokens: Vec<u32>,
    /// Lower is served first.
    pub priority: u32,
}

/// An engine pair, loaded and running.
pub struct Runtime {
    scheduler: Scheduler,
    executor: Box<dyn Executor>,
    limits: EngineLimits,
    vocab_size: usize,
    end_tokens: Vec<u32>,
    next_id: SequenceId,
    /// Source of the keys of requests without a seed.
    entropy: RandomState,
}

impl Runtime {
    /// Loads a target and the drafter that it names.
    pub fn load(target: &Engine, options: &Options) -> Result<Self> {
        let draft = target.open_drafter()?;
        let manifest = target.manifest();
        let pool = Arc::new(Pool::new(options.threads.unwrap_or_else(num_cores)));
        let isa = options.isa.unwrap_or_else(Isa::detect);
        let num_pages = num_pages(target, draft.as_ref(), options)?;
        let load = |engine: &Engine| -> Result<Box<dyn Forward>> {
            Ok(Box::new(cpu::Model::load(engine, num_pages, isa, Arc::clone(&pool))?))
        };
        let drafter: Option<Box<dyn Drafter>> = match (&manifest.drafter, &draft) {
            (DrafterKind::Ngram { max_ngram, min_ngram }, _) => {
                Some(Box::new(draft::Ngram::new(*max_ngram, *min_ngram)))
            }
            (_, Some(engine)) => {
                let vocab_size = manifest.model.vocab_size.min(engine.manifest().model.vocab_size);
                let model = draft::Model::new(load(engine)?, vocab_size);
                match options.draft_policy {
                    DraftPolicy::Fixed => Some(Box::new(model)),
                    DraftPolicy::Adaptive => Some(Box::new(draft::Combined::new(
                        draft::Ngram::new(MAX_LOOKUP, MIN_LOOKUP),
                        model,
                    ))),
                }
            }
            (_, None) => None,
        };
        let limits = manifest.limits.clone();
        let max_draft_len = if drafter.is_some() { limits.max_draft_len } else { 0 };
        let max_num_tokens =
            limits.max_num_tokens.min(options.max_num_tokens.unwrap_or(usize::MAX));
        let config = SchedulerConfig {
            max_batch_size: limits.max_batch_size,
            max_num_tokens,
            max_seq_len: limits.max_seq_len,
            max_draft_len,
            num_pages,
            max_queue: options.max_queue,
        };
        let draft_costs = draft.as_ref().and_then(|engine| engine.manifest().costs.as_ref());
        let tuner =
            Tuner::new(options.draft_policy, max_draft_len, manifest.costs.as_ref(), draft_costs);
        Ok(Self {
            scheduler: Scheduler::new(config, tuner),
            executor: Box::new(Host::new(load(target)?, drafter)),
            limits: EngineLimits { max_draft_len, ..limits },
            vocab_size: manifest.model.vocab_size,
            end_tokens: manifest.end_tokens.clone(),
            next_id: 0,
            entropy: RandomState::new(),
        })
    }

    /// What the engine was built for.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// Checks a request and puts it into the queue.
    pub fn add(&mut self, request: Request) -> Result<SequenceId> {
        let Request { prompt, max_tokens, draft_len, sampling, ignore_eos, stop_tokens, priority } =
            request;
        sampling.validate(self.vocab_size)?;
        check_ids("input_ids", &prompt, self.vocab_size)?;
        check_ids("stop_tokens", &stop_tokens, self.vocab_size)?;
        let id = self.next_id;
        let limits = Limits {
            max_tokens,
            end_tokens: self.end_tokens.clone(),
            ignore_eos,
            stop_tokens,
            draft_len: draft_len.unwrap_or(self.limits.max_draft_len),
            priority,
        };
        let coupling = match sampling.seed {
            Some(seed) => Coupling::Path(seed),
            None => Coupling::Independent(self.entropy.hash_one(id)),
        };
        let sampler = Sampler::new(sampling, coupling, self.end_tokens.clone());
        self.scheduler.add(Sequence::new(id, prompt, sampler, limits))?;
        self.next_id += 1;
        Ok(id)
    }

    /// Runs one step and tells what it brought. Does nothing when there is nothing to do.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let schedule = self.scheduler.schedule();
        for &id in &schedule.forgotten {
            self.executor.forget(id);
        }
        if schedule.parts.is_empty() {
            return Ok(Vec::new());
        }
        let start = Instant::now();
        let outcomes = self.executor.step(&self.scheduler.entries(&schedule))?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        self.scheduler.observe(&schedule, &outcomes, ms);
        Ok(self.scheduler.commit(&schedule, outcomes))
    }

    /// Ends a sequence early; its pages are free at once.
    pub fn finish(&mut self, id: SequenceId, reason: FinishReason) -> Option<Sequence> {
        self.scheduler.finish(id, reason)
    }

    /// Takes a running sequence's pages away; it is computed again when its turn comes.
    pub fn preempt(&mut self, id: SequenceId) -> bool {
        self.scheduler.preempt(id)
    }

    /// Whether nothing runs or waits.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }
}

fn check_ids(field: &'static str, ids: &[u32], vocab_size: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        Some(id) => {
            Err(Error::bad_request(field, format!("token {id}, the vocabulary has {vocab_size}")))
        }
        None => Ok(()),
    }
}

fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Pages that target and drafter get, of the memory that is allowed.
fn num_pages(target: &Engine, draft: Option<&Engine>, options: &Options) -> Result<usize> {
    let page_bytes: usize = [Some(target), draft].into_iter().flatten().map(page_bytes).sum();
    let limits = &target.manifest().limits;
    let per_sequence = pages_for(limits.max_seq_len);
    let wanted = per_sequence.saturating_mul(limits.max_batch_size);
    let allowed = match options.kv_bytes {
        Some(bytes) => bytes / page_bytes,
        None => available_memory().map_or(usize::MAX, |bytes| bytes / 4 / page_bytes),
    };
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
