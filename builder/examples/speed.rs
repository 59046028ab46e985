//! How fast built model folders run on this machine, beside what its memory gives in the same minute.
//!
//! `speed MODEL_DIR... [--prompts FILE --tokenizer KEY] [--rounds N]` prints markdown tables: single rows and passes
//! of several rows against the read bandwidth, prefill, and, with prompts (`{KEY: [{name, ids}]}`), text
//! with and without speculation. Rounds are interleaved and medians of ratios are printed, because the
//! bandwidth of a shared machine drifts.

use anyhow::{Context, Result};
use clap::Parser;
use serde_json::Value;
use spec_build::generate::{Run, run};
use spec_core::engine::{DrafterKind, Engine, SectionKind};
use spec_core::exec::Pool;
use spec_core::runtime::{DraftPolicy, Isa, ModelFolder, Options, Pinning, Request, Runtime};
use spec_core::testing::batch::{Forward, Segment};
use spec_core::testing::cpu::{Arena, Model, read_all};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Rows of the passes that are compared with one row.
const ROWS: [usize; 5] = [1, 2, 3, 5, 9];
/// Tokens in the cache before the passes.
const CONTEXT: usize = 128;
/// Passes of each kind in a round.
const PASSES: usize = 4;
const PREFILL: usize = 512;
const PAGES: u32 = 48;
/// Bytes of a bandwidth sample: far more than caches hold.
const SAMPLE: usize = 256 << 20;
const MAX_TOKENS: usize = 128;

#[derive(Parser)]
struct Args {
    /// Built model folders.
    models: Vec<PathBuf>,
    /// Prompts as token ids.
    #[arg(long)]
    prompts: Option<PathBuf>,
    /// Which of the file's tokenizers.
    #[arg(long, default_value = "qwen2.5-coder-1.5b")]
    tokenizer: String,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Instruction set [default: the best of this machine].
    #[arg(long)]
    isa: Option<Isa>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let pool = Arc::new(Pool::on_machine(None, Pinning::Auto));
    let _pinned = pool.pin_caller();
    let isa = args.isa.unwrap_or_else(Isa::detect);
    println!("{} threads, {isa}\n", pool.threads());
    let mut arena = Arena::new(SAMPLE)?;
    let sample = arena.push(&pool, &vec![1; SAMPLE]);
    let bandwidth = || {
        let start = Instant::now();
        read_all(&pool, &sample);
        SAMPLE as f64 / start.elapsed().as_secs_f64()
    };
    println!(
        "| model | read GB/s | one row, GB/s | of bandwidth | tokens/s | 2 rows | 3 rows | 5 rows | 9 rows | prefill tokens/s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for path in &args.models {
        let folder = ModelFolder::open(path)?;
        passes(&name(path), &folder.target, isa, &pool, args.rounds, &bandwidth)?;
        if let Some(draft) = folder.target.open_drafter()? {
            passes(
                &format!("{} (draft)", name(path)),
                &draft,
                isa,
                &pool,
                args.rounds,
                &bandwidth,
            )?;
        }
    }
    let Some(file) = &args.prompts else { return Ok(()) };
    let prompts = prompts(file, &args.tokenizer)?;
    for path in &args.models {
        let folder = ModelFolder::open(path)?;
        if folder.target.manifest().drafter != DrafterKind::None {
            speculation(&name(path), &folder, isa, &prompts, args.rounds)?;
        }
    }
    Ok(())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Weight bytes that a token reads: everything but an embedding that is not the head.
fn bytes_per_token(engine: &Engine) -> f64 {
    let manifest = engine.manifest();
    let is_read = |name: &str| name != "embed" || manifest.model.tied_head;
    let weights = manifest.sections.iter().filter(|s| s.kind == SectionKind::Weight);
    weights.filter(|s| is_read(&s.name)).map(|s| s.bytes as f64).sum()
}

fn passes(
    name: &str,
    engine: &Engine,
    isa: Isa,
    pool: &Arc<Pool>,
    rounds: usize,
    bandwidth: &dyn Fn() -> f64,
) -> Result<()> {
    let mut model = Model::load(engine, PAGES as usize, isa, Arc::clone(pool))?;
    let pages: Vec<u32> = (0..PAGES).collect();
    let vocab = engine.manifest().model.vocab_size as u32;
    let tokens: Vec<u32> =
        (0..PREFILL as u32).map(|i| (i * 7919 + 13) % vocab.min(20_000)).collect();
    let mut forward = |first_position: usize, rows: usize| -> Result<f64> {
        let tokens = &tokens[..rows];
        let num_logits = if rows == PREFILL { 1 } else { rows };
        let start = Instant::now();
        model.forward(&[Segment {
            tokens,
            first_position,
            pages: &pages,
            prompt_len: 0,
            num_logits,
            tree: &[],
        }])?;
        Ok(start.elapsed().as_secs_f64())
    };
    let (mut read, mut share, mut single) = (Vec::new(), Vec::new(), Vec::new());
    let mut ratios = vec![Vec::new(); ROWS.len()];
    let mut prefill = Vec::new();
    for _ in 0..rounds {
        prefill.push(PREFILL as f64 / forward(0, PREFILL)?);
        let before = bandwidth();
        let mut one = f64::NAN;
        for (idx, &rows) in ROWS.iter().enumerate() {
            let mut seconds = Vec::new();
            for _ in 0..PASSES {
                seconds.push(forward(CONTEXT, rows)?);
            }
            let seconds = median(&mut seconds);
            one = if rows == 1 { seconds } else { one };
            ratios[idx].push(seconds / one);
            if rows == 1 {
                let around = (before + bandwidth()) / 2.0;
                read.push(around / 1e9);
                share.push(bytes_per_token(engine) / seconds / around);
                single.push(seconds);
            }
        }
    }
    let seconds = median(&mut single);
    let shown: Vec<String> =
        ratios[1..].iter_mut().map(|ratio| format!("{:.2}x", median(ratio))).collect();
    println!(
        "| {name} | {:.1} | {:.1} | {:.0} % | {:.1} | {} | {:.0} |",
        median(&mut read),
        bytes_per_token(engine) / seconds / 1e9,
        100.0 * median(&mut share),
        1.0 / seconds,
        shown.join(" | "),
        median(&mut prefill)
    );
    Ok(())
}

struct Prompt {
    name: String,
    ids: Vec<u32>,
}

fn prompts(file: &Path, tokenizer: &str) -> Result<Vec<Prompt>> {
    let text =
        std::fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let all: Value = serde_json::from_str(&text)?;
    let list = all.get(tokenizer).and_then(Value::as_array);
    let list = list.with_context(|| format!("{}: no list `{tokenizer}`", file.display()))?;
    list.iter()
        .map(|prompt| {
            Ok(Prompt {
                name: prompt["name"].as_str().context("a prompt without a name")?.into(),
                ids: serde_json::from_value(prompt["ids"].clone())?,
            })
        })
        .collect()
}

/// Ways to generate that are compared, the first with each of the others.
const WAYS: [(&str, Option<usize>, DraftPolicy); 4] = [
    ("plain", Some(0), DraftPolicy::Fixed),
    ("K=4", Some(4), DraftPolicy::Fixed),
    ("K=8", Some(8), DraftPolicy::Fixed),
    ("auto", None, DraftPolicy::Adaptive),
];

fn speculation(
    name: &str,
    folder: &ModelFolder,
    isa: Isa,
    prompts: &[Prompt],
    rounds: usize,
) -> Result<()> {
    println!(
        "\n{name}: decode tokens/s over {MAX_TOKENS} greedy tokens; medians of {rounds} interleaved rounds, \
         ratios to plain of the same round\n"
    );
    println!(
        "| prompt | plain | K=4 | K=8 | auto | accepted/drafted K=4 | auto | steps K=4 | auto | same tokens |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mut runtimes = Vec::new();
    for (_, _, draft_policy) in WAYS {
        let isa = Some(isa);
        let options = Options { draft_policy, isa, kv_bytes: Some(1 << 30), ..Options::default() };
        runtimes.push(Runtime::load(&folder.target, &options)?);
    }
    let mut all = Row::new("**all**", rounds);
    for prompt in prompts {
        let mut row = Row::new(&prompt.name, rounds);
        for round in 0..rounds {
            let mut first: Option<Vec<u32>> = None;
            for (way, runtime) in runtimes.iter_mut().enumerate() {
                let request = Request {
                    prompt: prompt.ids.clone().into(),
                    max_tokens: MAX_TOKENS,
                    draft_len: WAYS[way].1,
                    ..Request::default()
                };
                let done = run(runtime, request, |_| Ok(true))?;
                row.seconds[way][round] += done.decode.as_secs_f64();
                row.same &= *first.get_or_insert_with(|| done.tokens()) == done.tokens();
                row.num_tokens = done.emitted.len() as f64 - 1.0;
                row.drafts[way] = counts(&done);
            }
        }
        row.print();
        all.add(&row);
    }
    all.print();
    Ok(())
}

/// Accepted, drafted, steps.
fn counts(run: &Run) -> [u64; 3] {
    [run.counters.accepted, run.counters.drafted, run.counters.steps]
}

/// A prompt, or all of them.
struct Row {
    name: String,
    num_tokens: f64,
    /// By way and round.
    seconds: Vec<Vec<f64>>,
    drafts: [[u64; 3]; WAYS.len()],
    same: bool,
}

impl Row {
    fn new(name: &str, rounds: usize) -> Self {
        let seconds = vec![vec![0.0; rounds]; WAYS.len()];
        Self { name: name.into(), num_tokens: 0.0, seconds, drafts: Default::default(), same: true }
    }

    fn add(&mut self, other: &Row) {
        self.num_tokens += other.num_tokens;
        self.same &= other.same;
        for (sums, values) in self.seconds.iter_mut().zip(&other.seconds) {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        for (sums, values) in self.drafts.iter_mut().zip(&other.drafts) {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
    }

    fn print(&self) {
        let plain = &self.seconds[0];
        let way = |seconds: &Vec<f64>| {
            let rate = self.num_tokens / median(&mut seconds.clone());
            let mut ratios: Vec<f64> =
                plain.iter().zip(seconds).map(|(plain, own)| plain / own).collect();
            format!("{rate:.1} ({:.2}x)", median(&mut ratios))
        };
        let shown: Vec<String> = self.seconds[1..].iter().map(way).collect();
        let rate = self.num_tokens / median(&mut plain.clone());
        let [_, fixed, _, auto] = self.drafts;
        println!(
            "| {} | {rate:.1} | {} | {}/{} | {}/{} | {} | {} | {} |",
            self.name,
            shown.join(" | "),
            fixed[0],
            fixed[1],
            auto[0],
            auto[1],
            fixed[2],
            auto[2],
            if self.same { "yes" } else { "NO" }
        );
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
