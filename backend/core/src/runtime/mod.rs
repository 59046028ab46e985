//! The loop: requests in, tokens out, one speculative step at a time.

mod folder;
mod ledger;
mod loading;
mod lookup;
mod memory;
mod options;
mod placement;
mod shared;
#[cfg(any(test, feature = "testing"))]
mod testing;
mod text;

#[cfg(test)]
mod tests;

pub use folder::{DRAFT_FILE, ModelFolder, TARGET_FILE};
pub use lookup::{Lookup, SUFFIX_TOKENS};
pub use memory::{Memory, MemoryType, WeightCopy};
pub use options::Options;
pub use placement::{Footprint, page_bytes};
pub use shared::SharedWeights;
pub use text::{TextChunk, TextRules, TextStream};

use ledger::Promise;
use loading::{Loaded, Loader};
use placement::{OpenGpu, Placement};

use crate::batch::{Executor, WANTED};
use crate::draft_len::{PassCost, Tuner};
use crate::engine::{DrafterKind, Engine, Limits as EngineLimits, Manifest, pass_share};
use crate::exec::cpu::{FloatMode, Pool};
use crate::exec::cuda;
use crate::model::DraftHead;
use crate::pages::PageKey;
use crate::sampling::{Coupling, Sampler, SamplingParams};
use crate::scheduler::{Scheduler, SchedulerConfig};
use crate::sequence::{Limits, Shares};
use crate::{Error, Result};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

pub use crate::batch::Emitted;
pub use crate::draft::{OnStates, Watch};
pub use crate::draft_len::{DraftPolicy, StepShape, StepTime};
pub use crate::draft_source::MAX_DRAFT_BRANCHES;
pub use crate::exec::cpu::{Isa, Pinned, Pinning};
pub use crate::exec::cuda::Prefill;
pub use crate::pages::{PAGE_TOKENS, pages_for};
pub use crate::scheduler::{AdmissionPolicy, Event, Usage};
pub use crate::sequence::{Counters, FinishReason, Sequence, SequenceId};

/// Draft tokens that a request may bring along to an engine without a drafter.
const MAX_GIVEN_LEN: usize = 16;

/// Draft tokens that a request may bring along to an engine of this `max_draft_len`, which is 0 without a drafter.
pub fn max_given_len(max_draft_len: usize) -> usize {
    if max_draft_len == 0 { MAX_GIVEN_LEN } else { max_draft_len }
}

/// What to generate.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The prompt. Requests for several texts of one share it.
    pub prompt: Arc<Vec<u32>>,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Draft tokens in a step at most; `None` is the engine's maximum, 0 is plain decoding.
    pub draft_len: Option<usize>,
    /// Draft as much in every step, whatever that is worth. Else the engine's policy is in force.
    pub fixed_draft_len: bool,
    /// Draft tokens to verify right behind the prompt in place of the drafter's: a guess at how the text
    /// begins, [`max_given_len`] at most.
    pub given_draft: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Go on after the model's end tokens.
    pub ignore_eos: bool,
    /// Further tokens that end the text.
    pub stop_tokens: Vec<u32>,
    /// Lower is served first.
    pub priority: u32,
    /// Its index among requests that are added together, one after the other. They share one turn.
    pub row: usize,
    /// How many these are. They share the KV cache of their beginnings even where others do not.
    pub num_rows: usize,
    /// Only requests with the same salt share the KV cache of their beginnings.
    pub cache_salt: String,
}

/// What a step did.
#[derive(Debug, Default)]
pub struct Step {
    /// Sequences that left the queue for the first time with it.
    pub started: Vec<SequenceId>,
    /// What it brought, at most one event a sequence.
    pub events: Vec<Event>,
    /// What it computed and how long that takes, where it says so.
    pub time: Option<StepTime>,
    /// How long drafters took, where the executor says so.
    pub drafting: Option<Duration>,
    /// Whether there was anything to do.
    pub ran: bool,
    /// Why it failed, if it did. Then each of its sequences has an event that ends it with
    /// `FinishReason::Failed`; all others go on.
    pub failure: Option<Error>,
}

/// An engine pair, loaded and running.
pub struct Runtime {
    scheduler: Scheduler,
    executor: Box<dyn Executor>,
    pool: Arc<Pool>,
    limits: EngineLimits,
    memory: Memory,
    /// Of what the caches and the workspace have not touched yet.
    _promise: Option<Promise>,
    vocab_size: usize,
    end_tokens: Vec<u32>,
    next_id: SequenceId,
    /// The first of the requests that the last one was added with.
    first_row: SequenceId,
    /// Whether requests share the KV cache of their beginnings.
    kv_reuse: bool,
    /// Source of the keys of requests without a seed.
    entropy: RandomState,
    /// Whether the last step was given up.
    gave_up: bool,
}

impl Runtime {
    /// Loads a target and the drafter that it names onto the devices that they were built for.
    pub fn load(target: &Engine, options: &Options) -> Result<Self> {
        Self::load_sharing(target, options, &SharedWeights::default())
    }

    /// As `load`, with the weights that others have loaded with `weights`: instances of a model share one copy.
    pub fn load_sharing(
        target: &Engine,
        options: &Options,
        weights: &SharedWeights,
    ) -> Result<Self> {
        let open = |ordinal| Ok(Box::new(cuda::Driver::open(ordinal)?) as _);
        Self::load_with(target, options, &open, weights, None)
    }

    /// Loads a target alone, without what it drafts with, and has someone look on while it computes.
    pub fn load_watched(target: &Engine, options: &Options, watch: Watch) -> Result<Self> {
        let open = |ordinal| Ok(Box::new(cuda::Driver::open(ordinal)?) as _);
        // What is found in the cache is not computed.
        let options = Options { kv_reuse: false, ..options.clone() };
        Self::load_with(target, &options, &open, &SharedWeights::default(), Some(watch))
    }

    /// As `load_sharing`, with GPUs that `open` gives for their numbers.
    pub(crate) fn load_with(
        target: &Engine,
        options: &Options,
        open: OpenGpu<'_>,
        weights: &SharedWeights,
        watch: Option<Watch>,
    ) -> Result<Self> {
        let draft = if watch.is_some() { None } else { target.open_drafter()? };
        let manifest = target.manifest();
        let mut copies = weights.lock();
        let placement = Placement::new(target, draft.as_ref(), options, open)?;
        let (num_pages, promises) = placement.promise(&manifest.limits, options, &copies)?;
        let loader = Loader {
            placement: &placement,
            num_pages,
            promises: &promises,
            copies: &mut copies,
            watch,
        };
        let Loaded { executor, drafts, looks_up, memory } = loader.load(options.draft_policy)?;
        let limits = manifest.limits.clone();
        let max_draft_len = if drafts { limits.max_draft_len } else { 0 };
        let max_num_tokens =
            limits.max_num_tokens.min(options.max_num_tokens.unwrap_or(usize::MAX));
        let draft_model = draft.as_ref().map(|draft| &draft.manifest().model);
        let (at_once, branches) = (placement.drafts_at_once(), placement.draft_branches);
        let is_part = manifest.drafter.skipped().is_some();
        let rereads = match draft_model.and_then(|model| model.draft_head.as_ref()) {
            // The target has read all but the last token.
            _ if is_part => 1,
            // A model has read its own drafts that were kept, if they were a chain, as every branch is on a GPU.
            None if (branches == 1 || placement.is_on_gpu()) && !at_once => 2,
            // It reads them again; a head does with the target's states.
            None | Some(DraftHead::Eagle(_)) => max_draft_len + 1,
            Some(DraftHead::Medusa(_)) => 1,
        };
        let usual_draft_rows = rereads + if at_once { max_draft_len } else { 0 };
        // Medusa heads read nothing: all that they draft from is the target's last state.
        let drafter_caches = draft_model.is_some_and(|model| model.medusa().is_none());
        let max_tree_tokens = options.draft_tree_tokens.unwrap_or(usize::MAX);
        let config = SchedulerConfig {
            max_batch_size: options.max_batch_size(&limits),
            max_num_tokens,
            max_seq_len: limits.max_seq_len,
            max_draft_len,
            draft_width: placement.draft_branches,
            max_tree_tokens,
            whole_branches: placement.is_on_gpu(),
            num_pages,
            max_queue: options.max_queue,
            admission: options.admission,
            drafter_caches,
            usual_draft_rows,
            lookahead: executor.lookahead(),
            long_prompts: executor.long_prompts(),
            prompt_blocks: executor.prompt_blocks(),
        };
        let draft_costs = draft.as_ref().map(|engine| engine.manifest().costs.as_ref());
        let pass = match (&manifest.drafter, draft_costs) {
            (DrafterKind::Skip { costs: Some(table), .. }, _) | (_, Some(Some(table))) => {
                PassCost::Measured(table)
            }
            (DrafterKind::Skip { layers, costs: None }, _) => {
                let Manifest { model, precision, device, .. } = manifest;
                PassCost::Share(pass_share(layers, model, precision, device))
            }
            (_, Some(None)) => PassCost::Unknown,
            (_, None) => PassCost::Free,
        };
        let tuner = Tuner::new(options.draft_policy, max_draft_len, manifest.costs.as_ref(), pass);
        let tuner = tuner.with_trees_up_to(max_tree_tokens);
        let tuner = if looks_up { tuner.with_lookup() } else { tuner };
        let tuner = if drafter_caches { tuner } else { tuner.without_reading() };
        let tuner = if at_once { tuner.drafting_at_once() } else { tuner };
        let tuner = if placement.drafts_in_graph() { tuner } else { tuner.stopping_early() };
        Ok(Self {
            scheduler: Scheduler::new(config, tuner),
            executor,
            pool: placement.pool,
            limits: EngineLimits { max_draft_len, ..limits },
            memory,
            _promise: promises.kept,
            vocab_size: manifest.model.vocab_size,
            end_tokens: manifest.end_tokens.clone(),
            next_id: 0,
            first_row: 0,
            kv_reuse: options.kv_reuse,
            entropy: RandomState::new(),
            gave_up: false,
        })
    }

    /// Has the calling thread, which is to run the steps, run where the first of the runtime's threads is to run, as
    /// long as what is returned lives.
    pub fn pin_caller(&self) -> Option<Pinned> {
        self.pool.pin_caller()
    }

    /// What the engine was built for.
    pub fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    /// Checks a request and puts it into the queue.
    pub fn add(&mut self, request: Request) -> Result<SequenceId> {
        let Request {
            prompt,
            max_tokens,
            draft_len,
            fixed_draft_len,
            given_draft,
            sampling,
            ignore_eos,
            stop_tokens,
            priority,
            row,
            num_rows,
            cache_salt,
        } = request;
        sampling.validate(self.vocab_size)?;
        check_ids("input_ids", &prompt, self.vocab_size)?;
        check_ids("stop_tokens", &stop_tokens, self.vocab_size)?;
        check_ids("given_draft", &given_draft, self.vocab_size)?;
        self.check_given_len(given_draft.len())?;
        let id = self.next_id;
        let limits = Limits {
            max_tokens,
            end_tokens: self.end_tokens.clone(),
            ignore_eos,
            stop_tokens,
            draft_len: draft_len.unwrap_or(self.limits.max_draft_len),
            is_fixed: fixed_draft_len,
            priority,
            row,
        };
        let coupling = match sampling.seed {
            Some(seed) => Coupling::Path(seed),
            None => Coupling::Independent(self.entropy.hash_one(id)),
        };
        let mut held_back = self.end_tokens.clone();
        if sampling.min_tokens > 0 {
            held_back.extend(&limits.stop_tokens);
        }
        check_some_allowed(&sampling, &held_back, &limits)?;
        let sampler = Sampler::new(sampling, coupling, held_back);
        let sequence = Sequence::new(id, prompt, sampler, limits);
        let first_row = if row == 0 { id } else { self.first_row };
        let shares = match PageKey::of_salt(cache_salt.as_bytes()) {
            Some(salt) if self.kv_reuse => Shares::Behind(salt),
            None if self.kv_reuse => Shares::All,
            _ if num_rows > 1 => Shares::Behind(self.key_of_rows(first_row)),
            _ => Shares::NoOne,
        };
        self.scheduler.add(Sequence { given: given_draft, shares, ..sequence })?;
        self.first_row = first_row;
        self.next_id += 1;
        Ok(id)
    }

    /// A key that no other request has.
    fn key_of_rows(&self, first_row: SequenceId) -> PageKey {
        let secret = self.entropy.hash_one((first_row, "rows"));
        PageKey::of_pair(first_row, secret)
    }

    fn check_given_len(&self, len: usize) -> Result<()> {
        let max = max_given_len(self.limits.max_draft_len);
        if len > max {
            let message = format!("{len} tokens, at most {max} are verified at once");
            return Err(Error::bad_request("given_draft", message));
        }
        Ok(())
    }

    /// Runs one step and tells what it brought. Does nothing when there is nothing to do. An executor
    /// that fails ends the sequences of the step; the next step is as good as any.
    pub fn step(&mut self) -> Step {
        self.step_unless(&|| false)
    }

    /// As `step`. One that only computes parts of long prompts is given up when `somebody_came` says so, so that they need
    /// not wait for it; never two in a row, so that there is always progress.
    pub fn step_unless(&mut self, somebody_came: &dyn Fn() -> bool) -> Step {
        let _mode = FloatMode::enter();
        let schedule = self.scheduler.schedule();
        for &id in &schedule.forgotten {
            self.executor.forget(id);
        }
        if schedule.parts.is_empty() {
            return Step::default();
        }
        let entries = self.scheduler.entries(&schedule);
        let gives_way = schedule.gives_way && !self.gave_up;
        let stepped = self.executor.step(&entries, if gives_way { somebody_came } else { WANTED });
        self.gave_up = matches!(stepped, Ok(None));
        let mut step = Step { ran: true, ..Step::default() };
        match stepped {
            Ok(Some(stepped)) => {
                step.drafting = stepped.drafting;
                (step.events, step.time) = self.scheduler.commit(&schedule, stepped);
            }
            Ok(None) => self.scheduler.give_up(&schedule),
            Err(error) => {
                step.events = self.scheduler.fail(&schedule);
                step.failure = Some(error);
            }
        }
        step.started = schedule.started;
        step
    }

    /// Ends a sequence that is no longer wanted, waiting or running; its pages are free at once. Gives
    /// what there is of it; no event follows.
    pub fn cancel(&mut self, id: SequenceId) -> Option<Sequence> {
        self.finish(id, FinishReason::Cancelled)
    }

    /// As `cancel`, for a reason that the caller found.
    pub fn finish(&mut self, id: SequenceId, reason: FinishReason) -> Option<Sequence> {
        self.scheduler.finish(id, reason)
    }

    /// Puts a sequence that waits for its first turn behind all others of its priority.
    pub fn delay(&mut self, id: SequenceId) {
        self.scheduler.delay(id);
    }

    /// How full it is.
    pub fn usage(&self) -> Usage {
        self.scheduler.usage()
    }

    /// What it holds in memory for as long as it lives.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Whether nothing runs or waits.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_idle()
    }
}

/// Refuses what allows nothing but ends of a text that is not to end yet: one of them would be taken.
fn check_some_allowed(sampling: &SamplingParams, held_back: &[u32], limits: &Limits) -> Result<()> {
    let Some(allowed) = sampling.allowed_tokens.as_deref().filter(|_| sampling.min_tokens > 0)
    else {
        return Ok(());
    };
    let is_end = |token: &u32| {
        limits.stop_tokens.contains(token)
            || (!limits.ignore_eos && limits.end_tokens.contains(token))
    };
    let is_bad = |token: &u32| sampling.bad_words.iter().any(|word| word[..] == [*token]);
    let is_banned = |token: &u32| held_back.contains(token) || is_bad(token);
    if allowed.iter().all(is_banned) && allowed.iter().any(is_end) {
        let message = format!(
            "each of the {} ends the text or is a bad word, min_tokens is {}",
            allowed.len(),
            sampling.min_tokens
        );
        return Err(Error::bad_request("allowed_tokens", message));
    }
    Ok(())
}

fn check_ids(field: &'static str, ids: &[u32], vocab_size: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        Some(id) => {
            Err(Error::bad_request(field, format!("token {id}, the vocabulary has {vocab_size}")))
        }
        None => Ok(()),
    }
}
