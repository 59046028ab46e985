//! `spec-build verify`: every hash, then a few greedy tokens with and without speculation, where they can be run.

use crate::generate::{Run, run};
use crate::inspect::Engines;
use crate::progress::Progress;
use crate::table;
use anyhow::{Context, Result, bail, ensure};
use spec_core::engine::{Device, Engine};
use spec_core::runtime::{DraftPolicy, Options, Request, Runtime};
use spec_core::sampling::SamplingParams;
use std::path::Path;

/// Tokens that are generated.
const NUM_TOKENS: usize = 8;
/// Repeats itself, so that a look-up finds something to draft.
const PROMPT: &str = "1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8 1 2 3 4";
/// Token ids where there is no tokenizer: they repeat too.
const PROMPT_PERIOD: u32 = 5;
const PROMPT_LEN: u32 = 16;

/// Runs the command.
pub fn verify(path: &Path) -> Result<()> {
    let engines = Engines::open(path)?;
    engines.iter().try_for_each(check_hashes)?;
    let outcome = match &engines.first.manifest().device {
        Device::Cpu => check_tokens(&engines)
            .with_context(|| format!("{}: running a few tokens", path.display()))?,
        Device::Cuda { archs, .. } => {
            format!("no tokens were run: that takes a GPU of {}", archs.join(" or "))
        }
    };
    let num_sections: usize = engines.iter().map(|e| e.manifest().sections.len()).sum();
    let bytes: u64 = engines.iter().map(section_bytes).sum();
    println!(
        "{}: all {num_sections} sections ({}) have their hashes; {outcome}",
        path.display(),
        table::bytes(bytes)
    );
    Ok(())
}

fn section_bytes(engine: &Engine) -> u64 {
    engine.manifest().sections.iter().map(|section| section.bytes).sum()
}

fn check_hashes(engine: &Engine) -> Result<()> {
    let name = engine.path().file_name().unwrap_or_default().to_string_lossy();
    let progress = Progress::start(&name, section_bytes(engine));
    let mut last = 0;
    engine.verify_hashes(|done| {
        progress.add(done - last);
        last = done;
    })?;
    progress.finish();
    Ok(())
}

/// Generates greedily with drafts as long as the engine allows and without any: the tokens must be
/// the same.
fn check_tokens(engines: &Engines) -> Result<String> {
    // Both runs compute all of it: what one left must not hide what the other gets wrong.
    let options = Options {
        draft_policy: DraftPolicy::Fixed,
        kv_reuse: false,
        max_batch_size: Some(1),
        ..Options::default()
    };
    let mut runtime = Runtime::load(&engines.first, &options)?;
    let max_draft_len = runtime.limits().max_draft_len;
    let request = request(engines)?;
    let num_tokens = request.max_tokens;
    let mut generate = |draft_len| -> Result<Run> {
        let request = Request { draft_len: Some(draft_len), ..request.clone() };
        run(&mut runtime, request, |_| Ok(true))
    };
    let plain = generate(0)?;
    let finite = |run: &Run| run.emitted.iter().all(|e| e.logprob.is_some_and(f32::is_finite));
    ensure!(finite(&plain), "the log-probabilities of {:?} are not all finite", plain.tokens());
    if max_draft_len == 0 {
        return Ok(format!("{num_tokens} greedy tokens were generated, without a drafter"));
    }
    let drafted = generate(max_draft_len)?;
    if drafted.tokens() != plain.tokens() {
        bail!(
            "draft length {max_draft_len} gives tokens {:?}, draft length 0 gives {:?}",
            drafted.tokens(),
            plain.tokens()
        );
    }
    let counters = &drafted.counters;
    Ok(format!(
        "{num_tokens} greedy tokens are the same with draft length 0 and {max_draft_len} ({} drafted, {} \
         accepted)",
        counters.drafted, counters.accepted
    ))
}

fn request(engines: &Engines) -> Result<Request> {
    let manifest = engines.first.manifest();
    let mut prompt = match &engines.tokenizer {
        Some(tokenizer) => tokenizer.encode(PROMPT, true)?,
        None => Vec::new(),
    };
    if prompt.is_empty() {
        let vocab_size = manifest.model.vocab_size as u32;
        prompt = (0..PROMPT_LEN).map(|idx| idx % PROMPT_PERIOD % vocab_size).collect();
    }
    let max_seq_len = manifest.limits.max_seq_len;
    prompt.truncate(max_seq_len.saturating_sub(NUM_TOKENS).max(1));
    let max_tokens = NUM_TOKENS.min(max_seq_len - prompt.len());
    // A log-probability tells whether the logits were finite.
    let sampling = SamplingParams { logprobs: Some(0), ..SamplingParams::default() };
    Ok(Request {
        prompt: prompt.into(),
        max_tokens,
        sampling,
        ignore_eos: true,
        ..Request::default()
    })
}
