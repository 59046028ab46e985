//! A loaded model: engine files, tokenizer, settings, and the contract with its clients. Its instances share it.

use crate::contract::Contract;
use crate::fault;
use crate::mailbox::TicketId;
use crate::metrics::{Metrics, Sweeper};
use crate::parameters::{Policy, Settings};
use crate::room::Room;
use crate::running::Running;
use spec_core::engine::{Device, DrafterKind};
use spec_core::machine::{Cpus, trim_heap};
use spec_core::runtime::{
    AdmissionPolicy, DraftPolicy, Lookup, ModelFolder, Options, Runtime, SharedWeights,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use triton_backend::{Error, Level, Placement, Result, log};

/// Rows of a step on a CPU.
const CPU_STEP_ROWS: usize = 128;

/// A loaded model.
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) folder: ModelFolder,
    pub(crate) settings: Settings,
    pub(crate) contract: Contract,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) running: Running,
    pub(crate) room: Arc<Room>,
    /// Requests so far, of all instances.
    num_tickets: AtomicU64,
    /// What its instances have of them in memory.
    weights: SharedWeights,
    /// Instances so far that Triton has not placed on a GPU.
    num_unplaced: AtomicUsize,
    /// Dropped last, after `metrics`.
    _sweeper: Sweeper,
    _trimmer: Trimmer,
}

/// Gives memory back that is free once a model is gone.
struct Trimmer;

impl Drop for Trimmer {
    fn drop(&mut self) {
        trim_heap();
    }
}

impl Model {
    /// Opens the model's folder, completes its configuration and reads its parameters.
    pub(crate) fn load(model: &triton_backend::Model<'_>) -> Result<Self> {
        let (name, version) = (model.name()?, model.version()?);
        fault::hold_load(&name);
        let named = |error: String| Error::internal(format!("model '{name}': {error}"));
        let folder =
            ModelFolder::open(&model.folder()?).map_err(|error| named(error.to_string()))?;
        // What parsing took is free again before its instances are told how much there is.
        trim_heap();
        let manifest = folder.target.manifest();
        let mut config = model.config()?;
        let settings = Settings::parse(&config)?;
        let mut limits = manifest.limits.clone();
        if !drafts(&manifest.drafter, settings.lookup) {
            limits.max_draft_len = 0;
        }
        let contract = Contract::new(&settings, &limits, manifest.model.vocab_size);
        if model.auto_completes()? {
            contract.complete(&mut config)?;
            model.set_config(&config)?;
            config = model.config()?;
        }
        contract.check(&config)?;
        // What was completed (decoupling) is read again.
        let settings = Settings::parse(&config)?;
        let contract = Contract::new(&settings, &limits, manifest.model.vocab_size);
        if let Some(len) = settings.draft_len.filter(|&len| len > limits.max_draft_len) {
            let max_draft_len = limits.max_draft_len;
            let message = match manifest.limits.max_draft_len > max_draft_len {
                true => format!("parameter 'draft_len' is {len}, and nothing drafts"),
                false => format!(
                    "parameter 'draft_len' is {len}, the engine's max_draft_len is {max_draft_len}"
                ),
            };
            return Err(Error::invalid_arg(message));
        }
        if settings.verify_engine {
            verify(&folder).map_err(|error| named(error.to_string()))?;
        }
        let metrics = Metrics::of(&name, version)?;
        let room = Room::new(settings.queue.clone(), settings.max_queue_size, settings.when_full);
        log(Level::Info, &format!("model '{name}' version {version}: {}", folder.path.display()));
        Ok(Self {
            name,
            folder,
            settings,
            contract,
            metrics,
            running: Running::default(),
            room,
            num_tickets: AtomicU64::new(0),
            weights: SharedWeights::default(),
            num_unplaced: AtomicUsize::new(0),
            _sweeper: Sweeper,
            _trimmer: Trimmer,
        })
    }

    /// Rows in a step where nothing is said: what a GPU's engine was built for. A step on a CPU is short enough for decoding neighbours, and for
    /// cancellations, if it has few rows; more than these gain nothing, as its products are at their peak.
    fn default_rows(&self) -> usize {
        let manifest = self.folder.target.manifest();
        let limits = &manifest.limits;
        if manifest.device != Device::Cpu {
            return limits.max_num_tokens;
        }
        let at_once = self.settings.max_running.unwrap_or(usize::MAX).min(limits.max_batch_size);
        CPU_STEP_ROWS.max(2 * at_once)
    }

    /// Names a request: no two have the same name, whichever instance serves them.
    pub(crate) fn next_ticket(&self) -> TicketId {
        self.num_tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// A runtime for an instance.
    pub(crate) fn runtime(&self, placement: Placement) -> Result<Runtime> {
        let settings = &self.settings;
        let built_for = &self.folder.target.manifest().device;
        let turn = match placement {
            Placement::Gpu(_) => 0,
            Placement::Cpu | Placement::Model => self.num_unplaced.fetch_add(1, Ordering::Relaxed),
        };
        let gpu = gpu(placement, built_for, &settings.gpus, turn)?;
        let shared_out = (Cpus::of_thread().threads() / settings.instance_count.max(1)).max(1);
        let options = Options {
            threads: Some(settings.threads.unwrap_or(shared_out)),
            pinning: settings.pin_threads,
            isa: settings.isa,
            draft_policy: match settings.draft_len {
                Some(_) => DraftPolicy::Fixed,
                None => DraftPolicy::Adaptive,
            },
            lookup: settings.lookup,
            ngram_branches: settings.ngram_branches,
            draft_branches: settings.draft_branches,
            draft_tree_tokens: settings.draft_tree_tokens,
            max_batch_size: settings.max_running,
            kv_free_fraction: settings.kv_memory_fraction,
            kv_tokens: settings.max_kv_tokens,
            kv_reuse: settings.kv_reuse,
            admission: match settings.policy {
                Policy::GuaranteedNoEvict => AdmissionPolicy::GuaranteedNoEvict,
                Policy::MaxUtilization => AdmissionPolicy::MaxUtilization,
            },
            max_num_tokens: Some(settings.max_num_tokens.unwrap_or_else(|| self.default_rows())),
            prefill: settings.prefill,
            launch_ahead: settings.launch_ahead,
            // Its room bounds the queue: a request that was let in is not refused.
            max_queue: usize::MAX,
            gpu,
            draft_gpu: settings.draft_gpu,
            ..Options::default()
        };
        let runtime = Runtime::load_sharing(&self.folder.target, &options, &self.weights);
        let runtime = runtime.map_err(|error| self.contract.error(error))?;
        fault::inject(&self.name, runtime)
    }
}

/// Number of the GPU that an instance runs on, the `turn`-th of those that are not placed on one.
fn gpu(placement: Placement, built_for: &Device, gpus: &[usize], turn: usize) -> Result<usize> {
    match (placement, built_for) {
        (Placement::Gpu(number), Device::Cuda { .. }) if gpus.is_empty() => {
            Ok(number.max(0) as usize)
        }
        (Placement::Gpu(number), Device::Cuda { .. }) => Err(Error::invalid_arg(format!(
            "instance_group places the instance on GPU {number} and gpu_device_ids names {gpus:?}: set one of them, \
             or KIND_MODEL"
        ))),
        (Placement::Cpu | Placement::Model, Device::Cpu) => Ok(0),
        (Placement::Gpu(number), Device::Cpu) => Err(Error::unsupported(format!(
            "the instance is placed on GPU {number} and the engine is built for the CPU: set KIND_CPU in \
             instance_group, or build with spec-build --device cuda:ARCH"
        ))),
        (Placement::Cpu | Placement::Model, Device::Cuda { .. }) => {
            Ok(*gpus.get(turn % gpus.len().max(1)).unwrap_or(&0))
        }
    }
}

/// Checks the hash of every section of target and drafter.
fn verify(folder: &ModelFolder) -> spec_core::Result<()> {
    folder.target.verify_hashes(|_| ())?;
    folder.target.open_drafter()?.map_or(Ok(()), |draft| draft.verify_hashes(|_| ()))
}

/// Whether anything drafts: an engine that only looks drafts up can be told not to.
fn drafts(drafter: &DrafterKind, lookup: Option<Lookup>) -> bool {
    match drafter {
        DrafterKind::None => false,
        DrafterKind::Ngram { .. } | DrafterKind::Suffix { .. } => lookup != Some(Lookup::Off),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_only_looks_up_drafts_nothing_where_it_is_told_not_to() {
        let kinds = [
            DrafterKind::Ngram { max_ngram: 4, min_ngram: 2 },
            DrafterKind::Suffix { max_tokens: 9 },
        ];
        for kind in &kinds {
            assert_eq!(
                [None, Some(Lookup::Off), Some(Lookup::Suffix)].map(|lookup| drafts(kind, lookup)),
                [true, false, true]
            );
        }
        assert!(!drafts(&DrafterKind::None, None));
    }

    fn cuda() -> Device {
        Device::Cuda { archs: vec!["sm_90a".into()], min_driver: 580 }
    }

    #[test]
    fn instances_without_a_place_take_turns_on_the_gpus_that_are_named() {
        let number = |gpus: &[usize], turn| gpu(Placement::Model, &cuda(), gpus, turn).unwrap();
        assert_eq!([0, 1, 2].map(|turn| number(&[2, 5], turn)), [2, 5, 2]);
        assert_eq!(number(&[], 3), 0);
        assert_eq!(gpu(Placement::Cpu, &cuda(), &[1], 0).unwrap(), 1);
        assert_eq!(gpu(Placement::Cpu, &Device::Cpu, &[1], 0).unwrap(), 0);
    }

    #[test]
    fn a_place_on_a_gpu_is_kept_and_named_once() {
        assert_eq!(gpu(Placement::Gpu(3), &cuda(), &[], 0).unwrap(), 3);
        let twice = gpu(Placement::Gpu(3), &cuda(), &[1], 0).unwrap_err().message;
        assert!(twice.contains("on GPU 3") && twice.contains("[1]"), "{twice}");
        let cpu = gpu(Placement::Gpu(3), &Device::Cpu, &[], 0).unwrap_err().message;
        assert!(cpu.contains("built for the CPU"), "{cpu}");
    }
}
