//! What drafters bring, each beside plain decoding in the same round.
//!
//! `drafters MODEL_DIR... --prompts FILE [--held-out N] [--num N] [--draft-len auto,2,4] [--branches 1,2] [--at-once
//! 1,8] [--tree-tokens N] [--rounds N] [--below X]` has each model folder, of one target with another drafter each,
//! answer the prompts, so many at once. Texts are compared with plain ones of the same folder, ratios are of the same
//! round, and the median of them is printed, and that of the prompt on which it is the least. The cache has the prompts
//! when the clock starts, and nothing is known of drafts and of what steps cost but what the engine says. With
//! `--held-out N` every Nth prompt is asked, those that `spec-build collect` held out. `--below 1.1` shows apart the
//! prompts on which the first model, in its first way to draft, comes to less than 1.1 of plain.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use spec_build::cli::DraftLen;
use spec_build::prompts;
use spec_core::runtime::{DraftPolicy, Lookup, ModelFolder, Options, Request, Runtime};
use spec_core::sampling::SamplingParams;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

/// Positions of a draft whose acceptance is shown.
const POSITIONS: usize = 4;

#[derive(Parser)]
struct Args {
    /// Built model folders.
    #[arg(required = true)]
    models: Vec<PathBuf>,
    /// As for `spec-build collect`; may be repeated.
    #[arg(long, required = true)]
    prompts: Vec<PathBuf>,
    /// Ask every Nth prompt alone.
    #[arg(long, default_value_t = 1)]
    held_out: usize,
    /// Prompts that are asked at most, evenly from all.
    #[arg(long, default_value_t = 12)]
    num: usize,
    /// Tokens of each answer at most.
    #[arg(long, default_value_t = 128)]
    tokens: usize,
    /// 0 is greedy; others are drawn with seeds.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Draft lengths, `auto` among them.
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    draft_len: Vec<DraftLen>,
    /// Tokens of a position that a model or a head drafts at most.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    branches: Vec<usize>,
    /// Tokens of a draft at most, in all branches.
    #[arg(long)]
    tree_tokens: Option<usize>,
    /// Prompts that are answered at a time.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    at_once: Vec<usize>,
    /// Where drafts are looked up ahead of a model or a head: off, ngram or suffix [default: as a server does].
    #[arg(long)]
    lookup: Option<Lookup>,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Show apart the prompts on which the first model comes to less than this of plain.
    #[arg(long)]
    below: Option<f64>,
}

/// How drafts are made.
#[derive(Clone, Copy)]
struct Way {
    draft_len: DraftLen,
    branches: usize,
}

impl Args {
    /// Plain, then every draft length with every number of branches.
    fn ways(&self) -> Vec<Way> {
        let lens = self.draft_len.iter().flat_map(|&draft_len| {
            self.branches.iter().map(move |&branches| Way { draft_len, branches })
        });
        let plain = Way { draft_len: DraftLen::Fixed(0), branches: 1 };
        std::iter::once(plain).chain(lens).collect()
    }
}

/// What the prompts took once.
#[derive(Default)]
struct Took {
    seconds: f64,
    /// When each answer had come.
    ended: Vec<f64>,
    tokens: usize,
    steps: u64,
    drafts: u64,
    accepted: [u64; POSITIONS],
    texts: Vec<Vec<u32>>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let prompts = chosen(&args, &ModelFolder::open(&args.models[0])?)?;
    println!(
        "{} prompts, up to {} tokens each, temperature {}",
        prompts.len(),
        args.tokens,
        args.temperature
    );
    println!();
    println!(
        "| model | at once | draft length | branches | tokens/s | of plain | least of a prompt | tokens a step | accepted at 1 | 2 | 3 | 4 | same texts |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    ensure!(
        args.below.is_none() || args.at_once == [1],
        "--below with --at-once {:?}: expected 1, so that each prompt has a time of its own",
        args.at_once
    );
    let mut all_rounds = Vec::new();
    for path in &args.models {
        let folder = ModelFolder::open(path)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        for &at_once in &args.at_once {
            // `[round][way]`
            let rounds: Vec<Vec<Took>> = (0..args.rounds)
                .map(|_| round(&args, &folder, at_once, &prompts))
                .collect::<Result<_>>()?;
            for (idx, Way { draft_len, branches }) in args.ways().into_iter().enumerate() {
                let how = format!("{} | {branches}", show(draft_len));
                println!("| {name} | {at_once} | {how} | {} |", row(&rounds, idx, at_once));
            }
            all_rounds.push((name.to_string(), rounds));
        }
    }
    if let Some(below) = args.below {
        show_below(below, &args, &all_rounds);
    }
    Ok(())
}

/// The speed on those prompts alone on which the first model does not come to `below` of plain.
fn show_below(below: f64, args: &Args, models: &[(String, Vec<Vec<Took>>)]) {
    let (first, rounds) = &models[0];
    let num_prompts = prompts_of(rounds);
    let chosen: Vec<usize> =
        (0..num_prompts).filter(|&prompt| of_plain(rounds, 1, &[prompt]) < below).collect();
    println!();
    println!(
        "{} of {num_prompts} prompts on which {first} comes to less than {below} of plain:",
        chosen.len()
    );
    println!();
    println!("| model | draft length | branches | of plain |");
    println!("|---|---|---|---|");
    for (name, rounds) in models {
        for (idx, Way { draft_len, branches }) in args.ways().into_iter().enumerate().skip(1) {
            let ratio = of_plain(rounds, idx, &chosen);
            println!("| {name} | {} | {branches} | {ratio:.2} |", show(draft_len));
        }
    }
}

/// The speed on some prompts, of those that were answered one after the other.
fn of_plain(rounds: &[Vec<Took>], way: usize, prompts: &[usize]) -> f64 {
    let seconds = |took: &Took| prompts.iter().map(|&prompt| took.seconds_of(prompt)).sum::<f64>();
    median(rounds.iter().map(|round| seconds(&round[0]) / seconds(&round[way])).collect())
}

impl Took {
    /// The time of one of answers that came one after the other.
    fn seconds_of(&self, prompt: usize) -> f64 {
        let before = prompt.checked_sub(1).map_or(0.0, |before| self.ended[before]);
        self.ended[prompt] - before
    }
}

fn show(len: DraftLen) -> String {
    match len {
        DraftLen::Auto => "auto".into(),
        DraftLen::Fixed(0) => "none".into(),
        DraftLen::Fixed(len) => len.to_string(),
    }
}

/// The prompts that are asked.
fn chosen(args: &Args, folder: &ModelFolder) -> Result<Vec<Vec<u32>>> {
    ensure!(args.held_out > 0, "--held-out 0: expected a number from 1 on");
    let all = prompts::read(&args.prompts, &folder.tokenizer, true)?;
    let kept: Vec<Vec<u32>> =
        all.into_iter().skip(args.held_out - 1).step_by(args.held_out).collect();
    let num = args.num.min(kept.len());
    Ok((0..num).map(|idx| kept[idx * kept.len() / num].clone()).collect())
}

/// Every way once.
fn round(
    args: &Args,
    folder: &ModelFolder,
    at_once: usize,
    prompts: &[Vec<u32>],
) -> Result<Vec<Took>> {
    args.ways().into_iter().map(|way| answers(args, folder, way, at_once, prompts)).collect()
}

fn answers(
    args: &Args,
    folder: &ModelFolder,
    way: Way,
    at_once: usize,
    prompts: &[Vec<u32>],
) -> Result<Took> {
    let (draft_policy, draft_len) = match way.draft_len {
        DraftLen::Auto => (DraftPolicy::Adaptive, None),
        DraftLen::Fixed(len) => (DraftPolicy::Fixed, Some(len)),
    };
    let options = Options {
        draft_policy,
        lookup: args.lookup,
        draft_branches: way.branches,
        draft_tree_tokens: args.tree_tokens,
        max_batch_size: Some(at_once),
        max_queue: prompts.len(),
        ..Options::default()
    };
    let mut runtime = Runtime::load(&folder.target, &options)?;
    let _pinned = runtime.pin_caller();
    let request = |idx: usize, max_tokens, draft_len| Request {
        prompt: prompts[idx].clone().into(),
        max_tokens,
        draft_len,
        sampling: SamplingParams {
            temperature: args.temperature,
            seed: Some(idx as u64),
            ..SamplingParams::default()
        },
        ..Request::default()
    };
    for idx in 0..prompts.len() {
        runtime.add(request(idx, 1, Some(0)))?;
    }
    finish(&mut runtime, &mut Took::default())?;
    let mut took = Took::default();
    for idx in 0..prompts.len() {
        runtime.add(request(idx, args.tokens, draft_len))?;
    }
    finish(&mut runtime, &mut took)?;
    Ok(took)
}

/// Answers all that was asked.
fn finish(runtime: &mut Runtime, took: &mut Took) -> Result<()> {
    let start = Instant::now();
    let mut texts: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    while !runtime.is_idle() {
        let step = runtime.step();
        if let Some(error) = step.failure {
            return Err(error).context("answering prompts");
        }
        for event in step.events {
            let tokens = event.emitted.iter().map(|emitted| emitted.token);
            texts.entry(event.id).or_default().extend(tokens);
            let Some(sequence) = event.finished else { continue };
            took.ended.push(start.elapsed().as_secs_f64());
            took.steps += sequence.counters.steps;
            took.drafts += sequence.counters.drafts;
            let accepted = &sequence.counters.accepted_per_position;
            for (sum, count) in took.accepted.iter_mut().zip(accepted) {
                *sum += count;
            }
        }
    }
    took.seconds = start.elapsed().as_secs_f64();
    took.texts = texts.into_values().collect();
    took.tokens = took.texts.iter().map(Vec::len).sum();
    Ok(())
}

fn row(rounds: &[Vec<Took>], way: usize, at_once: usize) -> String {
    let rate = |round: &Vec<Took>, way: usize| round[way].tokens as f64 / round[way].seconds;
    let rates = rounds.iter().map(|round| rate(round, way));
    let ratios = rounds.iter().map(|round| rate(round, way) / rate(round, 0));
    let sum = |count: &dyn Fn(&Took) -> u64| -> f64 {
        rounds.iter().map(|round| count(&round[way])).sum::<u64>() as f64
    };
    let per_step = sum(&|took| took.tokens as u64) / sum(&|took| took.steps).max(1.0);
    let accepted: Vec<String> = (0..POSITIONS)
        .map(|position| match sum(&|took| took.drafts) {
            0.0 => "-".into(),
            drafts => format!("{:.3}", sum(&|took| took.accepted[position]) / drafts),
        })
        .collect();
    let least = (0..prompts_of(rounds)).map(|prompt| of_plain(rounds, way, &[prompt]));
    let least = match at_once {
        1 => format!("{:.2}", least.fold(f64::INFINITY, f64::min)),
        // They have no times of their own.
        _ => "-".into(),
    };
    let same = rounds.iter().all(|round| round[way].texts == round[0].texts);
    format!(
        "{:.1} | {:.2} | {least} | {per_step:.2} | {} | {}",
        median(rates.collect()),
        median(ratios.collect()),
        accepted.join(" | "),
        if same { "yes" } else { "NO" }
    )
}

fn prompts_of(rounds: &[Vec<Took>]) -> usize {
    rounds[0][0].ended.len()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
