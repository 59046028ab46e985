//! A loaded model: engine files, tokenizer, settings, and the contract with its clients. Its instances share it.

use crate::contract::Contract;
use crate::metrics::{Metrics, Sweeper};
use crate::parameters::{Policy, Settings};
use crate::responder::News;
use crate::triton::{self, Error, Level, Placement, Result, log};
use spec_core::adapt::DraftPolicy;
use spec_core::engine::{Device, DrafterKind, Limits};
use spec_core::runtime::{AdmissionPolicy, ModelFolder, Options, Runtime};
use std::collections::BTreeMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// Rows of a step on a CPU.
const CPU_STEP_ROWS: usize = 128;

/// A loaded model.
pub(crate) struct Model {
    pub(crate) folder: ModelFolder,
    pub(crate) settings: Settings,
    pub(crate) contract: Contract,
    pub(crate) metrics: Arc<Metrics>,
    /// To the responders of its instances: a request can be ended through any of them.
    doors: Mutex<BTreeMap<usize, Sender<News>>>,
    /// Dropped last, after `metrics`.
    _sweeper: Sweeper,
}

impl Model {
    /// Opens the model's folder, completes its configuration and reads its parameters.
    pub(crate) fn load(model: &triton::Model<'_>) -> Result<Self> {
        let (name, version) = (model.name()?, model.version()?);
        let named = |error: String| Error::internal(format!("model '{name}': {error}"));
        let folder =
            ModelFolder::open(&model.folder()?).map_err(|error| named(error.to_string()))?;
        let manifest = folder.target.manifest();
        let limits = limits(manifest);
        let mut config = model.config()?;
        let settings = Settings::parse(&config)?;
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
            let message = format!(
                "parameter 'draft_len' is {len}, the engine's max_draft_len is {max_draft_len}"
            );
            return Err(Error::invalid_arg(message));
        }
        if settings.verify_engine {
            verify(&folder).map_err(|error| named(error.to_string()))?;
        }
        let metrics = Metrics::of(&name, version)?;
        log(Level::Info, &format!("model '{name}' version {version}: {}", folder.path.display()));
        Ok(Self { folder, settings, contract, metrics, doors: Mutex::default(), _sweeper: Sweeper })
    }

    /// Rows in a step where nothing is said: what a GPU's engine was built for. A step on a CPU is short enough for decoding neighbours, and for
    /// cancellations, if it has few rows; more than these gain nothing, as its products are at their peak.
    fn default_rows(&self) -> usize {
        let manifest = self.folder.target.manifest();
        let limits = &manifest.limits;
        if manifest.device != Device::Cpu {
            return limits.max_num_tokens;
        }
        let at_once = self.settings.max_batch_size.unwrap_or(usize::MAX).min(limits.max_batch_size);
        CPU_STEP_ROWS.max(2 * at_once)
    }

    /// Lets an instance's responder be reached; returns its name.
    pub(crate) fn open_door(&self, news: Sender<News>) -> usize {
        let mut doors = self.doors.lock().unwrap_or_else(PoisonError::into_inner);
        let door = doors.last_key_value().map_or(0, |(last, _)| last + 1);
        doors.insert(door, news);
        door
    }

    /// The instance is going away.
    pub(crate) fn close_door(&self, door: usize) {
        self.doors.lock().unwrap_or_else(PoisonError::into_inner).remove(&door);
    }

    /// Ends the requests of this name, whichever instance has them.
    pub(crate) fn end_named(&self, name: &str) {
        for news in self.doors.lock().unwrap_or_else(PoisonError::into_inner).values() {
            // A responder lives as long as its door is open.
            let _ = news.send(News::EndNamed(name.to_string()));
        }
    }

    /// A runtime for an instance.
    pub(crate) fn runtime(&self, placement: Placement) -> Result<Runtime> {
        let gpu = gpu(placement, &self.folder.target.manifest().device)?;
        let settings = &self.settings;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared_out = (cores / settings.instance_count.max(1)).max(1);
        let options = Options {
            threads: Some(settings.threads.unwrap_or(shared_out)),
            draft_policy: match settings.draft_len {
                Some(_) => DraftPolicy::Fixed,
                None => DraftPolicy::Adaptive,
            },
            max_batch_size: settings.max_batch_size,
            kv_free_fraction: settings.kv_memory_fraction,
            kv_tokens: settings.max_kv_tokens,
            kv_reuse: settings.kv_reuse,
            admission: match settings.policy {
                Policy::GuaranteedNoEvict => AdmissionPolicy::GuaranteedNoEvict,
                Policy::MaxUtilization => AdmissionPolicy::MaxUtilization,
            },
            max_num_tokens: Some(settings.max_num_tokens.unwrap_or_else(|| self.default_rows())),
            many_rows: settings.prefill,
            launch_ahead: settings.launch_ahead,
            // The mailbox bounds the queue: a request that it let in is not refused.
            max_queue: usize::MAX,
            gpu,
            draft_gpu: settings.draft_gpu,
            ..Options::default()
        };
        let runtime = Runtime::load(&self.folder.target, &options);
        let runtime = runtime.map_err(|error| self.contract.error(error))?;
        #[cfg(feature = "fault-injection")]
        let runtime = crate::fault::inject(runtime)?;
        Ok(runtime)
    }
}

/// Number of the GPU that an instance runs on; it must be placed where its engine runs.
fn gpu(placement: Placement, built_for: &Device) -> Result<usize> {
    match (placement, built_for) {
        (Placement::Gpu(number), Device::Cuda { .. }) => Ok(number.max(0) as usize),
        (Placement::Cpu | Placement::Model, Device::Cpu) => Ok(0),
        (Placement::Gpu(number), Device::Cpu) => Err(Error::unsupported(format!(
            "the instance is placed on GPU {number} and the engine is built for the CPU: set KIND_CPU in \
             instance_group, or build with spec-build --device cuda:ARCH"
        ))),
        (Placement::Cpu | Placement::Model, Device::Cuda { archs, .. }) => {
            Err(Error::unsupported(format!(
                "the instance is not placed on a GPU and the engine is built for cuda:{}: set KIND_GPU in \
                 instance_group, or build with spec-build --device cpu",
                archs.join(",")
            )))
        }
    }
}

/// Checks the hash of every section of target and drafter.
fn verify(folder: &ModelFolder) -> spec_core::Result<()> {
    folder.target.verify_hashes(|_| ())?;
    folder.target.open_drafter()?.map_or(Ok(()), |draft| draft.verify_hashes(|_| ()))
}

/// What the engine can do as it is loaded: without a drafter nothing is drafted.
fn limits(manifest: &spec_core::engine::Manifest) -> Limits {
    let mut limits = manifest.limits.clone();
    if manifest.drafter == DrafterKind::None {
        limits.max_draft_len = 0;
    }
    limits
}
