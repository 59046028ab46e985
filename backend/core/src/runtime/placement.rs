//! Where target and drafter run, what memory they find there, and their models once loaded.

use super::Options;
use super::memory::{self, Source};
use crate::Result;
use crate::batch::Forward;
use crate::engine::{Device as Built, Engine};
use crate::exec::cpu::{self, Isa, Pool};
use crate::exec::cuda::device::Device;
use crate::exec::cuda::{self, Capacity, Gpu, OnHost, Weights, Workspace};
use std::sync::Arc;

/// Part of the machine's free memory that the KV caches may take where nothing is said.
const CPU_FRACTION: f64 = 0.25;
/// Part of a GPU's memory beside weights and workspace.
const GPU_FRACTION: f64 = 0.9;

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
                (Built::Cuda { .. }, None) => Place::Gpu(ordinal, Gpu::new(open(ordinal)?)),
            };
            engines.push((engine, place));
        }
        let threads = options.threads.unwrap_or_else(super::num_cores);
        Ok(Self {
            engines,
            isa: options.isa.unwrap_or_else(Isa::detect),
            pool: Arc::new(Pool::new(threads)),
        })
    }

    /// The memories that pages come from, one for each device.
    pub(super) fn sources(&self) -> Result<Vec<Source>> {
        let mut sources: Vec<(Option<usize>, Source)> = Vec::new();
        for (engine, place) in &self.engines {
            let (number, source) = match place {
                Place::Cpu => (None, cpu_source(engine)),
                Place::Gpu(number, gpu) => (Some(*number), gpu_source(engine, gpu)?),
            };
            match sources.iter_mut().find(|(other, _)| *other == number) {
                Some((_, shared)) => {
                    shared.page_bytes += source.page_bytes;
                    let taken = fixed_bytes(engine, place);
                    shared.available = shared.available.map(|bytes| bytes.saturating_sub(taken));
                }
                None => sources.push((number, source)),
            }
        }
        Ok(sources.into_iter().map(|(_, source)| source).collect())
    }

    /// Loads the target (0) or the drafter (1) with a cache of `num_pages`.
    pub(super) fn load(&self, idx: usize, num_pages: usize) -> Result<Box<dyn Forward>> {
        let (engine, place) = &self.engines[idx];
        match place {
            Place::Cpu => {
                let pool = Arc::clone(&self.pool);
                Ok(Box::new(cpu::Model::load(engine, num_pages, self.isa, pool)?))
            }
            Place::Gpu(_, gpu) => {
                let model = cuda::Model::load(engine, num_pages, &mut **gpu.lock())?;
                Ok(Box::new(OnHost::new(Arc::new(model), gpu.clone())))
            }
        }
    }
}

fn cpu_source(engine: &Engine) -> Source {
    Source {
        page_bytes: memory::page_bytes(engine),
        available: memory::available_memory(),
        fraction: CPU_FRACTION,
        is_hard: false,
    }
}

fn gpu_source(engine: &Engine, gpu: &Gpu) -> Result<Source> {
    let free = gpu.lock().available_bytes()?;
    let taken = fixed_bytes(engine, &Place::Gpu(0, gpu.clone()));
    Ok(Source {
        page_bytes: memory::page_bytes(engine),
        available: Some(free.saturating_sub(taken)),
        fraction: GPU_FRACTION,
        is_hard: true,
    })
}

/// Bytes that an engine takes on its GPU besides the cache; those on the CPU are mapped or swapped.
fn fixed_bytes(engine: &Engine, place: &Place) -> usize {
    let Place::Gpu(_, gpu) = place else { return 0 };
    let manifest = engine.manifest();
    let grid = gpu.lock().describe().num_sms as usize;
    Weights::bytes(engine) + Workspace::bytes(manifest, &Capacity::of(manifest), grid)
}
