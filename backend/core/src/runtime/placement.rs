//! Where target and drafter run, what memory they find there, and their models once loaded.

use super::Options;
use super::memory::{self, Source};
use crate::adapt::DraftPolicy;
use crate::batch::{Executor, Forward};
use crate::draft::{self, Drafter};
use crate::engine::{Device as Built, DrafterKind, Engine};
use crate::exec::Host;
use crate::exec::cpu::{self, Isa, Pool};
use crate::exec::cuda::device::Device;
use crate::exec::cuda::{self, Gpu, ManyRows, OnHost, Weights};
use crate::{Error, Result};
use std::sync::Arc;

/// Repeated tokens before which the adaptive policy looks up the draft instead of running the drafter model:
/// from the longest to the shortest. Shorter repeats are right too seldom to beat the model.
const MAX_LOOKUP: usize = 5;
const MIN_LOOKUP: usize = 3;

/// Part of the machine's free memory that the KV caches may take where nothing is said.
const CPU_FRACTION: f64 = 0.25;
/// Part of a GPU's memory beside weights and workspace.
const GPU_FRACTION: f64 = 0.9;

/// Bytes of a GPU's memory that nobody plans: code, graphs, and what the driver rounds up.
const GPU_RESERVE: usize = 512 << 20;

/// Opens the GPU of a number.
pub type OpenGpu<'a> = &'a dyn Fn(usize) -> Result<Box<dyn Device>>;

/// Where one engine runs.
#[derive(Clone)]
enum Place {
    Cpu,
    /// The GPU with this number.
    Gpu(usize, Gpu),
}

/// The engines of a runtime, each with its place.
pub(super) struct Placement<'a> {
    engines: Vec<(&'a Engine, Place)>,
    isa: Isa,
    pool: Arc<Pool>,
    many_rows: ManyRows,
    launch_ahead: bool,
}

impl<'a> Placement<'a> {
    /// Opens what the engines were built for: the target's first, then the drafter's.
    pub(super) fn new(
        target: &'a Engine,
        draft: Option<&'a Engine>,
        options: &Options,
        open: OpenGpu<'_>,
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
        let has_gpu = engines.iter().any(|(_, place)| place.number().is_some());
        if options.many_rows == ManyRows::CublasLt && !has_gpu {
            let message = "prefill = cublaslt on an engine that was built for the cpu";
            return Err(Error::Unsupported(message.into()));
        }
        let threads = options.threads.unwrap_or_else(super::num_cores);
        Ok(Self {
            engines,
            isa: options.isa.unwrap_or_else(Isa::detect),
            pool: Arc::new(Pool::new(threads)),
            many_rows: options.many_rows,
            launch_ahead: options.launch_ahead,
        })
    }

    /// The memories that pages come from, one for each device.
    pub(super) fn sources(&self) -> Result<Vec<Source>> {
        let mut sources: Vec<(Option<usize>, Source)> = Vec::new();
        for (idx, (engine, place)) in self.engines.iter().enumerate() {
            let number = place.number();
            if sources.iter().all(|(other, _)| *other != number) {
                sources.push((number, place.source()?));
            }
            for (_, source) in sources.iter_mut().filter(|(other, _)| *other == number) {
                source.page_bytes += memory::page_bytes(engine);
                let taken = self.fixed_bytes(idx);
                source.available = source.available.map(|bytes| bytes.saturating_sub(taken));
            }
        }
        Ok(sources.into_iter().map(|(_, source)| source).collect())
    }

    /// Loads the models, with caches of `num_pages`, and puts them together with the drafters that the target
    /// names. Tells whether anything drafts.
    pub(super) fn executor(
        &self,
        num_pages: usize,
        policy: DraftPolicy,
    ) -> Result<(Box<dyn Executor>, bool)> {
        let engine = self.engines[0].0;
        let target = self.load(0, num_pages)?;
        let draft = (self.engines.len() > 1).then(|| self.load(1, num_pages)).transpose()?;
        let lookup = || lookup(&engine.manifest().drafter, policy);
        let drafts = lookup().is_some() || draft.is_some();
        let steps = self.steps(&target, draft.as_ref(), lookup());

        let draft = draft.map(|draft| draft::Model::new(draft.forward(), self.shared_vocab()));
        let drafter: Option<Box<dyn Drafter>> = match (lookup(), draft) {
            (Some(lookup), Some(model)) => Some(Box::new(draft::Combined::new(lookup, model))),
            (Some(lookup), None) => Some(Box::new(lookup)),
            (None, Some(model)) => Some(Box::new(model)),
            (None, None) => None,
        };
        let host = Host::new(target.forward(), drafter);
        Ok(match steps {
            Some(steps) => (Box::new(cuda::Steps::new(engine, steps, host)?), drafts),
            None => (Box::new(host), drafts),
        })
    }

    /// What whole steps on a GPU take: the target is there, and so is the drafter, if it is a model.
    fn steps(
        &self,
        target: &Loaded,
        draft: Option<&Loaded>,
        lookup: Option<draft::Ngram>,
    ) -> Option<cuda::OnGpu> {
        let Loaded::Gpu(target, number, gpu) = target else { return None };
        let draft = match draft {
            None => None,
            Some(Loaded::Gpu(model, at, _)) if at == number => {
                let vocab_size = self.shared_vocab();
                Some(cuda::DraftModel { model: Arc::clone(model), vocab_size })
            }
            // Drafts from elsewhere come through the host.
            Some(_) => return None,
        };
        let (gpu, target) = (gpu.clone(), Arc::clone(target));
        Some(cuda::OnGpu { gpu, target, lookup, draft, launch_ahead: self.launch_ahead })
    }

    fn load(&self, idx: usize, num_pages: usize) -> Result<Loaded> {
        let (engine, place) = &self.engines[idx];
        Ok(match place {
            Place::Cpu => {
                let pool = Arc::clone(&self.pool);
                Loaded::Cpu(Box::new(cpu::Model::load(engine, num_pages, self.isa, pool)?))
            }
            Place::Gpu(number, gpu) => {
                let device = &mut **gpu.lock();
                let model = cuda::Model::load_with(engine, num_pages, self.many_rows, device)?;
                Loaded::Gpu(Arc::new(model), *number, gpu.clone())
            }
        })
    }

    /// Tokens that both models have.
    fn shared_vocab(&self) -> usize {
        let sizes = self.engines.iter().map(|(engine, _)| engine.manifest().model.vocab_size);
        sizes.min().unwrap_or(0)
    }

    /// The same where the drafter is a model on the target's GPU, else 0.
    fn vocab_on_gpu(&self) -> usize {
        let mut numbers = self.engines.iter().map(|(_, place)| place.number());
        let target = numbers.next().flatten();
        let is_shared = target.is_some() && numbers.next() == Some(target);
        if is_shared { self.shared_vocab() } else { 0 }
    }

    /// Bytes that an engine takes on its GPU besides its cache; those on the CPU are mapped or swapped.
    fn fixed_bytes(&self, idx: usize) -> usize {
        let (engine, place) = &self.engines[idx];
        let Place::Gpu(_, gpu) = place else { return 0 };
        let manifest = engine.manifest();
        let passes = cuda::Model::working_bytes(engine, self.many_rows, gpu.lock().describe());
        let steps = if idx == 0 { cuda::Steps::bytes(manifest, self.vocab_on_gpu()) } else { 0 };
        Weights::bytes(engine) + passes + steps
    }
}

/// A model where it runs.
enum Loaded {
    Cpu(Box<cpu::Model>),
    /// On the GPU with this number.
    Gpu(Arc<cuda::Model>, usize, Gpu),
}

impl Loaded {
    /// For the executor on the host.
    fn forward(self) -> Box<dyn Forward> {
        match self {
            Self::Cpu(model) => model,
            Self::Gpu(model, _, gpu) => Box::new(OnHost::new(model, gpu)),
        }
    }
}

/// An engine whose device is not there.
fn cannot_open(engine: &Engine, archs: &[String], error: &Error) -> Error {
    let (path, archs) = (engine.path().display(), archs.join(","));
    Error::BadEngine(format!("engine {path}: built for cuda:{archs}: {error}"))
}

/// The look-up of an engine without a model to draft with; beside a model, the adaptive policy has one too.
fn lookup(kind: &DrafterKind, policy: DraftPolicy) -> Option<draft::Ngram> {
    match (kind, policy) {
        (DrafterKind::Ngram { max_ngram, min_ngram }, _) => {
            Some(draft::Ngram::new(*max_ngram, *min_ngram))
        }
        (DrafterKind::Model(_), DraftPolicy::Adaptive) => {
            Some(draft::Ngram::new(MAX_LOOKUP, MIN_LOOKUP))
        }
        _ => None,
    }
}

impl Place {
    /// Number of the GPU.
    fn number(&self) -> Option<usize> {
        match self {
            Self::Cpu => None,
            Self::Gpu(number, _) => Some(*number),
        }
    }

    /// Its memory before anything is loaded.
    fn source(&self) -> Result<Source> {
        let (available, fraction, is_hard) = match self {
            Self::Cpu => (memory::available_memory(), CPU_FRACTION, false),
            Self::Gpu(_, gpu) => {
                let free = gpu.lock().available_bytes()?;
                (Some(free.saturating_sub(GPU_RESERVE)), GPU_FRACTION, true)
            }
        };
        Ok(Source { page_bytes: 0, available, fraction, is_hard })
    }
}
