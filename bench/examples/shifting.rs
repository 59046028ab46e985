//! How draft lengths follow a text that changes: a request whose answer repeats its prompt (code), one whose tokens are drawn almost
//! evenly, which nothing can foresee, and the first one again, one after the other in one engine.
//!
//! `shifting MODEL_DIR [--tokens N] [--draft-len 2,4,8]` prints the drafts of each 16 tokens as a plot, then what the three
//! requests take with `auto`, without drafts and with fixed lengths.

use anyhow::{Context, Result};
use clap::Parser;
use spec_build::cli::DraftLen;
use spec_core::runtime::{DraftPolicy, ModelFolder, Options, Request, Runtime};
use spec_core::sampling::SamplingParams;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Tokens of a line of the plot.
const WINDOW: usize = 16;

/// Flattens any distribution.
const HOT: f32 = 50.0;

/// What a text that begins with it several times goes on with.
const REPEATED: &str = "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return \
                        area(width, height) * depth\n\n";

#[derive(Parser)]
struct Args {
    /// A built model folder.
    model: PathBuf,
    /// Tokens of each request.
    #[arg(long, default_value_t = 192)]
    tokens: usize,
    /// Fixed lengths to compare with.
    #[arg(long, value_delimiter = ',', default_value = "2,4,8")]
    draft_len: Vec<usize>,
}

/// A step of a request.
struct Step {
    tokens: usize,
    drafted: u64,
}

/// The three requests, one after the other.
struct Ran {
    /// By request.
    steps: [Vec<Step>; 3],
    seconds: [f64; 3],
    texts: Vec<u32>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let folder = ModelFolder::open(&args.model)?;
    let auto = run(&args, &folder, DraftLen::Auto)?;
    println!("draft tokens a step, of each {WINDOW} tokens:");
    for (steps, name) in
        auto.steps.iter().zip(["repeats its prompt", "drawn evenly", "repeats again"])
    {
        println!("\n  {name}");
        plot(steps);
    }
    println!(
        "\n| drafts | repeats its prompt, tokens/s | drawn evenly | repeats again | same text |"
    );
    println!("|---|---|---|---|---|");
    println!("| auto | {} | |", rates(&args, &auto));
    for len in std::iter::once(0).chain(args.draft_len.iter().copied()) {
        let fixed = run(&args, &folder, DraftLen::Fixed(len))?;
        let same = if fixed.texts == auto.texts { "yes" } else { "NO" };
        println!("| K={len} | {} | {same} |", rates(&args, &fixed));
    }
    Ok(())
}

fn rates(args: &Args, ran: &Ran) -> String {
    ran.seconds.map(|seconds| format!("{:.1}", args.tokens as f64 / seconds)).join(" | ")
}

fn plot(steps: &[Step]) {
    let (mut at, mut tokens, mut drafted, mut count) = (0, 0, 0, 0);
    for (idx, step) in steps.iter().enumerate() {
        tokens += step.tokens;
        drafted += step.drafted;
        count += 1;
        if tokens >= WINDOW || idx + 1 == steps.len() {
            let mean = drafted as f64 / f64::from(count);
            println!("  {at:4}  {:4.1}  {}", mean, "#".repeat((4.0 * mean).round() as usize));
            at += tokens;
            (tokens, drafted, count) = (0, 0, 0);
        }
    }
}

fn run(args: &Args, folder: &ModelFolder, len: DraftLen) -> Result<Ran> {
    let (draft_policy, draft_len) = match len {
        DraftLen::Auto => (DraftPolicy::Adaptive, None),
        DraftLen::Fixed(len) => (DraftPolicy::Fixed, Some(len)),
    };
    let options = Options { draft_policy, max_batch_size: Some(1), ..Options::default() };
    let mut runtime = Runtime::load(&folder.target, &options)?;
    let _pinned = runtime.pin_caller();
    let tokens = folder.tokenizer.encode_prompt(&REPEATED.repeat(4))?;
    let prompt = Arc::new(tokens);
    let request = |temperature, draft_len, max_tokens| Request {
        prompt: Arc::clone(&prompt),
        max_tokens,
        draft_len,
        ignore_eos: true,
        sampling: SamplingParams { temperature, seed: Some(1), ..SamplingParams::default() },
        ..Request::default()
    };
    // The cache has the prompt when the clock starts.
    answer(&mut runtime, request(0.0, Some(0), 1))?;
    let mut ran = Ran { steps: Default::default(), seconds: [0.0; 3], texts: Vec::new() };
    for (idx, temperature) in [0.0, HOT, 0.0].into_iter().enumerate() {
        let start = Instant::now();
        let (steps, text) = answer(&mut runtime, request(temperature, draft_len, args.tokens))?;
        ran.seconds[idx] = start.elapsed().as_secs_f64();
        ran.steps[idx] = steps;
        ran.texts.extend(text);
    }
    Ok(ran)
}

fn answer(runtime: &mut Runtime, request: Request) -> Result<(Vec<Step>, Vec<u32>)> {
    runtime.add(request)?;
    let (mut steps, mut text, mut drafted) = (Vec::new(), Vec::new(), 0);
    while !runtime.is_idle() {
        let step = runtime.step();
        if let Some(error) = step.failure {
            return Err(error).context("answering");
        }
        for event in step.events {
            text.extend(event.emitted.iter().map(|emitted| emitted.token));
            let now = event.counters.drafted;
            steps.push(Step { tokens: event.emitted.len(), drafted: now - drafted });
            drafted = now;
        }
    }
    Ok((steps, text))
}
