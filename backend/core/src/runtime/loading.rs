//! From engines with their places to an executor: weights are brought to where they are used, or found there, and
//! target and drafter are put together.

use super::lookup::Settled;
use super::memory::{Memory, MemoryType, WeightCopy};
use super::placement::{Place, Placement, Promises, part_rows};
use super::shared::{Copies, Numbered};
use crate::batch::{Executor, Forward};
use crate::draft::{self, Drafter, Watch};
use crate::draft_len::DraftPolicy;
use crate::exec::Host;
use crate::exec::cpu::{self, Resources};
use crate::exec::cuda::device::Device;
use crate::exec::cuda::{
    self, DraftModel, Gpu, GraphDrafter, HeadDrafter, HeadOnHost, Held, MedusaDrafter,
    MedusaOnHost, OnHost, PartOfTarget, Uploaded,
};
use crate::exec::vocab_map;
use crate::model::{DraftHead, LayerSkip};
use crate::pages::PageId;
use crate::{Error, Result};
use std::ops::Range;
use std::sync::Arc;

/// An executor, and what it took.
pub(super) struct Loaded {
    pub(super) executor: Box<dyn Executor>,
    /// Whether anything drafts.
    pub(super) drafts: bool,
    /// Whether drafts are looked up, before a model is asked or without one.
    pub(super) looks_up: bool,
    pub(super) memory: Memory,
}

/// A model where it runs.
enum Model {
    Cpu(Box<cpu::Model>),
    /// A head on the target's hidden states, on a CPU.
    Eagle(Box<cpu::Eagle>),
    /// The same, of Medusa.
    Medusa(Box<cpu::Medusa>),
    /// On the GPU with this number.
    Gpu(Arc<cuda::Model>, usize, Gpu),
    /// A head on the target's hidden states, on a GPU.
    EagleOnGpu(Arc<cuda::Eagle>, usize, Gpu),
    /// The same, of Medusa, on the GPU of their target.
    MedusaOnGpu(Arc<cuda::Medusa>, Gpu),
    /// The target without some layers, where it runs.
    Part(Box<dyn Forward>, LayerSkip),
}

/// Loads the engines of a placement.
pub(super) struct Loader<'a> {
    pub(super) placement: &'a Placement<'a>,
    pub(super) num_pages: usize,
    pub(super) promises: &'a Promises,
    pub(super) copies: &'a mut Copies,
    /// Who looks on in place of what drafts.
    pub(super) watch: Option<Watch>,
}

impl Loader<'_> {
    /// Loads the models and puts them together with the drafters that the target names.
    pub(super) fn load(mut self, policy: DraftPolicy) -> Result<Loaded> {
        let placement = self.placement;
        let engine = placement.engines[0].0;
        let mut memory = Memory::default();
        let target = self.model(0, None, &mut memory)?;
        let has_draft = placement.engines.len() > 1;
        let draft = has_draft.then(|| self.model(1, Some(&target), &mut memory)).transpose()?;
        let draft = match engine.manifest().drafter.skipped() {
            Some(layers) if self.watch.is_none() => target.without(layers, placement),
            _ => draft,
        };
        let watch = self.watch.take();
        let lookup = match &watch {
            None => Settled::of(&engine.manifest().drafter, placement.lookup, policy)?,
            Some(_) => None,
        };
        let looks_up = lookup.is_some();
        let drafts = looks_up || draft.is_some();
        // A step that is all on a GPU tells nobody what is in between.
        let mut steps = match &watch {
            None => self.steps(&target, draft.as_ref())?,
            Some(_) => None,
        };
        let lookup = lookup.map(|lookup| {
            let (all, rest) = lookup.drafters(placement.ngram_branches);
            match &mut steps {
                // Asked ahead of the host, about all sequences.
                Some(steps) => {
                    steps.first = Some(all);
                    rest
                }
                None => all,
            }
        });

        let head = draft.as_ref().and_then(|draft| draft.head_beside(&target));
        let is_told_states = head.is_some();
        let draft = draft.map(|draft| draft.drafter(placement, is_told_states)).transpose()?;
        let drafter: Option<Box<dyn Drafter>> = match (lookup, draft) {
            (Some(lookup), Some(next)) => Some(Box::new(draft::Combined::new(lookup, next))),
            (lookup, draft) => lookup.or(draft),
        };
        let drafter = drafter.or_else(|| watch.map(|watch| Box::new(watch) as _));
        let first = (self.num_pages + placement.branch_pages()) as PageId;
        let scratch = first..(self.num_pages + placement.scratch_pages(0)) as PageId;
        let Some(target) = target.forward(scratch, head) else {
            return Err(Error::Unsupported("a head on hidden states as the target".into()));
        };
        let host = Host::new(target, drafter)?;
        let executor: Box<dyn Executor> = match steps {
            Some(steps) => Box::new(cuda::Steps::new(engine, steps, host)?),
            None => Box::new(host),
        };
        memory.own = self.own();
        Ok(Loaded { executor, drafts, looks_up, memory })
    }

    /// What whole steps on a GPU take: the target is there, and so is the drafter, if it is a model.
    fn steps(&self, target: &Model, draft: Option<&Model>) -> Result<Option<cuda::OnGpu>> {
        let Model::Gpu(target, number, gpu) = target else { return Ok(None) };
        let limits = &self.placement.engines[0].0.manifest().limits;
        let limits = cuda::step_limits(limits, self.placement.draft_branches);
        let drafter: Option<Box<dyn GraphDrafter>> = match draft {
            None => None,
            Some(Model::Gpu(model, at, _)) if at == number => {
                let vocab_map = vocab_map::of(self.placement.engines[1].0)?;
                let (model, vocab_map) = (Arc::clone(model), vocab_map.as_deref());
                let vocab_size = self.placement.shared_vocab();
                let device = &mut **gpu.lock();
                let drafter = DraftModel::new(model, vocab_size, vocab_map, &limits, device)?;
                Some(Box::new(drafter))
            }
            Some(Model::EagleOnGpu(head, at, _)) if at == number => {
                let head = Arc::clone(head);
                Some(Box::new(HeadDrafter::new(head, &limits, &mut **gpu.lock())?))
            }
            Some(Model::Part(_, skip)) => {
                let (target, skip) = (Arc::clone(target), skip.clone());
                Some(Box::new(PartOfTarget { target, skip }))
            }
            Some(Model::MedusaOnGpu(heads, ..)) => {
                let heads = Arc::clone(heads);
                Some(Box::new(MedusaDrafter::new(heads, &limits, &mut **gpu.lock())?))
            }
            // Drafts from elsewhere come through the host.
            Some(_) => return Ok(None),
        };
        let (gpu, target) = (gpu.clone(), Arc::clone(target));
        let Placement { launch_ahead, draft_branches: branches, .. } = *self.placement;
        let first = self.num_pages as PageId;
        let branch_pages = first..first + self.placement.branch_pages() as PageId;
        let first = None;
        Ok(Some(cuda::OnGpu { gpu, target, first, drafter, launch_ahead, branches, branch_pages }))
    }

    /// Loads an engine, and tells what weights it has. A drafter may need its target.
    fn model(&mut self, idx: usize, target: Option<&Model>, memory: &mut Memory) -> Result<Model> {
        match &self.placement.engines[idx].1 {
            Place::Cpu => self.on_cpu(idx, memory),
            Place::Gpu(number, gpu) => {
                let (number, gpu) = (*number, gpu.clone());
                self.on_gpu(idx, number, &gpu, target, memory)
            }
        }
    }

    fn on_cpu(&mut self, idx: usize, memory: &mut Memory) -> Result<Model> {
        let Placement { engines, isa, pool, .. } = self.placement;
        let (engine, key) = (engines[idx].0, self.placement.key(idx));
        let found = self.copies.cpu.get(&key);
        let is_first = found.is_none();
        let Numbered { number, weights } = match found {
            Some(found) => found,
            None => {
                let arena = cpu::Weights::reserve(engine)?;
                if let Some(promise) = &self.promises.weights {
                    promise.reserve(arena.addresses());
                }
                // What worker 0 reads is near to where it will run.
                let _pinned = pool.pin_caller();
                let weights = cpu::Weights::load_into(arena, engine, pool)?;
                self.copies.cpu.put(key, weights)
            }
        };
        let bytes = cpu::Weights::bytes(engine);
        memory.add_weights(WeightCopy { number, memory: MemoryType::Cpu, bytes, is_first });
        let (num_pages, rows) = (self.num_pages, self.placement.rows(idx));
        let resources = Resources { num_pages, rows, isa: *isa, pool: Arc::clone(pool) };
        let model = match &engine.manifest().model.draft_head {
            None => Model::Cpu(Box::new(cpu::Model::new(engine, weights, resources)?)),
            Some(head) => {
                let target = self.copies.cpu.get(&self.placement.key(0)).map(|copy| copy.weights);
                match head {
                    DraftHead::Eagle(_) => {
                        Model::Eagle(Box::new(cpu::Eagle::new(engine, weights, target, resources)?))
                    }
                    DraftHead::Medusa(_) => Model::Medusa(Box::new(cpu::Medusa::new(
                        engine, weights, target, resources,
                    )?)),
                }
            }
        };
        if let (Some(promise), Some(kv)) = (&self.promises.kept, model.kv()) {
            kv.addresses().into_iter().for_each(|range| promise.reserve(range));
        }
        Ok(model)
    }

    fn on_gpu(
        &mut self,
        idx: usize,
        number: usize,
        gpu: &Gpu,
        target: Option<&Model>,
        memory: &mut Memory,
    ) -> Result<Model> {
        let (engine, prefill) = (self.placement.engines[idx].0, self.placement.prefill);
        let num_pages = self.num_pages + self.placement.scratch_pages(idx);
        let target = match target {
            Some(Model::Gpu(target, at, _)) if *at == number => Some(Arc::clone(target)),
            _ => None,
        };
        if engine.manifest().model.medusa().is_some() && target.is_none() {
            let path = engine.path().display();
            let what = "Medusa heads run on the GPU of their target (`draft_gpu`)";
            return Err(Error::Unsupported(format!("engine {path}: {what}")));
        }
        let mut device = gpu.lock();
        let device = &mut **device;
        let weights = self.weights_on_gpu(idx, number, device, memory)?;
        Ok(match (&engine.manifest().model.draft_head, target) {
            (Some(DraftHead::Medusa(_)), Some(target)) => {
                let heads = cuda::Medusa::load_from(engine, weights, target, device)?;
                Model::MedusaOnGpu(Arc::new(heads), gpu.clone())
            }
            (Some(_), target) => {
                let head = cuda::Eagle::load_from(engine, weights, target, num_pages, device)?;
                Model::EagleOnGpu(Arc::new(head), number, gpu.clone())
            }
            (None, _) => {
                let model = cuda::Model::load_from(engine, weights, num_pages, prefill, device)?;
                Model::Gpu(Arc::new(model), number, gpu.clone())
            }
        })
    }

    /// An engine's weights on a GPU: brought there, or found there where memory is shared.
    fn weights_on_gpu(
        &mut self,
        idx: usize,
        number: usize,
        device: &mut dyn Device,
        memory: &mut Memory,
    ) -> Result<Held> {
        let engine = self.placement.engines[idx].0;
        if !device.shares_memory() {
            return Ok(Held::Own(cuda::Weights::upload(engine, device)?));
        }
        let key = self.placement.key(idx);
        let found = self.copies.gpu.get(&key);
        let is_first = found.is_none();
        let copy = match found {
            Some(found) => found,
            None => {
                let owner = (self.placement.open)(number)?;
                self.copies.gpu.put(key, Uploaded::new(engine, owner, device)?)
            }
        };
        let (bytes, place) = (cuda::Weights::bytes(engine), MemoryType::Gpu(number));
        memory.add_weights(WeightCopy { number: copy.number, memory: place, bytes, is_first });
        Ok(Held::Shared(copy.weights))
    }

    /// What was taken besides weights that can be shared.
    fn own(&self) -> Vec<(MemoryType, usize)> {
        let kept = self.promises.kept.as_ref();
        let mut own: Vec<_> =
            kept.map(|kept| (MemoryType::Cpu, kept.bytes())).into_iter().collect();
        for (_, place) in &self.placement.engines {
            if let Place::Gpu(number, gpu) = place
                && own.iter().all(|(memory, _)| *memory != place.memory())
            {
                let held = gpu.lock().held();
                own.push((MemoryType::Gpu(*number), held.device));
                own.push((MemoryType::Pinned, held.pinned));
            }
        }
        own
    }
}

impl Model {
    /// Itself, if it is a head on the GPU of its target.
    fn head_beside(&self, target: &Self) -> Option<Arc<cuda::Eagle>> {
        match (self, target) {
            (Self::EagleOnGpu(head, at, _), Self::Gpu(_, number, _)) if at == number => {
                Some(Arc::clone(head))
            }
            _ => None,
        }
    }

    /// For the executor on the host. `scratch` is pages of a GPU's cache for branches of trees, `head` is beside it there.
    fn forward(
        self,
        scratch: Range<PageId>,
        head: Option<Arc<cuda::Eagle>>,
    ) -> Option<Box<dyn Forward>> {
        match self {
            Self::Cpu(model) => Some(model),
            Self::Eagle(_)
            | Self::EagleOnGpu(..)
            | Self::Medusa(_)
            | Self::MedusaOnGpu(..)
            | Self::Part(..) => None,
            Self::Gpu(model, _, gpu) => {
                Some(Box::new(OnHost::new(model, gpu).with_scratch(scratch).with_head(head)))
            }
        }
    }

    /// A part of it to draft with, on its cache.
    fn without(&self, skip: &LayerSkip, placement: &Placement<'_>) -> Option<Self> {
        let part: Box<dyn Forward> = match self {
            Self::Cpu(model) => Box::new(model.without(skip.clone(), part_rows(&placement.bounds))),
            Self::Gpu(model, _, gpu) => {
                Box::new(OnHost::new(Arc::clone(model), gpu.clone()).without(skip.clone()))
            }
            Self::Eagle(_)
            | Self::EagleOnGpu(..)
            | Self::Medusa(_)
            | Self::MedusaOnGpu(..)
            | Self::Part(..) => return None,
        };
        Some(Self::Part(part, skip.clone()))
    }

    /// To draft with; where its target makes a head's states, that `is_told_states`.
    fn drafter(self, placement: &Placement<'_>, is_told_states: bool) -> Result<Box<dyn Drafter>> {
        let vocab_size = placement.bounds.vocab_size;
        let second = |model: Box<dyn Forward>| -> Result<Box<dyn Drafter>> {
            let engine = placement.engines[1].0;
            let drafter = draft::Model::new(model, placement.shared_vocab());
            let drafter = drafter.of_tokens(vocab_map::of(engine)?);
            Ok(Box::new(drafter.at_once(engine.manifest().model.mask_token)))
        };
        Ok(match self {
            Self::Eagle(head) => Box::new(draft::Eagle::new(head, vocab_size)),
            Self::EagleOnGpu(head, _, gpu) => {
                let head = HeadOnHost::new(head, gpu);
                let head = if is_told_states { head.told_states() } else { head };
                Box::new(draft::Eagle::new(Box::new(head), vocab_size))
            }
            Self::Medusa(heads) => Box::new(draft::Medusa::new(heads)),
            Self::MedusaOnGpu(heads, gpu) => {
                Box::new(draft::Medusa::new(Box::new(MedusaOnHost::new(heads, gpu))))
            }
            Self::Part(part, _) => Box::new(draft::Model::of_target(part, vocab_size)),
            Self::Cpu(model) => second(model)?,
            Self::Gpu(model, _, gpu) => second(Box::new(OnHost::new(model, gpu)))?,
        })
    }

    /// Its cache, where that is in the machine's memory.
    fn kv(&self) -> Option<&cpu::kv::KvCache> {
        match self {
            Self::Cpu(model) => Some(model.kv()),
            Self::Eagle(head) => Some(head.kv()),
            Self::Medusa(_)
            | Self::MedusaOnGpu(..)
            | Self::Gpu(..)
            | Self::EagleOnGpu(..)
            | Self::Part(..) => None,
        }
    }
}
