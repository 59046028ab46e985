//! `spec-build profile`: what passes of a target and of its drafter take on this machine, and what the drafts are worth, into
//! their manifests.
//!
//! Everything runs through a runtime, as when served. Verification is measured with drafts that requests bring along, which
//! take no drafter; what drafting adds is what is left of steps with it, and so is what reading prompts adds. What is compared
//! runs one behind the other, and differences are those within a round: a machine's speed may drift. What drafts are worth is
//! seen over the first tokens of answers to built-in prompts.

use crate::checkpoint::{BuiltTarget, Target};
use crate::cli::ProfileArgs;
use crate::copy;
use crate::folder::write_tokenizer;
use crate::prompts;
use crate::staging::Staging;
use crate::table::Table;
use anyhow::{Context, Result, ensure};
use spec_core::engine::{
    CostTable, DrafterKind, Engine, Manifest, Section, SectionKind, commit_pair,
};
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

/// What a position in the cache may take, by what as many bytes of weights take: beyond that a difference is noise.
const POSITION_BY_WEIGHTS: [f64; 2] = [0.25, 4.0];

/// A case in a round: milliseconds of its median step, and the positions that its rows read.
type Round = (f64, usize);

/// What was measured, a case at a time: of each the same rounds.
type Times = BTreeMap<Case, Vec<Round>>;

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
    let at_once = draft.as_ref().is_some_and(|draft| draft.manifest().model.drafts_at_once());
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
    let mut target_costs = target_costs(&times)?;
    bound_position(&mut target_costs, folder.target.manifest());
    let draft_costs =
        drafts.map(|drafts| draft_costs(&times, &target_costs, drafts, at_once)).transpose()?;
    let draft_costs = draft_costs.map(|mut costs| {
        bound_position(&mut costs, draft.as_ref().unwrap_or(&folder.target).manifest());
        costs
    });
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
    let mut all = vec![(1, short, Work::Verify(0)), (1, long, Work::Verify(0))];
    if has_drafter {
        let len = DRAFT_LEN.min(limits.max_draft_len);
        all.extend([(1, long, Work::Draft(len)), (1, short, Work::Draft(len))]);
        for batch in batches(&DRAFTING) {
            all.extend([(batch, short, Work::Verify(len)), (batch, short, Work::Draft(len))]);
        }
    }
    all.extend(batches(&BATCHES).into_iter().map(|batch| (batch, short, Work::Verify(0))));
    let max_given = max_given_len(limits.max_draft_len);
    for batch in batches(&[1, limits.max_batch_size.min(4)]) {
        let given = GIVEN.iter().filter(|&&len| len <= max_given);
        all.extend(given.map(|&len| (batch, short, Work::Verify(len))));
    }
    let mut cases: Vec<Case> = Vec::new();
    for (batch, positions, work) in all {
        let case = Case { batch, positions, work };
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    cases
}

/// What steps of each case take. The cases take turns, so that a machine whose speed drifts leaves their ratios.
fn measure(runtime: &mut Runtime, vocab_size: usize, cases: &[Case], rounds: u16) -> Result<Times> {
    let mut times = Times::new();
    // The first round fills the cache with the prompts.
    for round in 0..=rounds {
        for &case in cases {
            let steps = run(runtime, vocab_size, case)?;
            if round > 0 {
                times.entry(case).or_default().extend(median(&steps));
            }
        }
    }
    // Rounds are compared by their numbers.
    times.retain(|_, found| found.len() == usize::from(rounds));
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
    let prompts: Vec<Vec<u32>> = prompts.into_iter().filter(fits).collect();
    // They are sorted by kind: some of each.
    let every = (prompts.len() / ANSWERS).max(1);
    for prompt in prompts.into_iter().step_by(every).take(ANSWERS) {
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

fn median(times: &[StepTime]) -> Option<Round> {
    let mut steps: Vec<_> =
        times.iter().map(|time| (1e3 * time.took.as_secs_f64(), time.shape.positions)).collect();
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    steps.get(steps.len() / 2).copied()
}

/// The median of some numbers.
fn middle(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// What a case takes.
fn typical_ms(rounds: &[Round]) -> f64 {
    middle(rounds.iter().map(|round| round.0).collect())
}

/// What it takes more than another one, in the same rounds.
fn added_ms(rounds: &[Round], without: &[Round]) -> f64 {
    middle(rounds.iter().zip(without).map(|(with, without)| with.0 - without.0).collect())
}

/// What many positions in the cache add to a step of one sequence that does this work: milliseconds, how many these are, and
/// how many more its rows read.
fn added_by_positions(times: &Times, work: Work) -> Option<(f64, usize, usize)> {
    let of_one = times.iter().filter(|(case, _)| case.batch == 1 && case.work == work);
    let [(few, short), (many, long)] = of_one.collect::<Vec<_>>()[..] else { return None };
    let [positions, read] = [many.positions - few.positions, long[0].1 - short[0].1];
    Some((added_ms(long, short).max(0.0), positions, read))
}

fn target_costs(times: &Times) -> Result<CostTable> {
    let position_ms = added_by_positions(times, Work::Verify(0))
        .map_or(0.0, |(added_ms, _, read)| added_ms / read.max(1) as f64);
    // The same rows may be one sequence's or those of several: the mean of both counts.
    let mut by_rows: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    for (case, rounds) in times {
        let Work::Verify(len) = case.work else { continue };
        let (ms, positions) = (typical_ms(rounds), rounds[0].1);
        let without = (ms - position_ms * positions as f64).max(0.5 * ms);
        by_rows.entry(case.batch * (1 + len)).or_default().push(without);
    }
    ensure!(by_rows.contains_key(&1), "no step told what it took");
    let mean = |ms: Vec<f64>| ms.iter().sum::<f64>() / ms.len() as f64;
    let (rows, step_ms) = by_rows.into_iter().map(|(rows, ms)| (rows, mean(ms))).unzip();
    Ok(CostTable { rows, step_ms, position_ns: 1e6 * position_ms, ..CostTable::default() })
}

fn draft_costs(
    times: &Times,
    target: &CostTable,
    drafts: Drafts,
    at_once: bool,
) -> Result<CostTable> {
    // What one pass took: of a row a sequence, or of all its drafts.
    let pass_ms = |case: &Case, rounds: &Vec<Round>| {
        let Work::Draft(len) = case.work else { return None };
        let without = times.get(&Case { work: Work::Verify(len), ..*case })?;
        let passes = if at_once { 1 } else { len };
        // A drafter so small that noise hides it takes something still.
        let ms = (added_ms(rounds, without) / passes as f64).max(1e-3 * typical_ms(rounds));
        Some((case.batch * if at_once { len } else { 1 }, ms))
    };
    let passes = times.iter().filter_map(|(case, rounds)| pass_ms(case, rounds));
    let (rows, step_ms): (Vec<usize>, Vec<f64>) = passes.unzip();
    ensure!(!rows.is_empty(), "no step with drafts told what it took");
    let drafting = times.keys().find_map(|case| match case.work {
        Work::Draft(len) => Some((case.work, if at_once { 1 } else { len })),
        Work::Verify(_) => None,
    });
    // Of a step the target has its share, of each of its rows.
    let position_ms = drafting.and_then(|(work, passes)| {
        let (added_ms, positions, read) = added_by_positions(times, work)?;
        let of_target = 1e-6 * target.position_ns * read as f64;
        Some((added_ms - of_target).max(0.0) / (passes * positions) as f64)
    });
    let position_ns = 1e6 * position_ms.unwrap_or(0.0);
    let Drafts { prompt_token_ms, acceptance } = drafts;
    Ok(CostTable { rows, step_ms, position_ns, prompt_token_ms, acceptance })
}

/// Keeps what a position takes near to what as many bytes of weights take in a pass.
fn bound_position(costs: &mut CostTable, manifest: &Manifest) {
    let Manifest { model, precision, sections, .. } = manifest;
    let of_position = 2 * model.num_layers * model.kv_size() * precision.kv.bytes();
    let is_read = |section: &&Section| {
        section.kind == SectionKind::Weight && (model.tied_head || section.name != "embed")
    };
    let of_pass: u64 = sections.iter().filter(is_read).map(|section| section.bytes).sum();
    let as_weights = 1e6 * costs.step_ms[0] * of_position as f64 / of_pass.max(1) as f64;
    let [least, most] = POSITION_BY_WEIGHTS.map(|share| share * as_weights);
    costs.position_ns = costs.position_ns.clamp(least, most);
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of a machine that becomes slower and faster. A target's row takes 1 ms and a microsecond a position, a
    /// drafter's pass 2 ms and half a microsecond; both have 10 ms beside.
    fn measured(cases: &[(usize, usize, Work)]) -> Times {
        let round = |&(batch, positions, work): &(usize, usize, Work), pace: f64| {
            let (drafts, passes) = match work {
                Work::Verify(len) => (len, 0),
                Work::Draft(len) => (len, len),
            };
            let rows = batch * (1 + drafts);
            let read = rows * positions;
            let of_pass = 2.0 + 5e-4 * (batch * positions) as f64;
            let ms = 10.0 + rows as f64 + 1e-3 * read as f64 + passes as f64 * of_pass;
            (pace * ms, read)
        };
        let rounds = |case: &(usize, usize, Work)| [1.0, 1.4, 0.7].map(|pace| round(case, pace));
        let case = |&(batch, positions, work): &_| Case { batch, positions, work };
        cases.iter().map(|each| (case(each), rounds(each).to_vec())).collect()
    }

    fn close(found: f64, expected: f64) -> bool {
        (found - expected).abs() < 1e-6 * expected
    }

    #[test]
    fn what_drafts_take_is_what_they_add_to_steps_that_verify_as_much() {
        use Work::{Draft, Verify};
        let times = measured(&[
            (1, 0, Verify(0)),
            (1, 1000, Verify(0)),
            (1, 0, Verify(4)),
            (64, 0, Verify(4)),
            (1, 0, Draft(4)),
            (64, 0, Draft(4)),
            (1, 1000, Draft(4)),
        ]);
        let target = target_costs(&times).unwrap();
        assert_eq!(target.rows, [1, 5, 320]);
        assert!(close(target.step_ms[0], 11.0) && close(target.step_ms[2], 330.0), "{target:?}");
        assert!(close(target.position_ns, 1000.0), "{target:?}");
        let drafts = Drafts { prompt_token_ms: 1.0, acceptance: Vec::new() };
        let drafts = draft_costs(&times, &target, drafts, false).unwrap();
        assert_eq!(drafts.rows, [1, 64]);
        assert!(drafts.step_ms.iter().all(|&ms| close(ms, 2.0)), "{drafts:?}");
        assert!(close(drafts.position_ns, 500.0), "{drafts:?}");
    }
}
