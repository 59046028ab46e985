//! `spec-build draft`: another drafter for a target that is built already, which is copied as it is.
//!
//! The new version takes the place of the old one by one rename, as a build's does; `config.pbtxt` stays as its owner has
//! made it.

use crate::checkpoint::{BuiltTarget, Checkpoint, Target};
use crate::cli::{DraftArgs, DraftSource};
use crate::copy;
use crate::device;
use crate::folder::{
    self, EngineMaker, Kernels, check_drafter, draft_kv, drafter, max_draft_len, precision,
};
use crate::skip;
use crate::staging::Staging;
use anyhow::{Context, Result, ensure};
use spec_core::engine::{Device, DrafterKind, Limits, Manifest, Precision, Role, commit_pair};
use spec_core::model::Dtype;
use spec_core::runtime::{DRAFT_FILE, ModelFolder};
use std::fs;

/// Runs the command.
pub fn draft(args: &DraftArgs) -> Result<()> {
    let folder = ModelFolder::open(&args.target)?;
    let (model_dir, version) = copy::parts(&folder.path)?;
    let old = folder.target.manifest();
    ensure!(
        old.role == Role::Target,
        "{}: it is a {:?}, expected a target",
        folder.path.display(),
        old.role
    );
    let target = BuiltTarget::of(&folder.target, &folder.path);
    let draft_device = args.draft_device.as_deref().map(device::parse).transpose()?;
    let draft_device = draft_device.unwrap_or_else(|| old.device.clone());
    let mut draft = match &args.draft {
        DraftSource::Model(path) => {
            let shares = draft_device == old.device;
            Some(Checkpoint::open_draft(path, &target, shares).context("draft")?)
        }
        DraftSource::None
        | DraftSource::Ngram { .. }
        | DraftSource::Suffix { .. }
        | DraftSource::Skip(_) => None,
    };
    let said = [
        ("--draft-dtype", args.draft_dtype.is_some()),
        ("--draft-head-dtype", args.head_dtype.is_some()),
        ("--draft-device", args.draft_device.is_some()),
    ];
    folder::check_model_drafts(draft.as_ref(), &said)?;
    skip::check(&args.skip, &args.draft)?;
    let kept = folder::draft_only(args.draft_vocab.as_ref(), draft.as_mut())?;
    if let (Some(kept), false) = (kept, args.quiet) {
        eprintln!("{DRAFT_FILE}: {kept}");
    }
    let limits = limits(args, old, draft.as_ref())?;
    let config = fs::read_to_string(model_dir.join("config.pbtxt"))
        .with_context(|| format!("reading {}", model_dir.join("config.pbtxt").display()))?;
    let staging = Staging::create(&model_dir)?;
    let tokenizer = folder::write_tokenizer(target.tokenizer(), staging.path())?;
    let maker = EngineMaker {
        // What needs no model of its own has code already.
        kernels: Kernels::new(
            [draft.as_ref().map_or(&Device::Cpu, |_| &draft_device); 2],
            args.cuda_lib.as_deref(),
        )?,
        quiet: args.quiet,
        folder: staging.path(),
    };
    let drafter = match &args.draft {
        DraftSource::Skip(source) => {
            let target = &folder.target;
            let layers = skip::of_engine(source, &args.skip, target, &tokenizer, args.quiet)?;
            DrafterKind::Skip { layers, costs: None }
        }
        other => drafter(other),
    };
    let manifest = Manifest { drafter, limits: limits.clone(), ..old.clone() };
    let copied = copy::engine(&folder.target, manifest, maker.folder, args.quiet)
        .context("copying the target")?;
    match draft {
        None => copied.commit()?,
        Some(draft) => {
            check_drafter(&tokenizer, old.model.vocab_size, &draft, staging.path())?;
            let Precision { weights, head, kv } = &old.precision;
            // As long as nothing else is said the formats are the target's, which its device has.
            let is_alike = args.draft_dtype.is_none() && draft_device == old.device;
            let shared = is_alike.then_some((*head, *kv));
            let weights = args.draft_dtype.unwrap_or(*weights);
            let head = args.head_dtype.or(shared.map(|(head, _)| head));
            let kv = shared.map(|(_, kv)| draft_kv(&draft, kv));
            let precision = precision(weights, head, kv, &draft_device)?;
            ensure!(
                args.kv_calibration.is_none() || precision.kv == Dtype::Fp8,
                "--kv-calibration: the keys and values of this drafter are {}",
                precision.kv
            );
            draft_device.validate(&draft.config, &precision).context("draft")?;
            let manifest = folder::manifest(
                &draft,
                Role::Draft,
                draft_device,
                precision,
                limits,
                Some(&tokenizer),
            )?;
            let sealed = maker
                .make(&draft, manifest, args.kv_calibration.as_ref(), &tokenizer)
                .context("building the draft")?;
            commit_pair(copied, sealed)?;
        }
    }
    copy::check(&folder.target, staging.path())?;
    staging.commit(&version, &config)
}

/// Those of the target, with the draft length that was asked for.
fn limits(args: &DraftArgs, old: &Manifest, draft: Option<&Checkpoint>) -> Result<Limits> {
    let max_draft_len = max_draft_len(args.max_draft_len, &args.draft, draft)?;
    let limits = Limits { max_draft_len, ..old.limits.clone() };
    if let Some(draft) = draft {
        let sees = draft.config.max_position.min(draft.sliding_window.unwrap_or(usize::MAX));
        ensure!(
            limits.max_seq_len <= sees,
            "the target was built for {} positions, the draft sees {sees} at most",
            limits.max_seq_len
        );
    }
    limits.validate(&old.model)?;
    Ok(limits)
}
