//! What look-up brings where requests resemble each other, beside plain decoding in the same round.
//!
//! `lookup MODEL_DIR --prompts FILE.jsonl [--num N] [--samples N] [--rounds N]` asks each prompt (`{"prompt"}` as it is, or
//! the first of `{"turns"}` as a chat) in turn: all of them once, all of them once more, and then several seeded samples of
//! each. Every look-up begins a round with nothing known. Rates are of decoding; texts are compared with plain ones.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::Value;
use spec_build::generate::run;
use spec_core::runtime::{DraftPolicy, Lookup, ModelFolder, Options, Request, Runtime};
use spec_core::sampling::SamplingParams;
use spec_core::tokenizer::{Conversation, Tokenizer};
use std::path::{Path, PathBuf};

const TEMPERATURE: f32 = 0.8;

#[derive(Parser)]
struct Args {
    /// A model folder that was built with any drafter.
    model: PathBuf,
    /// One JSON object a line.
    #[arg(long)]
    prompts: PathBuf,
    /// Prompts of the file.
    #[arg(long, default_value_t = 12)]
    num: usize,
    /// Seeded samples of each prompt.
    #[arg(long, default_value_t = 4)]
    samples: u64,
    /// Tokens of each answer at most.
    #[arg(long, default_value_t = 96)]
    tokens: usize,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// What a workload took with one look-up.
#[derive(Default)]
struct Took {
    seconds: f64,
    tokens: usize,
    drafted: u64,
    accepted: u64,
    texts: Vec<Vec<u32>>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let folder = ModelFolder::open(&args.model)?;
    let workloads = workloads(&args, &prompts(&args, &folder.tokenizer)?);
    println!("| workload | look-up | tokens/s | of plain | accepted of drafted | same texts |");
    println!("|---|---|---|---|---|---|");
    let lookups = [Lookup::Off, Lookup::Ngram, Lookup::Suffix];
    let mut rounds: Vec<Vec<Vec<Took>>> = Vec::new();
    for _ in 0..args.rounds {
        let took = lookups.iter().map(|&lookup| round(&folder, lookup, &workloads));
        rounds.push(took.collect::<Result<_>>()?);
    }
    for (at, (name, _)) in workloads.iter().enumerate() {
        for (idx, lookup) in lookups.iter().enumerate() {
            let rate = |round: &Vec<Vec<Took>>, idx: usize| {
                round[idx][at].tokens as f64 / round[idx][at].seconds
            };
            let rates = rounds.iter().map(|round| rate(round, idx));
            let ratios = rounds.iter().map(|round| rate(round, idx) / rate(round, 0));
            let of_all = |count: fn(&Took) -> u64| -> u64 {
                rounds.iter().map(|round| count(&round[idx][at])).sum()
            };
            let same = rounds.iter().all(|round| round[idx][at].texts == round[0][at].texts);
            println!(
                "| {name} | {} | {:.1} | {:.2} | {} of {} | {} |",
                if idx == 0 { "plain" } else { lookup.name() },
                median(rates.collect()),
                median(ratios.collect()),
                of_all(|took| took.accepted),
                of_all(|took| took.drafted),
                if same { "yes" } else { "NO" },
            );
        }
    }
    Ok(())
}

/// All workloads one after the other, in one runtime.
fn round(
    folder: &ModelFolder,
    lookup: Lookup,
    workloads: &[(String, Vec<Request>)],
) -> Result<Vec<Took>> {
    let options = Options {
        lookup: Some(lookup),
        draft_policy: DraftPolicy::Adaptive,
        max_batch_size: Some(1),
        ..Options::default()
    };
    let mut runtime = Runtime::load(&folder.target, &options)?;
    let _pinned = runtime.pin_caller();
    let took = |(_, requests): &(String, Vec<Request>)| {
        let mut took = Took::default();
        for request in requests {
            let draft_len = (lookup == Lookup::Off).then_some(0);
            let run = run(&mut runtime, Request { draft_len, ..request.clone() }, |_| Ok(true))?;
            took.seconds += run.decode.as_secs_f64();
            took.tokens += run.emitted.len().saturating_sub(1);
            took.drafted += run.counters.drafted;
            took.accepted += run.counters.accepted;
            took.texts.push(run.tokens());
        }
        Ok(took)
    };
    workloads.iter().map(took).collect()
}

fn workloads(args: &Args, prompts: &[Vec<u32>]) -> Vec<(String, Vec<Request>)> {
    let request = |prompt: &Vec<u32>, sampling: SamplingParams| Request {
        prompt: prompt.clone().into(),
        max_tokens: args.tokens,
        sampling,
        ..Request::default()
    };
    let once: Vec<Request> =
        prompts.iter().map(|prompt| request(prompt, SamplingParams::default())).collect();
    let seeded = |seed: u64| SamplingParams {
        temperature: TEMPERATURE,
        seed: Some(seed),
        ..SamplingParams::default()
    };
    let samples = prompts
        .iter()
        .flat_map(|prompt| (0..args.samples).map(move |seed| request(prompt, seeded(seed))));
    vec![
        (format!("{} prompts", prompts.len()), once.clone()),
        ("the same again".into(), once),
        (format!("{} samples of each at {TEMPERATURE}", args.samples), samples.collect()),
    ]
}

fn prompts(args: &Args, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    let file = &args.prompts;
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    ensure!(lines.len() >= args.num, "{}: {} prompts", file.display(), lines.len());
    // From the whole file: it is sorted by kinds.
    let lines = (0..args.num).map(|idx| lines[idx * lines.len() / args.num]);
    lines.map(|line| prompt(file, line, tokenizer)).collect()
}

fn prompt(file: &Path, line: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let object: Value = serde_json::from_str(line).with_context(|| file.display().to_string())?;
    if let Some(text) = object["prompt"].as_str() {
        return Ok(tokenizer.encode_prompt(text)?);
    }
    let text = object["turns"][0].as_str().context("a line has neither `prompt` nor `turns`")?;
    let conversation = Conversation::new([("user", text)]);
    Ok(tokenizer.encode_chat(&tokenizer.render_chat(&conversation)?)?)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
