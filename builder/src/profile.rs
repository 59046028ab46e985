//! `spec-build profile`: what passes of a target and of its drafter take on this machine, and what the drafts are worth, into
//! their manifests.
//!
//! Everything runs through a runtime, as when served. Verification is measured with drafts that requests bring along, which
//! take no drafter; what drafting adds is what is left of steps with it, and so is what reading prompts adds. What drafts
//! are worth is seen over the first tokens of answers to built-in prompts.

use crate::checkpoint::{BuiltTarget, Target};
use crate::cli::ProfileArgs;
use crate::copy;
use crate::folder::write_tokenizer;
use crate::prompts;
use crate::staging::Staging;
use crate::table::Table;
use anyhow::{Context, Result, ensure};
use spec_core::engine::{CostTable, Device, DrafterKind, Engine, Manifest, commit_pair};
use spec_core::runtime::{
    Counters, DraftPolicy, ModelFolder, Options, PAGE_TOKENS, Request, Runtime, StepTime,
    max_given_len,
};
use std::collections::BTreeMap;
use std::fs;
use std::time::Instant;

/// Sequences at a time.
const BATCHES: [usize; 13] = [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64];
/// Sequences at a time whose drafts are measured.
const DRAFTING: [usize; 4] = [1, 4, 16, 64];
/// Draft tokens that are verified.
const GIVEN: [usize; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
/// Draft tokens a step where the drafter is measured.
const DRAFT_LEN: usize = 4;
/// Steps of a run.
const STEPS: usize = 6;
/// Positions of a long text.
const LONG: usize = 1024;
/// Tokens of a prompt that is read.
const READ: usize = 256;
/// Built-in prompts that are answered, and tokens of an answer.
const ANSWERS: usize = 12;
const ANSWER_TOKENS: usize = 32;

/// What runs at a time: so many sequences that have so many positions in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Case {
    batch: usize,
    positions: usize,
    work: Work,
}

/// What a step of it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Work {
    /// Verifies drafts of this length; 0 is plain decoding.
    Verify(usize),
    /// Drafts so much and verifies it.
    Draft(usize),
}

/// Runs the command.
pub fn profile(args: &ProfileArgs) -> Result<()> {
    let folder = ModelFolder::open(&args.model)?;
    let draft = folder.target.open_drafter()?;
    let options = Options {
        threads: args.threads,
        isa: args.isa,
        draft_policy: DraftPolicy::Fixed,
        ..Options::default()
    };
    let at_once = draft.as_ref().is_some_and(|draft| {
        let Manifest { model, device, .. } = draft.manifest();
        *device == Device::Cpu && model.drafts_at_once()
    });
    let skips = matches!(folder.target.manifest().drafter, DrafterKind::Skip { .. });
    let cases = cases(&folder.target, draft.is_some() || skips);
    let (times, drafts) = {
        let mut runtime = Runtime::load(&folder.target, &options)?;
        let _pinned = runtime.pin_caller();
        let vocab_size = folder.target.manifest().model.vocab_size;
        let times = measure(&mut runtime, vocab_size, &cases, args.rounds)?;
        let drafts = match draft.is_some() || skips {
            false => None,
            true => Some(Drafts {
                prompt_token_ms: match skips {
                    // The target has read it.
                    true => 0.0,
                    false => prompt_token_ms(&mut runtime, vocab_size, args.rounds)?,
                },
                acceptance: acceptance(&mut runtime, prompts::built_in(&folder.tokenizer))?,
            }),
        };
        (times, drafts)
    };
    let target_costs = target_costs(&times)?;
    let draft_costs =
        drafts.map(|drafts| draft_costs(&times, &target_costs, drafts, at_once)).transpose()?;
    if !args.quiet {
        print!("{}", report(&target_costs, draft_costs.as_ref()));
    }
    store(&folder, target_costs, draft.as_ref(), draft_costs)
}

/// What drafts of a model take besides passes, and what they are worth.
struct Drafts {
    prompt_token_ms: f64,
    acceptance: Vec<f64>,
}

/// What is measured of an engine.
fn cases(target: &Engine, has_drafter: bool) -> Vec<Case> {
    let limits = &target.manifest().limits;
    // Whole pages and one token: what the cache has of a prompt leaves one row to compute.
    let short = PAGE_TOKENS + 1;
    let long = LONG.min(limits.max_seq_len / 2) / PAGE_TOKENS * PAGE_TOKENS + 1;
    let batches = |all: &[usize]| -> Vec<usize> {
        all.iter().copied().filter(|&batch| batch <= limits.max_batch_size).collect()
    };
    let plain = batches(&BATCHES).into_iter().map(|batch| (batch, short, Work::Verify(0)));
    let mut cases: Vec<_> = plain.chain([(1, long, Work::Verify(0))]).collect();
    let max_given = max_given_len(limits.max_draft_len);
    for batch in batches(&[1, limits.max_batch_size.min(4)]) {
        let given = GIVEN.iter().filter(|&&len| len <= max_given);
        cases.extend(given.map(|&len| (batch, short, Work::Verify(len))));
    }
    if has_drafter {
        let work = Work::Draft(DRAFT_LEN.min(limits.max_draft_len));
        cases.extend(batches(&DRAFTING).into_iter().map(|batch| (batch, short, work)));
        cases.push((1, long, work));
    }
    cases.into_iter().map(|(batch, positions, work)| Case { batch, positions, work }).collect()
}

/// What steps of each case take. The cases take turns, so that a machine whose speed drifts leaves their ratios.
fn measure(
    runtime: &mut Runtime,
    vocab_size: usize,
    cases: &[Case],
    rounds: u16,
) -> Result<BTreeMap<Case, Vec<StepTime>>> {
    let mut times: BTreeMap<Case, Vec<StepTime>> = BTreeMap::new();
    // The first round fills the cache with the prompts.
    for round in 0..=rounds {
        for &case in cases {
            let steps = run(runtime, vocab_size, case)?;
            if round > 0 {
                times.entry(case).or_default().extend(steps);
            }
        }
    }
    Ok(times)
}

/// Runs a case once and gives its steps that did what the case is about.
fn run(runtime: &mut Runtime, vocab_size: usize, case: Case) -> Result<Vec<StepTime>> {
    let Case { batch, positions, work } = case;
    let (given, draft_len) = match work {
        Work::Verify(len) => (len, 0),
        Work::Draft(len) => (0, len),
    };
    // Only the step behind the prompt verifies what a request brought along.
    let max_tokens = if given > 0 { given + 2 } else { STEPS };
    for idx in 0..batch {
        runtime.add(Request {
            prompt: tokens(vocab_size, idx as u64, positions).into(),
            given_draft: tokens(vocab_size, !(idx as u64), given),
            draft_len: Some(draft_len),
            max_tokens,
            ignore_eos: true,
            ..Request::default()
        })?;
    }
    let rows = batch * (1 + given.max(draft_len));
    let mut steps = Vec::new();
    while !runtime.is_idle() {
        let step = runtime.step();
        if let Some(error) = step.failure {
            return Err(error.into());
        }
        let is_of_case = |time: &StepTime| {
            let drafting = if draft_len > 0 { batch } else { 0 };
            time.shape.rows == rows && time.shape.drafting == drafting
        };
        steps.extend(step.time.filter(is_of_case));
    }
    Ok(steps)
}

/// What a drafter adds to a prompt that it reads, a token: of prompts that it reads and others that it does not, in turn.
fn prompt_token_ms(runtime: &mut Runtime, vocab_size: usize, rounds: u16) -> Result<f64> {
    let len = READ.min(runtime.limits().max_seq_len / 2);
    let mut added: Vec<f64> = Vec::new();
    // No two are alike: none is found in the cache.
    for round in 0..2 * u64::from(rounds).max(2) {
        let mut took = [0.0; 2];
        for draft_len in [0, 1] {
            runtime.add(Request {
                prompt: tokens(vocab_size, 1000 + 2 * round + draft_len, len).into(),
                draft_len: Some(draft_len as usize),
                max_tokens: 1,
                ..Request::default()
            })?;
            let start = Instant::now();
            drain(runtime, |_| ())?;
            took[draft_len as usize] = 1e3 * start.elapsed().as_secs_f64();
        }
        added.push((took[1] - took[0]).max(1e-3 * took[0]) / len as f64);
    }
    added.sort_by(f64::total_cmp);
    Ok(added[added.len() / 2])
}

/// The share of drafts that is accepted at each position where those before it were, as far as any were tried there.
fn acceptance(runtime: &mut Runtime, prompts: Vec<Vec<u32>>) -> Result<Vec<f64>> {
    let limits = runtime.limits().clone();
    let draft_len = DRAFT_LEN.min(limits.max_draft_len);
    let fits = |prompt: &Vec<u32>| prompt.len() + ANSWER_TOKENS <= limits.max_seq_len;
    for prompt in prompts.into_iter().filter(fits).take(ANSWERS) {
        runtime.add(Request {
            prompt: prompt.into(),
            draft_len: Some(draft_len),
            max_tokens: ANSWER_TOKENS,
            ..Request::default()
        })?;
    }
    // Drafts, then those whose first tokens were accepted.
    let mut reached = vec![0; draft_len + 1];
    drain(runtime, |counters| {
        reached[0] += counters.drafts;
        for (reached, accepted) in reached[1..].iter_mut().zip(&counters.accepted_per_position) {
            *reached += accepted;
        }
    })?;
    // Neither never nor always: so few drafts do not tell that.
    let rate = |pair: &[u64]| (pair[1] as f64 + 0.5) / (pair[0] as f64 + 1.0);
    let tried = reached.windows(2).take_while(|pair| pair[0] > 0);
    Ok(tried.map(rate).collect())
}

/// Runs all that there is to its end, and tells what each sequence has counted.
fn drain(runtime: &mut Runtime, mut ended: impl FnMut(&Counters)) -> Result<()> {
    while !runtime.is_idle() {
        let step = runtime.step();
        if let Some(error) = step.failure {
            return Err(error.into());
        }
        let finished = step.events.iter().filter_map(|event| event.finished.as_ref());
        finished.for_each(|sequence| ended(&sequence.counters));
    }
    Ok(())
}

/// Tokens as if drawn: what they are does not matter, only that sequences differ.
fn tokens(vocab_size: usize, seed: u64, len: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab_size as u64) as u32
    };
    (0..len).map(|_| next()).collect()
}

/// The median step of a case: milliseconds, and positions that its rows read.
fn median(times: &[StepTime]) -> Option<(f64, usize)> {
    let mut steps: Vec<_> =
        times.iter().map(|time| (1e3 * time.took.as_secs_f64(), time.shape.positions)).collect();
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    steps.get(steps.len() / 2).copied()
}

fn target_costs(times: &BTreeMap<Case, Vec<StepTime>>) -> Result<CostTable> {
    let verified = |case: &Case| match case.work {
        Work::Verify(len) => Some(case.batch * (1 + len)),
        Work::Draft(_) => None,
    };
    let longest = |case: &Case| (case.batch, case.work) == (1, Work::Verify(0));
    let ends: Vec<_> =
        times.iter().filter(|(case, _)| longest(case)).filter_map(|(_, t)| median(t)).collect();
    let position_ms = match ends[..] {
        [(short_ms, short), (long_ms, long)] if long > short => {
            ((long_ms - short_ms) / (long - short) as f64).max(0.0)
        }
        _ => 0.0,
    };
    // The same rows may be one sequence's or those of several: the mean of both counts.
    let mut by_rows: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for (case, times) in times {
        if let (Some(rows), Some((ms, positions))) = (verified(case), median(times)) {
            let floor = 0.5 * ms;
            by_rows.entry(rows).or_default().push((ms - position_ms * positions as f64).max(floor));
        }
    }
    ensure!(by_rows.contains_key(&1), "no step told what it took");
    let mean = |ms: Vec<f64>| ms.iter().sum::<f64>() / ms.len() as f64;
    let (rows, step_ms) = by_rows.into_iter().map(|(rows, ms)| (rows, mean(ms))).unzip();
    Ok(CostTable { rows, step_ms, position_ns: 1e6 * position_ms, ..CostTable::default() })
}

fn draft_costs(
    times: &BTreeMap<Case, Vec<StepTime>>,
    target: &CostTable,
    drafts: Drafts,
    at_once: bool,
) -> Result<CostTable> {
    // What one pass took, and where: of a row a sequence, or of all its drafts.
    let passes = times.iter().filter_map(|(case, times)| {
        let Work::Draft(len) = case.work else { return None };
        let (ms, positions) = median(times)?;
        let at = target.rows.iter().position(|&rows| rows >= case.batch * (1 + len));
        let verify_ms = target.step_ms[at.unwrap_or(target.rows.len() - 1)]
            + 1e-6 * target.position_ns * positions as f64;
        // A drafter so small that noise hides it takes something still.
        let passes = if at_once { 1 } else { len };
        Some((*case, ((ms - verify_ms) / passes as f64).max(1e-3 * ms)))
    });
    let passes: Vec<(Case, f64)> = passes.collect();
    let (_, first_ms) = passes.first().context("no step with drafts told what it took")?;
    let long = passes.iter().find(|(case, _)| case.batch == 1 && case.positions > PAGE_TOKENS + 1);
    let position_ms =
        long.map_or(0.0, |(case, ms)| (ms - first_ms).max(0.0) / case.positions as f64);
    let short = passes.iter().filter(|(case, _)| case.positions == PAGE_TOKENS + 1);
    let rows_of_each = if at_once { DRAFT_LEN } else { 1 };
    let (rows, step_ms) = short.map(|(case, ms)| (case.batch * rows_of_each, *ms)).unzip();
    let Drafts { prompt_token_ms, acceptance } = drafts;
    Ok(CostTable { rows, step_ms, position_ns: 1e6 * position_ms, prompt_token_ms, acceptance })
}

fn report(target: &CostTable, draft: Option<&CostTable>) -> String {
    let mut text = String::new();
    let tables = [("verification", Some(target)), ("a draft pass", draft)];
    for (name, costs) in tables.into_iter().filter_map(|(name, costs)| Some((name, costs?))) {
        let mut table = Table::new([name, "rows", "ms", "of the first"]);
        for (rows, ms) in costs.rows.iter().zip(&costs.step_ms) {
            let of_first = format!("{:.2}", ms / costs.step_ms[0]);
            table.row([String::new(), rows.to_string(), format!("{ms:.3}"), of_first]);
        }
        let per_row = format!("{:.3}", 1e-3 * costs.position_ns);
        table.row(["".into(), "1000 positions of the cache, a row".into(), per_row, String::new()]);
        if costs.prompt_token_ms > 0.0 {
            let ms = format!("{:.3}", costs.prompt_token_ms);
            table.row(["".into(), "reading a token of a prompt".into(), ms, String::new()]);
        }
        if !costs.acceptance.is_empty() {
            let rates = costs.acceptance.iter().map(|rate| format!("{rate:.2}"));
            let rates = rates.collect::<Vec<_>>().join(", ");
            let what = format!("drafts accepted, by position: {rates}");
            table.row(["".into(), what, String::new(), String::new()]);
        }
        text += &table.to_string();
    }
    text
}

/// Puts the times into the manifests, by copies that take the place of the engines at once.
fn store(
    folder: &ModelFolder,
    target_costs: CostTable,
    draft: Option<&Engine>,
    draft_costs: Option<CostTable>,
) -> Result<()> {
    let (model_dir, version) = copy::parts(&folder.path)?;
    let config = model_dir.join("config.pbtxt");
    let config =
        fs::read_to_string(&config).with_context(|| format!("reading {}", config.display()))?;
    let staging = Staging::create(&model_dir)?;
    let built = BuiltTarget::of(&folder.target, &folder.path);
    write_tokenizer(built.tokenizer(), staging.path())?;
    let copied = |engine: &Engine, manifest| {
        copy::engine(engine, manifest, staging.path(), true).context("copying an engine")
    };
    let mut manifest = Manifest { costs: Some(target_costs), ..folder.target.manifest().clone() };
    if let DrafterKind::Skip { costs, .. } = &mut manifest.drafter {
        costs.clone_from(&draft_costs);
    }
    let target = copied(&folder.target, manifest)?;
    match draft {
        None => target.commit()?,
        Some(draft) => {
            let manifest = Manifest { costs: draft_costs, ..draft.manifest().clone() };
            commit_pair(target, copied(draft, manifest)?)?;
            copy::check(draft, staging.path())?;
        }
    }
    copy::check(&folder.target, staging.path())?;
    staging.commit(&version, &config)
}
