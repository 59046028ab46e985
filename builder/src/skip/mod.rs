//! `--draft skip`: which of its own layers a target drafts without, from a file or searched.

mod file;
mod search;

use crate::checkpoint::Checkpoint;
use crate::cli::{DraftSource, SkipArgs};
use crate::folder::{EngineMaker, Kernels, file_of};
use crate::prompts;
use anyhow::{Context, Result, bail, ensure};
use spec_core::engine::{Device, DrafterKind, Engine, Manifest, Precision, Role};
use spec_core::exec::Written;
use spec_core::model::{Dtype, LayerSkip, ModelConfig};
use spec_core::runtime::{Options, Request, Runtime};
use spec_core::tokenizer::Tokenizer;
use std::fs;
use std::path::PathBuf;

/// Texts that are written to search on, and to judge by.
const TEXTS: usize = 24;
/// How long layers are searched where nothing is said.
const MINUTES: f64 = 5.0;
/// Tokens of a prompt that is answered, and of an answer.
const MAX_PROMPT: usize = 512;
const ANSWER_TOKENS: usize = 128;

/// Where the layers to skip come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SkipSource {
    /// They are searched.
    Search,
    /// A file such as SWIFT's `skip_layers.json`.
    File(PathBuf),
}

/// The layers that a target that is to be built is to skip. They are searched with an engine for this CPU, whatever the
/// target's device.
pub(crate) fn of_checkpoint(
    source: &SkipSource,
    args: &SkipArgs,
    checkpoint: &Checkpoint,
    manifest: &Manifest,
    tokenizer: &Tokenizer,
    maker: &EngineMaker<'_>,
) -> Result<LayerSkip> {
    if let SkipSource::File(path) = source {
        return file::read(path, args.skip_entry.as_deref(), &manifest.model);
    }
    if !maker.quiet {
        eprintln!("searching layers to skip with an engine for this CPU");
    }
    let folder = maker.folder.join("layer_search");
    fs::create_dir(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let manifest = Manifest {
        device: Device::Cpu,
        drafter: DrafterKind::None,
        precision: Precision { kv: Dtype::Fp16, ..manifest.precision.clone() },
        ..manifest.clone()
    };
    let kernels = Kernels::new([&Device::Cpu; 2], None)?;
    EngineMaker { kernels, quiet: true, folder: &folder }.seal(checkpoint, manifest)?.commit()?;
    let engine = Engine::open(folder.join(file_of(Role::Target)))?;
    let skip = searched(&engine, args, tokenizer, maker.quiet)?;
    fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    Ok(skip)
}

/// The layers of a file, for a plan: nothing is searched.
pub(crate) fn of_file(
    source: &SkipSource,
    args: &SkipArgs,
    model: &ModelConfig,
) -> Result<LayerSkip> {
    match source {
        SkipSource::File(path) => file::read(path, args.skip_entry.as_deref(), model),
        SkipSource::Search => {
            bail!("layers to skip are searched by a build: name some with skip:FILE")
        }
    }
}

/// The layers that a target that is built is to skip.
pub(crate) fn of_engine(
    source: &SkipSource,
    args: &SkipArgs,
    engine: &Engine,
    tokenizer: &Tokenizer,
    quiet: bool,
) -> Result<LayerSkip> {
    if let SkipSource::File(path) = source {
        return file::read(path, args.skip_entry.as_deref(), &engine.manifest().model);
    }
    ensure!(
        engine.manifest().device == Device::Cpu,
        "layers are searched on a CPU, and this target was built for a GPU: build it with --draft skip, or name layers with \
         skip:FILE"
    );
    searched(engine, args, tokenizer, quiet)
}

/// Refuses what is said about a search, or a file, that is not there.
pub(crate) fn check(args: &SkipArgs, draft: &DraftSource) -> Result<()> {
    let SkipArgs { skip_prompts, skip_minutes, skip_entry } = args;
    let searches = skip_prompts.is_some() || skip_minutes.is_some();
    match draft {
        DraftSource::Skip(SkipSource::Search) => {
            ensure!(skip_entry.is_none(), "--skip-entry without a file: --draft skip:FILE");
        }
        DraftSource::Skip(SkipSource::File(_)) => {
            ensure!(
                !searches,
                "--skip-prompts and --skip-minutes: layers of a file are not searched"
            );
        }
        _ => ensure!(!searches && skip_entry.is_none(), "--skip-... without --draft skip"),
    }
    Ok(())
}

fn searched(
    engine: &Engine,
    args: &SkipArgs,
    tokenizer: &Tokenizer,
    quiet: bool,
) -> Result<LayerSkip> {
    let prompts = match &args.skip_prompts {
        Some(file) => prompts::read(&[file], tokenizer, true)?,
        None => prompts::built_in(tokenizer),
    };
    let texts = answers(engine, prompts)?;
    let found = search::search(engine, &texts, args.skip_minutes.unwrap_or(MINUTES))?;
    if !quiet {
        eprint!("{}", found.report());
    }
    Ok(found.skip)
}

/// What the target answers to some of the prompts, all of their kinds.
fn answers(engine: &Engine, prompts: Vec<Vec<u32>>) -> Result<Vec<Written>> {
    let mut runtime = Runtime::load(engine, &Options::default())?;
    let _pinned = runtime.pin_caller();
    let max_seq_len = runtime.limits().max_seq_len;
    let longest = MAX_PROMPT.min(max_seq_len / 2);
    let fits: Vec<Vec<u32>> =
        prompts.into_iter().filter(|tokens| tokens.len() <= longest).collect();
    ensure!(!fits.is_empty(), "no prompt of at most {longest} tokens: see --skip-prompts");
    let every = fits.len().div_ceil(TEXTS);
    for prompt in fits.into_iter().step_by(every) {
        runtime.add(Request {
            max_tokens: ANSWER_TOKENS.min(max_seq_len - prompt.len()),
            prompt: prompt.into(),
            draft_len: Some(0),
            ..Request::default()
        })?;
    }
    let mut texts = Vec::new();
    while !runtime.is_idle() {
        let step = runtime.step();
        if let Some(error) = step.failure {
            return Err(error.into());
        }
        let finished = step.events.into_iter().filter_map(|event| event.finished);
        texts.extend(finished.map(|sequence| Written {
            tokens: sequence.tokens.to_vec(),
            prompt_len: sequence.prompt_len,
        }));
    }
    Ok(texts)
}
