//! Where target and drafter run, and what they are promised of what is free of the memory there.

mod footprint;

pub use footprint::Footprint;

use footprint::{CPU_FRACTION, CPU_RESERVE, GPU_FRACTION, GPU_RESERVE};

use super::ledger::{Decision, Ledger, Promise, Turns};
use super::lookup::Lookup;
use super::memory::{self, Free, MemoryType, Source};
use super::shared::{Copies, Key};
use super::{MAX_DRAFT_BRANCHES, MAX_GIVEN_LEN, Options};
use crate::engine::{Device as Built, Engine, Limits, Manifest, Precision};
use crate::exec::cpu::{self, Isa, Pool};
use crate::exec::cuda::device::Device;
use crate::exec::cuda::{self, Gpu, Prefill};
use crate::exec::{Host, StepBounds};
use crate::machine::Headroom;
use crate::model::ModelConfig;
use crate::pages::{PAGE_TOKENS, pages_for};
use crate::{Error, Result};
use std::sync::Arc;

/// Opens the GPU of a number.
pub(crate) type OpenGpu<'a> = &'a dyn Fn(usize) -> Result<Box<dyn Device>>;

/// Where one engine runs.
#[derive(Clone)]
pub(super) enum Place {
    Cpu,
    /// The GPU with this number.
    Gpu(usize, Gpu),
}

/// The engines of a runtime, each with its place: the target's first, then the drafter's.
pub(super) struct Placement<'a> {
    pub(super) engines: Vec<(&'a Engine, Place)>,
    pub(super) isa: Isa,
    pub(super) pool: Arc<Pool>,
    pub(super) prefill: Prefill,
    pub(super) launch_ahead: bool,
    pub(super) ngram_branches: usize,
    /// Of a model's drafts; one where anything is on a GPU.
    pub(super) draft_branches: usize,
    pub(super) lookup: Option<Lookup>,
    pub(super) open: OpenGpu<'a>,
    /// How large steps may be.
    pub(super) bounds: StepBounds,
}

/// Memory that a runtime has been promised.
pub(super) struct Promises {
    /// Weights in the machine's memory: until they are there.
    pub(super) weights: Option<Promise>,
    /// Caches and workspace in the machine's memory, which are touched little by little: as long as the runtime lives.
    pub(super) kept: Option<Promise>,
    /// What is allocated on GPUs, until it is.
    on_gpus: Vec<Promise>,
    _turns: Turns,
}

impl<'a> Placement<'a> {
    /// Opens what the engines were built for.
    pub(super) fn new(
        target: &'a Engine,
        draft: Option<&'a Engine>,
        options: &Options,
        open: OpenGpu<'a>,
    ) -> Result<Self> {
        let ordinals = [options.gpu, options.draft_gpu.unwrap_or(options.gpu)];
        let mut engines: Vec<(&Engine, Place)> = Vec::new();
        for (engine, ordinal) in [Some(target), draft].into_iter().flatten().zip(ordinals) {
            let opened = engines.iter().find_map(|(_, place)| match place {
                Place::Gpu(number, gpu) if *number == ordinal => Some(gpu.clone()),
                _ => None,
            });
            let place = match (&engine.manifest().device, opened) {
                (Built::Cpu, _) => Place::Cpu,
                (Built::Cuda { .. }, Some(gpu)) => Place::Gpu(ordinal, gpu),
                (Built::Cuda { archs, .. }, None) => {
                    let device =
                        open(ordinal).map_err(|error| cannot_open(engine, archs, &error))?;
                    Place::Gpu(ordinal, Gpu::new(device))
                }
            };
            engines.push((engine, place));
        }
        if let Some(prefill) = options.prefill {
            check_prefill(prefill, &engines)?;
        }
        // Only a CPU's engines compute with it.
        let pool = match engines.iter().any(|(_, place)| place.number().is_none()) {
            true => Pool::on_machine(options.threads, options.pinning),
            false => Pool::new(1),
        };
        // On a CPU, or in the graph of a step on the GPU that both are on.
        let mut numbers = engines.iter().map(|(_, place)| place.number());
        let at = numbers.next().flatten();
        let is_here =
            is_skipping(target.manifest()) || numbers.next().is_some_and(|drafter| drafter == at);
        let most_branches = if is_here { MAX_DRAFT_BRANCHES } else { 1 };
        let draft_branches = options.draft_branches.clamp(1, most_branches);
        let drafter = draft.map(Engine::manifest);
        let bounds = step_bounds(target.manifest(), drafter, draft_branches, options);
        Ok(Self {
            draft_branches,
            prefill: options.prefill.unwrap_or_else(|| prefill(&engines, &bounds)),
            engines,
            isa: options.isa.unwrap_or_else(Isa::detect),
            pool: Arc::new(pool),
            launch_ahead: options.launch_ahead,
            ngram_branches: options.ngram_branches.max(1),
            lookup: options.lookup,
            open,
            bounds,
        })
    }

    /// Decides how many KV pages there are to be, and has all that the engines take promised: nobody else can be
    /// promised the same while it is loaded.
    pub(super) fn promise(
        &self,
        limits: &Limits,
        options: &Options,
        copies: &Copies,
    ) -> Result<(usize, Promises)> {
        let turns = Turns::wait(self.engines.iter().filter_map(|(_, place)| place.shared_number()));
        let mut decision = Ledger::of_process().decide();
        let sources = self.sources(&decision, copies)?;
        let num_pages = memory::num_pages(limits, &sources, options)?;
        let mut promises =
            Promises { weights: None, kept: None, on_gpus: Vec::new(), _turns: turns };
        for Source { memory, weight_bytes, working_bytes, page_bytes, .. } in sources {
            let mut promise = |bytes| decision.promise(memory, bytes);
            let kept = working_bytes + num_pages * page_bytes;
            match memory {
                MemoryType::Gpu(_) => promises.on_gpus.push(promise(weight_bytes + kept)),
                MemoryType::Cpu | MemoryType::Pinned => {
                    promises.weights = Some(promise(weight_bytes));
                    promises.kept = Some(promise(kept));
                }
            }
        }
        Ok((num_pages, promises))
    }

    /// The memories that are used, one for each device.
    fn sources(&self, decision: &Decision<'_>, copies: &Copies) -> Result<Vec<Source>> {
        let mut sources: Vec<Source> = Vec::new();
        for idx in 0..self.engines.len() {
            let (engine, place) = &self.engines[idx];
            let memory = place.memory();
            let known = sources.iter().position(|source| source.memory == memory);
            let at = match known {
                Some(at) => at,
                None => {
                    sources.push(self.source(place, decision)?);
                    sources.len() - 1
                }
            };
            let source = &mut sources[at];
            source.page_bytes += page_bytes_of(engine);
            source.working_bytes += self.working_bytes(idx);
            source.weight_bytes += self.weight_bytes(idx, copies);
        }
        Ok(sources)
    }

    /// A memory before anything is loaded.
    fn source(&self, place: &Place, decision: &Decision<'_>) -> Result<Source> {
        let memory = place.memory();
        // First: what is touched meanwhile then counts twice, and not at all the other way round.
        let promised = decision.outstanding(memory);
        let (free, fraction, working_bytes) = match place {
            Place::Cpu => {
                let free = Headroom::now().map(|Headroom { bytes, bound }| Free {
                    bytes: bytes.saturating_sub(promised + CPU_RESERVE),
                    promised,
                    reserve: CPU_RESERVE,
                    bound: bound.to_string(),
                });
                (free, CPU_FRACTION, Host::step_bytes(&self.bounds))
            }
            Place::Gpu(_, gpu) => {
                let free = Free {
                    bytes: gpu.lock().available_bytes()?.saturating_sub(promised + GPU_RESERVE),
                    promised,
                    reserve: GPU_RESERVE,
                    bound: "of its memory".into(),
                };
                (Some(free), GPU_FRACTION, 0)
            }
        };
        Ok(Source { memory, weight_bytes: 0, working_bytes, page_bytes: 0, free, fraction })
    }

    /// Bytes of weights that an engine has to bring to its place: none that are there, or come with the target.
    fn weight_bytes(&self, idx: usize, copies: &Copies) -> usize {
        let (engine, place) = &self.engines[idx];
        let key = self.key(idx);
        if (0..idx).any(|earlier| self.key(earlier) == key) {
            return 0;
        }
        match place {
            Place::Cpu if copies.cpu.get(&key).is_none() => cpu::Weights::bytes(engine),
            Place::Gpu(..) if copies.gpu.get(&key).is_none() => cuda::Weights::bytes(engine),
            _ => 0,
        }
    }

    /// Pages that an engine's cache has on a GPU besides those of sequences: for branches of what is drafted in a step's
    /// graph, and behind them for branches of trees, which are the target's alone.
    pub(super) fn scratch_pages(&self, idx: usize) -> usize {
        if self.engines[idx].1.number().is_none() {
            return 0;
        }
        let StepBounds { sequences, drafts, .. } = self.bounds;
        // A branch begins with the page that the first draft is in.
        let of_tree = pages_for(PAGE_TOKENS - 1 + drafts);
        let of_trees = sequences * (self.ngram_branches - 1) * of_tree;
        self.branch_pages() + if idx == 0 { of_trees } else { 0 }
    }

    /// Those for what is drafted in a step's graph.
    pub(super) fn branch_pages(&self) -> usize {
        cuda::branch_pages(&self.engines[0].0.manifest().limits, self.draft_branches)
    }

    /// Whether the target is on a GPU.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.engines[0].1.number().is_some()
    }

    /// Whether drafts are made in the graph of a step, which runs all of its passes whatever they bring.
    pub(super) fn drafts_in_graph(&self) -> bool {
        let (target, place) = &self.engines[0];
        let beside = self.engines.get(1).map(|(_, drafter)| drafter.number());
        let is_here = is_skipping(target.manifest()) || beside == Some(place.number());
        self.is_on_gpu() && is_here
    }

    /// Whether all drafts of a step come from one pass of the drafter.
    pub(super) fn drafts_at_once(&self) -> bool {
        self.engines.get(1).is_some_and(|(engine, _)| engine.manifest().model.drafts_at_once())
    }

    /// Rows of a pass of an engine: a drafter that has fallen behind catches up in passes of any length.
    pub(super) fn rows(&self, idx: usize) -> usize {
        rows(&self.bounds, idx)
    }

    /// By which weights are shared.
    pub(super) fn key(&self, idx: usize) -> Key {
        let (engine, place) = &self.engines[idx];
        (engine.manifest().identity.clone(), place.number())
    }

    /// Tokens that both models have.
    pub(super) fn shared_vocab(&self) -> usize {
        let sizes = self.engines.iter().map(|(engine, _)| engine.manifest().model.vocab_size);
        sizes.min().unwrap_or(0)
    }

    /// The same where the drafter is a model on the target's GPU, else 0.
    fn vocab_on_gpu(&self) -> usize {
        let mut numbers = self.engines.iter().map(|(_, place)| place.number());
        let target = numbers.next().flatten();
        let is_here = is_skipping(self.engines[0].0.manifest()) || numbers.next() == Some(target);
        let is_shared = target.is_some() && is_here;
        if is_shared { self.shared_vocab() } else { 0 }
    }
}

/// Models on GPUs. Heads have no blocks of prompts.
fn models_on_gpus<'a>(
    engines: &'a [(&'a Engine, Place)],
) -> impl Iterator<Item = (&'a Engine, &'a Gpu)> {
    let on_gpu = |(engine, place): &'a (&'a Engine, Place)| match place {
        Place::Gpu(_, gpu) if engine.manifest().model.draft_head.is_none() => Some((*engine, gpu)),
        Place::Gpu(..) | Place::Cpu => None,
    };
    engines.iter().filter_map(on_gpu)
}

/// Refuses a way to compute long prompts that is named and not there.
fn check_prefill(prefill: Prefill, engines: &[(&Engine, Place)]) -> Result<()> {
    let name = match prefill {
        Prefill::Exact => return Ok(()),
        Prefill::Blocks => "blocks",
        Prefill::CublasLt => "cublaslt",
    };
    if engines.iter().all(|(_, place)| place.number().is_none()) {
        let message = format!("prefill = {name} on an engine that was built for the cpu");
        return Err(Error::Unsupported(message));
    }
    for (_, gpu) in models_on_gpus(engines).filter(|_| prefill == Prefill::Blocks) {
        let (major, minor) = gpu.lock().describe().capability;
        if !cuda::multiplies_blocks((major, minor)) {
            let message = format!(
                "prefill = blocks on a GPU of compute capability {major}.{minor}, expected 9.0: use auto or cublaslt"
            );
            return Err(Error::Unsupported(message));
        }
    }
    Ok(())
}

/// Who multiplies the rows of long prompts where nothing is said and a step has the rows of a block: the kernels here, if
/// they can on all GPUs that have models, or a library, if it can for all models.
fn prefill(engines: &[(&Engine, Place)], bounds: &StepBounds) -> Prefill {
    if bounds.rows < cuda::BLOCK_LEN {
        return Prefill::Exact;
    }
    let multiplies = |gpu: &Gpu| cuda::multiplies_blocks(gpu.lock().describe().capability);
    if models_on_gpus(engines).all(|(_, gpu)| multiplies(gpu)) {
        return Prefill::Blocks;
    }
    for (engine, gpu) in models_on_gpus(engines) {
        let enabled = cuda::Model::enable_library(engine.manifest(), &mut **gpu.lock());
        if let Err(error) = enabled {
            eprintln!("prompts are computed a few rows at a time, which is slower: {error}");
            return Prefill::Exact;
        }
    }
    Prefill::CublasLt
}

/// Whether a target drafts by itself, with some of its layers.
fn is_skipping(target: &Manifest) -> bool {
    target.drafter.skipped().is_some()
}

/// Rows of its passes that go together, at most.
pub(super) fn part_rows(bounds: &StepBounds) -> usize {
    bounds.rows.min(bounds.sequences * bounds.drafts.max(1))
}

/// Rows of a pass of an engine, the target's being the first.
fn rows(bounds: &StepBounds, idx: usize) -> usize {
    if idx == 0 { bounds.rows } else { usize::MAX }
}

/// How large steps of the target may be.
fn step_bounds(
    manifest: &Manifest,
    draft: Option<&Manifest>,
    draft_branches: usize,
    options: &Options,
) -> StepBounds {
    let limits = &manifest.limits;
    let sequences = options.max_batch_size(limits);
    StepBounds {
        rows: limits.max_num_tokens.min(options.max_num_tokens.unwrap_or(usize::MAX)),
        sequences,
        drafts: (draft_branches * limits.max_draft_len).max(MAX_GIVEN_LEN),
        vocab_size: manifest.model.vocab_size,
        draft_vocab: match draft {
            Some(draft) => draft.model.vocab_size,
            None if is_skipping(manifest) => manifest.model.vocab_size,
            None => 0,
        },
    }
}

/// Bytes of one page of the KV cache of an engine that was built for `device`.
pub fn page_bytes(model: &ModelConfig, precision: &Precision, device: &Built) -> usize {
    match device {
        Built::Cpu => {
            let beside = model.eagle().map_or(0, |_| cpu::Eagle::page_end_bytes(model));
            let (layers, heads) = (model.num_layers, model.num_kv_heads);
            cpu::kv::KvCache::page_bytes(precision.kv, layers, heads, model.head_dim) + beside
        }
        Built::Cuda { .. } => cuda::model::kv::page_bytes(precision.kv, model),
    }
}

fn page_bytes_of(engine: &Engine) -> usize {
    let manifest = engine.manifest();
    page_bytes(&manifest.model, &manifest.precision, &manifest.device)
}

/// An engine whose device is not there.
fn cannot_open(engine: &Engine, archs: &[String], error: &Error) -> Error {
    let (path, archs) = (engine.path().display(), archs.join(","));
    Error::BadEngine(format!("engine {path}: built for cuda:{archs}: {error}"))
}

impl Place {
    /// Number of the GPU.
    pub(super) fn number(&self) -> Option<usize> {
        match self {
            Self::Cpu => None,
            Self::Gpu(number, _) => Some(*number),
        }
    }

    /// The same of one whose memory others in this process have a share of.
    fn shared_number(&self) -> Option<usize> {
        match self {
            Self::Gpu(number, gpu) if gpu.lock().shares_memory() => Some(*number),
            Self::Gpu(..) | Self::Cpu => None,
        }
    }

    pub(super) fn memory(&self) -> MemoryType {
        self.number().map_or(MemoryType::Cpu, MemoryType::Gpu)
    }
}
