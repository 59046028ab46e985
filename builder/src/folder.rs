//! `spec-build`: a target and a drafter become a Triton model folder.
//!
//! Everything of a version is written beside its place and moved in by one rename, so a build that is
//! killed leaves the old version whole, or none.

use crate::calibrate::{Calibration, kv_scales};
use crate::checkpoint::{Checkpoint, TokenizerSource};
use crate::cli::{BuildArgs, DraftSource, ModelArgs};
use crate::compile::compile;
use crate::cuda::{Cache, Code, Compiler};
use crate::device;
use crate::draft_vocab::{DraftVocab, Kept};
use crate::pair::check_pair;
use crate::pbtxt::ModelConfigText;
use crate::progress::Progress;
use crate::skip;
use crate::staging::Staging;
use crate::tokenizer::GgufTokenizer;
use anyhow::{Context, Result, ensure};
use spec_core::engine::{
    Device, DrafterKind, EngineWriter, Limits, Manifest, Peer, Precision, Role, Sealed, commit_pair,
};
use spec_core::exec::SearchPath;
use spec_core::model::{Dtype, LayerSkip};
use spec_core::runtime::{DRAFT_FILE, TARGET_FILE};
use spec_core::tokenizer::Tokenizer;
use std::fs;
use std::path::Path;

/// Draft tokens in a step unless the command line says otherwise.
const DEFAULT_DRAFT_LEN: usize = 8;
/// Context length unless the command line says otherwise or the models are shorter.
const DEFAULT_SEQ_LEN: usize = 8192;
/// What is bounded in serving unless the operator says otherwise. Triton's HTTP frontend does not tell of clients that
/// have gone: what they asked for ends with its time.
const BOUNDS: [(&str, &str); 2] = [("max_queue_size", "1024"), ("request_timeout_ms", "600000")];

/// Builds the model folder.
pub fn build(args: &BuildArgs) -> Result<()> {
    let mut plan = Plan::new(&args.model)?;
    let config = config_text(&args.output, &plan)?;
    let staging = Staging::create(&args.output)?;
    let tokenizer = write_tokenizer(&plan.target.tokenizer, staging.path())
        .context("tokenizer of the target")?;
    if let (Some(kept), false) = (&plan.kept, args.quiet) {
        eprintln!("{DRAFT_FILE}: {kept}");
    }
    if let Some(draft) = &plan.draft {
        check_drafter(&tokenizer, plan.target.config.vocab_size, draft, staging.path())?;
    }
    let devices = [&plan.device, &plan.draft_device];
    let maker = EngineMaker {
        kernels: Kernels::new(devices, args.model.cuda_lib.as_deref())?,
        quiet: args.quiet,
        folder: staging.path(),
    };
    if let DraftSource::Skip(source) = &args.model.draft {
        let manifest = plan.manifest(&plan.target, Role::Target, Some(&tokenizer))?;
        let (args, target) = (&args.model.skip, &plan.target);
        let layers = skip::of_checkpoint(source, args, target, &manifest, &tokenizer, &maker)?;
        plan.drafter = DrafterKind::Skip { layers, costs: None };
    }
    let calibration = args.model.kv_calibration.as_ref();
    let make = |checkpoint: &Checkpoint, role| -> Result<Sealed> {
        let manifest = plan.manifest(checkpoint, role, Some(&tokenizer))?;
        maker.make(checkpoint, manifest, calibration, &tokenizer)
    };
    let target = make(&plan.target, Role::Target).context("building the target")?;
    match &plan.draft {
        Some(draft) => {
            let draft = make(draft, Role::Draft).context("building the draft")?;
            commit_pair(target, draft)?;
        }
        None => target.commit()?,
    }
    staging.commit("1", &config)
}

/// Makes engine files in a folder.
pub(crate) struct EngineMaker<'a> {
    pub(crate) kernels: Kernels,
    pub(crate) quiet: bool,
    pub(crate) folder: &'a Path,
}

impl EngineMaker<'_> {
    /// Makes the engine of a checkpoint that is to have this manifest, as far as it is known: scales are found.
    pub(crate) fn make(
        &self,
        checkpoint: &Checkpoint,
        manifest: Manifest,
        calibration: Option<&Calibration>,
        tokenizer: &Tokenizer,
    ) -> Result<Sealed> {
        let kv_scales = kv_scales(calibration, checkpoint, &manifest, tokenizer, self)?;
        self.seal(checkpoint, Manifest { kv_scales, ..manifest })
    }

    /// The same of a manifest whose scales are known.
    pub(crate) fn seal(&self, checkpoint: &Checkpoint, mut manifest: Manifest) -> Result<Sealed> {
        let file = file_of(manifest.role);
        manifest.builder = self.kernels.built_by(&manifest.builder);
        let device = manifest.device.clone();
        if let (Device::Cuda { archs, .. }, false) = (&device, self.quiet) {
            eprintln!("{file}: compiling kernels for {}", archs.join(", "));
        }
        let code = self.kernels.compile(&manifest)?;
        let lengths = code.iter().map(|code| (code.section.clone(), code.cubin.len() as u64));
        let writer = EngineWriter::with_code(self.folder.join(file), manifest, &lengths.collect())?;
        let progress = self.progress(file, &writer);
        compile(checkpoint, &device, &code, &writer, &progress)?;
        progress.finish();
        Ok(writer.seal()?)
    }

    /// Counts the bytes of an engine that is written.
    pub(crate) fn progress(&self, label: &str, writer: &EngineWriter) -> Progress {
        let bytes = writer.sections().iter().map(|section| section.bytes).sum();
        if self.quiet { Progress::hidden() } else { Progress::start(label, bytes) }
    }
}

/// Name of the file of an engine.
pub(crate) fn file_of(role: Role) -> &'static str {
    match role {
        Role::Target => TARGET_FILE,
        Role::Draft => DRAFT_FILE,
    }
}

/// What makes the code of engines, for devices that need some.
pub(crate) struct Kernels(Option<Compiler>);

impl Kernels {
    pub(crate) fn new(devices: [&Device; 2], cuda_lib: Option<&Path>) -> Result<Self> {
        let have_code = devices.iter().any(|device| matches!(device, Device::Cuda { .. }));
        let open = || Compiler::open(&SearchPath::of_process(cuda_lib), Cache::of_user());
        Ok(Self(have_code.then(open).transpose()?))
    }

    fn built_by(&self, builder: &str) -> String {
        match &self.0 {
            None => builder.into(),
            Some(compiler) => format!("{builder}, {}", compiler.version()),
        }
    }

    fn compile(&self, manifest: &Manifest) -> Result<Vec<Code>> {
        match (&self.0, &manifest.device) {
            (Some(compiler), Device::Cuda { archs, .. }) => {
                compiler.compile_model(archs, &manifest.model, &manifest.precision)
            }
            _ => Ok(Vec::new()),
        }
    }
}

/// What is going to be built, checked as far as headers tell.
pub struct Plan {
    /// The target's checkpoint.
    pub target: Checkpoint,
    /// The drafter's, if it is a model.
    pub draft: Option<Checkpoint>,
    /// The tokens that it drafts, where those are not all.
    pub kept: Option<Kept>,
    /// Where draft tokens come from.
    pub drafter: DrafterKind,
    /// What the engines are built for.
    pub limits: Limits,
    /// Number formats of the target.
    pub precision: Precision,
    /// Number formats of the draft.
    pub draft_precision: Precision,
    /// Where the target runs.
    pub device: Device,
    /// Where the drafter does.
    pub draft_device: Device,
}

impl Plan {
    /// Opens the checkpoints and settles the defaults.
    pub fn new(args: &ModelArgs) -> Result<Self> {
        let device = device::parse(&args.device)?;
        let draft_device = args.draft_device.as_deref().map(device::parse).transpose()?;
        let draft_device = draft_device.unwrap_or_else(|| device.clone());
        let target = Checkpoint::open(&args.target).context("target")?;
        let mut draft = match &args.draft {
            DraftSource::Model(path) => {
                let shares = device == draft_device;
                Some(Checkpoint::open_draft(path, &target, shares).context("draft")?)
            }
            DraftSource::None
            | DraftSource::Ngram { .. }
            | DraftSource::Suffix { .. }
            | DraftSource::Skip(_) => None,
        };
        skip::check(&args.skip, &args.draft)?;
        let kept = draft_only(args.draft_vocab.as_ref(), draft.as_mut())?;
        let drafter = drafter(&args.draft);
        let limits = limits(args, &target, draft.as_ref())?;
        let draft_dtype = args.draft_dtype.unwrap_or(args.dtype);
        let draft_head = args.draft_head_dtype.or(args.head_dtype);
        let formats = |weights, head, device| precision(weights, head, args.kv_dtype, device);
        let (precision, mut draft_precision) = (
            formats(args.dtype, args.head_dtype, &device)?,
            formats(draft_dtype, draft_head, &draft_device)?,
        );
        let said = [
            ("--draft-dtype", args.draft_dtype.is_some()),
            ("--draft-head-dtype", args.draft_head_dtype.is_some()),
            ("--draft-device", args.draft_device.is_some()),
        ];
        check_model_drafts(draft.as_ref(), &said)?;
        if let Some(draft) = &draft {
            draft_precision.kv = draft_kv(draft, draft_precision.kv);
        }
        let of_draft = draft.as_ref().map(|_| draft_precision.kv);
        ensure!(
            args.kv_calibration.is_none()
                || [Some(precision.kv), of_draft].contains(&Some(Dtype::Fp8)),
            "--kv-calibration without keys and values in fp8: add --kv-dtype fp8"
        );
        device.validate(&target.config, &precision).context("target")?;
        if let Some(draft) = &draft {
            draft_device.validate(&draft.config, &draft_precision).context("draft")?;
        }
        Ok(Self {
            precision,
            draft_precision,
            target,
            draft,
            kept,
            drafter,
            limits,
            device,
            draft_device,
        })
    }

    /// Where one of the engines runs.
    pub fn device_of(&self, role: Role) -> &Device {
        match role {
            Role::Target => &self.device,
            Role::Draft => &self.draft_device,
        }
    }

    /// The manifest of one of the engines; its sections follow from model and precision. A plan has no tokenizer.
    pub fn manifest(
        &self,
        checkpoint: &Checkpoint,
        role: Role,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Manifest> {
        let (device, limits) = (self.device_of(role).clone(), self.limits.clone());
        match role {
            Role::Target => Ok(Manifest {
                drafter: self.drafter.clone(),
                ..manifest(checkpoint, role, device, self.precision.clone(), limits, tokenizer)?
            }),
            Role::Draft => {
                let precision = self.draft_precision.clone();
                manifest(checkpoint, role, device, precision, limits, tokenizer)
            }
        }
    }
}

/// The manifest of an engine without a drafter.
pub(crate) fn manifest(
    checkpoint: &Checkpoint,
    role: Role,
    device: Device,
    precision: Precision,
    limits: Limits,
    tokenizer: Option<&Tokenizer>,
) -> Result<Manifest> {
    let bos_token = tokenizer.map(Tokenizer::prompt_bos).transpose()?.flatten();
    Ok(Manifest {
        builder: concat!("spec-build ", env!("CARGO_PKG_VERSION")).into(),
        kernels: spec_kernels::HASH.into(),
        device,
        role,
        identity: String::new(),
        drafter: DrafterKind::None,
        target: (role == Role::Draft)
            .then(|| Peer { file: TARGET_FILE.into(), identity: String::new() }),
        model: checkpoint.config.clone(),
        precision,
        limits,
        tokenizer: tokenizer.map_or("", Tokenizer::hash).into(),
        end_tokens: checkpoint.generation.end_tokens.clone(),
        bos_token,
        kv_scales: None,
        costs: None,
        sections: Vec::new(),
    })
}

/// Refuses options about a drafting model, of those that were said, where there is none.
pub(crate) fn check_model_drafts(draft: Option<&Checkpoint>, said: &[(&str, bool)]) -> Result<()> {
    for (option, is_said) in said {
        ensure!(!is_said || draft.is_some(), "{option}: no model drafts");
    }
    Ok(())
}

/// Has a drafting model draft some tokens alone, where that was asked for.
pub(crate) fn draft_only(
    vocab: Option<&DraftVocab>,
    draft: Option<&mut Checkpoint>,
) -> Result<Option<Kept>> {
    let Some(vocab) = vocab else { return Ok(None) };
    let draft = draft.context("--draft-vocab: no model drafts")?;
    vocab.apply(draft).map(Some)
}

/// What a target's manifest says of a drafter. A model's identity is not known yet, nor are layers to skip.
pub(crate) fn drafter(source: &DraftSource) -> DrafterKind {
    match source {
        DraftSource::None => DrafterKind::None,
        &DraftSource::Ngram { max, min } => DrafterKind::Ngram { max_ngram: max, min_ngram: min },
        &DraftSource::Suffix { max_tokens } => DrafterKind::Suffix { max_tokens },
        DraftSource::Skip(_) => DrafterKind::Skip { layers: LayerSkip::default(), costs: None },
        DraftSource::Model(_) => {
            DrafterKind::Model(Peer { file: DRAFT_FILE.into(), identity: String::new() })
        }
    }
}

/// Draft tokens in a step, of what was asked for.
pub(crate) fn max_draft_len(
    asked: Option<usize>,
    source: &DraftSource,
    draft: Option<&Checkpoint>,
) -> Result<usize> {
    let has_drafter = *source != DraftSource::None;
    let most = draft.and_then(|draft| draft.config.most_drafts()).unwrap_or(usize::MAX);
    let default = if has_drafter { DEFAULT_DRAFT_LEN.min(most) } else { 0 };
    let max_draft_len = asked.unwrap_or(default);
    ensure!(
        max_draft_len <= most,
        "--max-draft-len {max_draft_len}: the draft has {most} heads, one a token"
    );
    ensure!(
        has_drafter || max_draft_len == 0,
        "--max-draft-len {max_draft_len} without a drafter: add --draft"
    );
    ensure!(
        !has_drafter || max_draft_len > 0,
        "--max-draft-len 0 with a drafter: it could never engage; leave out --draft"
    );
    Ok(max_draft_len)
}

fn limits(args: &ModelArgs, target: &Checkpoint, draft: Option<&Checkpoint>) -> Result<Limits> {
    let max_draft_len = max_draft_len(args.max_draft_len, &args.draft, draft)?;
    let mut longest = usize::MAX;
    for (name, checkpoint) in [("target", Some(target)), ("draft", draft)] {
        let Some(checkpoint) = checkpoint else { continue };
        let allowed =
            checkpoint.config.max_position.min(checkpoint.sliding_window.unwrap_or(usize::MAX));
        longest = longest.min(allowed);
        if let Some(wanted) = args.max_seq_len {
            ensure!(
                wanted <= allowed,
                "--max-seq-len {wanted}: the {name} sees {allowed} positions at most"
            );
        }
    }
    let limits = Limits {
        max_draft_len,
        max_batch_size: args.max_batch_size,
        max_seq_len: args.max_seq_len.unwrap_or(longest.min(DEFAULT_SEQ_LEN)),
        max_num_tokens: args.max_num_tokens,
    };
    limits.validate(&target.config)?;
    Ok(limits)
}

/// Number formats of an engine, of what was asked for.
pub(crate) fn precision(
    weights: Dtype,
    head: Option<Dtype>,
    kv: Option<Dtype>,
    device: &Device,
) -> Result<Precision> {
    let wide = |narrow| if weights == Dtype::Fp32 { Dtype::Fp32 } else { narrow };
    let head = head.unwrap_or(match (weights, device) {
        (Dtype::Fp8, Device::Cuda { .. }) => Dtype::Fp16,
        (Dtype::Fp8 | Dtype::Int8, _) => Dtype::Bf16,
        (Dtype::Int4, _) => Dtype::Int8,
        (other, _) => other,
    });
    let kv = kv.unwrap_or(wide(Dtype::Fp16));
    ensure!(kv.holds_keys_and_values(), "--kv-dtype {kv}: expected fp32, fp16 or fp8");
    Ok(Precision { weights, head, kv })
}

/// The format of a drafter's keys and values where it is this for a target's: no scales are found for a head, and its few
/// layers take little.
pub(crate) fn draft_kv(draft: &Checkpoint, kv: Dtype) -> Dtype {
    let is_head = draft.config.draft_head.is_some();
    if is_head && kv == Dtype::Fp8 { Dtype::Fp16 } else { kv }
}

/// Writes the tokenizer's files and opens the result.
pub fn write_tokenizer(source: &TokenizerSource, dir: &Path) -> Result<Tokenizer> {
    match source {
        TokenizerSource::Gguf(metadata) => GgufTokenizer::from(&**metadata).build()?.write(dir)?,
        TokenizerSource::Files(files) => {
            let tokenizer = files
                .tokenizer
                .as_ref()
                .context("there is no tokenizer.json beside the checkpoint")?;
            let optional = [&files.config, &files.chat_template, &files.special_tokens];
            for path in [tokenizer].into_iter().chain(optional.into_iter().flatten()) {
                let name = path.file_name().context("a tokenizer file without a name")?;
                fs::copy(path, dir.join(name))
                    .with_context(|| format!("copying {}", path.display()))?;
            }
        }
    }
    Ok(Tokenizer::open(dir)?)
}

/// Refuses a drafter whose tokens mean something else than the target's.
pub(crate) fn check_drafter(
    tokenizer: &Tokenizer,
    target_vocab: usize,
    draft: &Checkpoint,
    staging: &Path,
) -> Result<()> {
    let dir = staging.join("draft_tokenizer");
    fs::create_dir(&dir).with_context(|| format!("creating {}", dir.display()))?;
    let other = write_tokenizer(&draft.tokenizer, &dir).context("tokenizer of the draft")?;
    fs::remove_dir_all(&dir).with_context(|| format!("removing {}", dir.display()))?;
    check_pair(tokenizer, &other, target_vocab, draft.config.vocab_size)
}

fn config_text(output: &Path, plan: &Plan) -> Result<String> {
    let name = output.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| {
        format!("--output {}: its last part is no name in UTF-8", output.display())
    })?;
    let config = ModelConfigText {
        name: name.into(),
        max_batch_size: plan.limits.max_batch_size,
        instances: match plan.device {
            Device::Cpu => "count: 1 kind: KIND_CPU",
            // One instance on one GPU: without a list every GPU of the machine would get one.
            Device::Cuda { .. } => "count: 1 kind: KIND_GPU gpus: [ 0 ]",
        },
        parameters: BOUNDS.map(|(key, value)| (key.into(), value.into())).into(),
    };
    Ok(config.render())
}
