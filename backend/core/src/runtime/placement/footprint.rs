//! What a runtime takes of a device besides weights and KV caches: of engines that have their places, and of those that are
//! still to be built.

use super::{
    Place, Placement, is_skipping, page_bytes, page_bytes_of, part_rows, rows, step_bounds,
};
use crate::engine::{Device as Built, Manifest};
use crate::exec::Host;
use crate::exec::cpu::{self, Isa};
use crate::exec::cuda::device::Description;
use crate::exec::cuda::{self, OnHost, Prefill};
use crate::model::{DraftHead, ModelConfig};
use crate::pages::{PAGE_TOKENS, pages_for};
use crate::runtime::Options;
use spec_kernels::has_warpgroups;

/// Share of the machine's free memory that the KV caches may take where nothing is said.
pub(super) const CPU_FRACTION: f64 = 0.25;
/// Share of a GPU's memory beside weights and workspace.
pub(super) const GPU_FRACTION: f64 = 0.9;

/// Bytes of the machine's memory that nobody plans: requests, responses and what the server around this does.
pub(super) const CPU_RESERVE: usize = 128 << 20;
/// Bytes of a GPU's memory that nobody plans: code, graphs, and what the driver rounds up.
pub(super) const GPU_RESERVE: usize = 512 << 20;

/// What a runtime with default options takes of a device besides weights and KV caches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Footprint {
    /// Bytes that steps work in.
    pub working_bytes: usize,
    /// Bytes that are kept for what nobody plans.
    pub reserve_bytes: usize,
    /// Share of what is left that the KV caches get.
    pub kv_fraction: f64,
}

impl Footprint {
    /// Of engines that all run where the target does, on a CPU or on a GPU with so many streaming multiprocessors: known
    /// before they are built, since it does not depend on their sections.
    pub fn of(target: &Manifest, draft: Option<&Manifest>, num_sms: u32) -> Self {
        let bounds = step_bounds(target, draft, 1, &Options::default());
        let engines = [Some(target), draft].into_iter().flatten();
        match &target.device {
            Built::Cpu => {
                let isa = Isa::detect();
                let passes = engines.enumerate().map(|(idx, engine)| {
                    cpu::Model::working_bytes(engine, isa, rows(&bounds, idx))
                });
                let part = match is_skipping(target) {
                    true => cpu::Model::part_bytes(target, isa, part_rows(&bounds)),
                    false => 0,
                };
                Self {
                    working_bytes: Host::step_bytes(&bounds) + passes.sum::<usize>() + part,
                    reserve_bytes: CPU_RESERVE,
                    kv_fraction: CPU_FRACTION,
                }
            }
            Built::Cuda { archs, min_driver } => {
                // One that multiplies FP8.
                let (name, capability, driver) = (String::new(), (9, 0), *min_driver);
                let device = Description { name, capability, driver, num_sms };
                let multiplies = archs.iter().all(|arch| has_warpgroups(arch));
                let prefill = match bounds.rows >= cuda::BLOCK_LEN {
                    true if multiplies => Prefill::Blocks,
                    true => Prefill::CublasLt,
                    false => Prefill::Exact,
                };
                let passes =
                    engines.map(|engine| cuda::Model::working_bytes(engine, prefill, &device));
                let vocab_on_gpu = bounds.draft_vocab.min(target.model.vocab_size);
                let steps = cuda::Steps::bytes(target, vocab_on_gpu, 1);
                let beside = draft.map_or(0, |draft| {
                    beside_drafter(target, draft, prefill, 1, draft.device != Built::Cpu)
                });
                Self {
                    working_bytes: steps + beside + passes.sum::<usize>(),
                    reserve_bytes: GPU_RESERVE,
                    kv_fraction: GPU_FRACTION,
                }
            }
        }
    }
}

impl Placement<'_> {
    /// Bytes that an engine takes at its place besides weights and cache.
    pub(super) fn working_bytes(&self, idx: usize) -> usize {
        let (engine, place) = &self.engines[idx];
        let Place::Gpu(_, gpu) = place else {
            let manifest = engine.manifest();
            let passes = cpu::Model::working_bytes(manifest, self.isa, self.rows(idx));
            let part = match is_skipping(manifest) {
                true => {
                    let passes =
                        cpu::Model::part_bytes(manifest, self.isa, part_rows(&self.bounds));
                    passes + self.branch_bytes(idx)
                }
                false => 0,
            };
            return passes + self.branch_bytes(idx) + part;
        };
        let manifest = engine.manifest();
        let passes = cuda::Model::working_bytes(manifest, self.prefill, gpu.lock().describe());
        let branches = self.draft_branches;
        let steps = match idx {
            0 => cuda::Steps::bytes(manifest, self.vocab_on_gpu(), branches),
            _ => 0,
        };
        let beside = match self.engines.get(1) {
            Some((drafter, at)) if idx == 0 => {
                let is_here = at.number() == place.number();
                beside_drafter(manifest, drafter.manifest(), self.prefill, branches, is_here)
            }
            _ => 0,
        };
        passes + beside + steps + self.scratch_pages(idx) * page_bytes_of(engine)
    }

    /// Bytes of one layer's pages for the branches of the trees of a step on a CPU. In the worst case every token of a model's
    /// tree that is not on its first branch begins another one.
    fn branch_bytes(&self, idx: usize) -> usize {
        let engine = self.engines[idx].0;
        let Manifest { model, precision, limits, .. } = engine.manifest();
        if model.medusa().is_some() {
            return 0;
        }
        let drawn = (self.draft_branches - 1) * limits.max_draft_len;
        let looked_up = if idx == 0 { self.ngram_branches - 1 } else { 0 };
        let pages = drawn.max(looked_up) * pages_for(PAGE_TOKENS - 1 + limits.max_draft_len);
        let page =
            page_bytes(&ModelConfig { num_layers: 1, ..model.clone() }, precision, &Built::Cpu);
        self.bounds.sequences * pages * page
    }
}

/// Bytes that a target on a GPU takes for its drafter: for a head what passes keep of their hidden states, and for what drafts on
/// the same GPU what steps there need.
fn beside_drafter(
    target: &Manifest,
    draft: &Manifest,
    prefill: Prefill,
    branches: usize,
    is_here: bool,
) -> usize {
    let limits = cuda::step_limits(&target.limits, branches);
    let vocab_size = target.model.vocab_size;
    let (steps, num_taps) = match &draft.model.draft_head {
        None => {
            let vocab_size = vocab_size.min(draft.model.vocab_size);
            (cuda::DraftModel::bytes(&draft.model, vocab_size, &limits), 0)
        }
        Some(DraftHead::Eagle(eagle)) => {
            (cuda::HeadDrafter::bytes(eagle, vocab_size, &limits), eagle.taps.len())
        }
        Some(DraftHead::Medusa(_)) => (cuda::MedusaDrafter::bytes(&draft.model, &limits), 1),
    };
    OnHost::tap_bytes(target, prefill, num_taps) + if is_here { steps } else { 0 }
}
