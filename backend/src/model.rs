//! A loaded model: engine files, tokenizer, settings, and the contract with its clients. Its instances share it.

use crate::contract::Contract;
use crate::metrics::Metrics;
use crate::parameters::{Policy, Settings};
use crate::triton::{self, Error, Level, Placement, Result, log};
use spec_core::adapt::DraftPolicy;
use spec_core::engine::{DrafterKind, Limits};
use spec_core::runtime::{AdmissionPolicy, ModelFolder, Options, Runtime};
use std::sync::Arc;

/// A loaded model.
pub(crate) struct Model {
    pub(crate) folder: ModelFolder,
    pub(crate) settings: Settings,
    pub(crate) contract: Contract,
    pub(crate) metrics: Arc<Metrics>,
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
        let metrics = Arc::new(Metrics::new(&name, version, limits.max_draft_len)?);
        log(Level::Info, &format!("model '{name}' version {version}: {}", folder.path.display()));
        Ok(Self { folder, settings, contract, metrics })
    }

    /// A runtime for an instance.
    pub(crate) fn runtime(&self, placement: Placement) -> Result<Runtime> {
        if let Placement::Gpu(device) = placement {
            return Err(Error::unsupported(format!(
                "the instance is placed on GPU {device} and the engine is built for the CPU: set KIND_CPU in \
                 instance_group, or build with spec-build --device cuda:ARCH"
            )));
        }
        let settings = &self.settings;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared_out = (cores / settings.instance_count.max(1)).max(1);
        let options = Options {
            threads: Some(settings.threads.unwrap_or(shared_out)),
            draft_policy: match settings.draft_len {
                Some(_) => DraftPolicy::Fixed,
                None => DraftPolicy::Adaptive,
            },
            kv_free_fraction: settings.kv_memory_fraction,
            kv_tokens: settings.max_kv_tokens,
            kv_reuse: settings.kv_reuse,
            admission: match settings.policy {
                Policy::GuaranteedNoEvict => AdmissionPolicy::GuaranteedNoEvict,
                Policy::MaxUtilization => AdmissionPolicy::MaxUtilization,
            },
            max_num_tokens: settings.max_num_tokens,
            // The mailbox bounds the queue: a request that it let in is not refused.
            max_queue: usize::MAX,
            ..Options::default()
        };
        let runtime = Runtime::load(&self.folder.target, &options);
        let runtime = runtime.map_err(|error| self.contract.error(error))?;
        #[cfg(feature = "fault-injection")]
        let runtime = crate::fault::inject(runtime)?;
        Ok(runtime)
    }
}

/// What the engine can do as it is loaded: without a drafter nothing is drafted.
fn limits(manifest: &spec_core::engine::Manifest) -> Limits {
    let mut limits = manifest.limits.clone();
    if manifest.drafter == DrafterKind::None {
        limits.max_draft_len = 0;
    }
    limits
}
